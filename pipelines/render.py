"""Offline render: the engine with a file as its sink.

A recording is read, pushed to an offline session and written as it comes back: the reader is at
most some seconds ahead of the writer, and nothing is dropped. Memory does not grow with the length
but for the MP4's index, 5 kB a second. The picture is as long as the sound, which is filled up with
silence to a whole unit.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pipelines.audio_reader import SAMPLE_RATE, AudioReader, check_audio
from pipelines.video_io import VideoWriter, check_output, partial_path
from rtgen.assets import default_model, find_asset
from rtgen.errors import BackendUnavailable, ConfigError
from rtgen.progress import Progress
from rtgen.types import Grant, SessionSpec, SpeechState

if TYPE_CHECKING:
    from pipelines.avatar import AvatarPipeline
    from rtgen.engine.client import EngineSession
    from rtgen.engine.engine import Engine
    from rtgen.engine.lanes import Lanes

__all__ = ["RenderConfig", "RenderJob", "RenderReport", "render"]

logger = logging.getLogger(__name__)

STATES = tuple(state.name.lower() for state in SpeechState)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderConfig:
    """What is to be rendered.

    Attributes:
        audio: the speech: any file with an audio stream.
        out: the .mp4 to write.
        overwrite: replace an existing file, once the new one is whole.
        model: name in the assets or path of a model folder; None for the shipped one.
        avatar: identity, or None for the model's first.
        seed: of noise and motion.
        num_inference_steps: denoising steps per unit, or None for the model's default.
        state: what the face does where nobody speaks, see `SpeechState`.
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: "auto", "float32", "bfloat16" or "float16".
    """

    audio: str | Path
    out: str | Path
    overwrite: bool = False
    model: str | Path | None = None
    avatar: str | None = None
    seed: int = 0
    num_inference_steps: int | None = None
    state: str = "idle"
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ConfigError(f"state must be one of {', '.join(STATES)}, got {self.state!r}")
        self.spec  # noqa: B018  (raises if seed or steps are out of range)

    @property
    def spec(self) -> SessionSpec:
        """The session to reserve."""
        return SessionSpec(
            avatar=self.avatar,
            seed=self.seed,
            num_inference_steps=self.num_inference_steps,
            service_class="offline",
            state=SpeechState[self.state.upper()],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderReport:
    """What was made.

    Attributes:
        path: the file, or None if the render was stopped before the first unit.
        is_partial: whether it was stopped before the end.
        num_frames: pixel frames written.
        width: pixels.
        height: pixels.
        fps: frames per second.
        wall_s: seconds from the first unit's request to the finished file; loading not counted.
    """

    path: Path | None
    is_partial: bool
    num_frames: int
    width: int
    height: int
    fps: Fraction
    wall_s: float

    @property
    def duration_s(self) -> float:
        """Seconds of video."""
        return float(self.num_frames / self.fps)

    @property
    def real_time_factor(self) -> float:
        """Media seconds per wall second; above 1 is faster than real time."""
        return self.duration_s / self.wall_s if self.wall_s > 0 else 0.0


class RenderJob:
    """A checked recording and a loaded model, ready to `run` once; close it, or use `with`.

    Input and output are checked before the model is loaded.

    Args:
        config: what to render.
        lanes: where the engine's stages run; None for threads.

    Raises:
        RtgenError: whatever is wrong with input, output, model, device or session.
    """

    def __init__(self, config: RenderConfig, *, lanes: Lanes | None = None) -> None:
        self.config = config
        self.target = check_output(config.out, overwrite=config.overwrite, source=config.audio)
        info = check_audio(config.audio)
        self.pipeline = _load_pipeline(config)
        self._engine, self._session = _open_session(self.pipeline, config.spec, lanes)
        unit_s = self._session.format.duration
        self.total_s = None if info is None else math.ceil(info.duration_s / unit_s) * unit_s

    def run(
        self,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> RenderReport:
        """Renders to the end, or to the unit during which `stop` first returns True.

        A stopped render is finished as a playable file under another name (`partial_path`); any
        error, a KeyboardInterrupt among them, leaves no file.

        Args:
            on_progress: told after every unit.
            stop: asked after every unit.

        Raises:
            RtgenError: damaged input, a full disk, a failed session.
        """
        unit_format = self._session.format
        width, height, fps = unit_format.width, unit_format.height, unit_format.fps
        logger.info("rendering %s", self.target)
        start_s = time.perf_counter()
        is_stopped = False
        with (
            VideoWriter(self.target, width=width, height=height, fps=fps) as writer,
            AudioReader(self.config.audio) as reader,
        ):
            for unit in self._session.render(reader.blocks(), SAMPLE_RATE):
                writer.write(unit.frames, unit.audio)
                if on_progress is not None:
                    on_progress(self._progress(writer, time.perf_counter() - start_s))
                if stop is not None and stop() and writer.duration_s != self.total_s:
                    is_stopped = True
                    break
            path = None
            if writer.num_frames or not is_stopped:
                path = writer.finish(partial_path(self.target) if is_stopped else None)
            num_frames = writer.num_frames
        return RenderReport(
            path=path,
            is_partial=is_stopped,
            num_frames=num_frames,
            width=width,
            height=height,
            fps=fps,
            wall_s=time.perf_counter() - start_s,
        )

    def _progress(self, writer: VideoWriter, wall_s: float) -> Progress:
        total_s = None if self.total_s is None else float(self.total_s)
        return Progress(done_s=float(writer.duration_s), total_s=total_s, wall_s=wall_s)

    def close(self) -> None:
        """Ends the session and the engine. Safe to call again."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def render(
    config: RenderConfig,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> RenderReport:
    """Renders a recording; see `RenderJob` and `RenderJob.run`."""
    with RenderJob(config) as job:
        return job.run(on_progress=on_progress, stop=stop)


def _load_pipeline(config: RenderConfig) -> AvatarPipeline:
    folder = find_asset("model", config.model if config.model is not None else default_model())
    from pipelines.serving import avatar_pipeline

    return avatar_pipeline(str(folder), config.device, config.dtype)


def _open_session(
    pipeline: AvatarPipeline, spec: SessionSpec, lanes: Lanes | None
) -> tuple[Engine, EngineSession]:
    from rtgen.engine.engine import Engine

    pipeline.check(spec)
    engine = Engine(pipeline, lanes=lanes)
    grant = engine.reserve(spec)
    if not isinstance(grant, Grant):
        engine.close()
        raise BackendUnavailable(f"the engine takes no session: {grant.reason}")
    return engine, grant.session
