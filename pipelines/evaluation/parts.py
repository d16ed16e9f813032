"""The parts of an evaluation: each shows a scene, keeps a log, and is skipped when that is there.

A log is kept under a key of everything that made it (weights, renderer, probe, scene), so a run
that was cut goes on, and a new model is never judged by an old one's pictures.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pipelines.avatar import AvatarPipeline
from pipelines.evaluation.log import FrameLog, FrameReader
from pipelines.evaluation.regressor import MouthRegressor, regress
from pipelines.evaluation.streams import UNIT_SAMPLES, Marks, Shown, dense, generate, truth
from pipelines.evaluation.variants import Variant, play, write_variant
from pipelines.motion import FPS, FRAMES_PER_UNIT
from pipelines.probe import FaceProbe
from pipelines.train.sheets import SHEET_COLUMNS, ClipWriter, contact_sheet, sheet_frames
from pipelines.train.tracks import Track
from pipelines.train.visemes import FaceTrack

__all__ = ["Pair", "Stage", "digest"]

logger = logging.getLogger(__name__)

Frames = npt.NDArray[np.uint8]


def digest(paths: Iterable[Path], *facts: object) -> str:
    """A key of the contents of files and of facts that JSON can hold."""
    hasher = hashlib.sha256(json.dumps(facts).encode())
    for path in paths:
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class Pair:
    """Logs of one scene: the model's pictures and the truth's, of the same frames."""

    seen: FrameLog
    shown: FrameLog


@dataclass(frozen=True, slots=True)
class Stage:
    """What shows scenes and looks at them.

    Attributes:
        pipeline: the model.
        renderer: labels [F, L] to raw latents [F, c, h, w].
        probe: reads pictures.
        folder: where logs go.
        key: of model, renderer and probe.
        steps: denoising steps, None for the model's default.
        avatar: identity, None for the first.
    """

    pipeline: AvatarPipeline
    renderer: Callable[[Tensor], Tensor]
    probe: FaceProbe
    folder: Path
    key: str
    steps: int | None = None
    avatar: str | None = None

    def pair(
        self, name: str, track: Track, watch: Marks | None = None, pictures: Pictures | None = None
    ) -> Pair:
        """Shows a scene by the model and by its labels, side by side.

        Args:
            name: of the part.
            track: the scene.
            watch: bool [U], units looked at; None for all.
            pictures: what else wants the frames; makes the part run if its files are missing.
        """
        watch = dense(track) if watch is None else watch
        key = self._key(track, watch)
        paths = [self.folder / f"{name}_{kind}.npz" for kind in ("seen", "shown")]
        logs = [FrameLog.load(path, key) for path in paths]
        if logs[0] and logs[1] and (pictures is None or pictures.is_done(key)):
            return Pair(logs[0], logs[1])
        logger.info("%s: %d units, %d looked at", name, len(watch), int(watch.sum()))
        pair = self._look(track, watch, pictures)
        if pictures is not None:
            pictures.finish(key)
        for path, log in zip(paths, (pair.seen, pair.shown), strict=True):
            log.save(path, key)
        return pair

    def _look(self, track: Track, watch: Marks, pictures: Pictures | None) -> Pair:
        """Makes both kinds of pictures unit by unit and reads them."""
        made = generate(self.pipeline, track, steps=self.steps, avatar=self.avatar, watch=watch)
        exact = truth(self.pipeline, track.face.labels(), self.renderer, watch, self.avatar)
        shown = FrameReader(len(track.face), self.probe)
        seen: FrameReader | None = None
        try:
            for (unit, frames), (_, true_frames) in zip(made, exact, strict=True):
                shown.push(unit, true_frames)
                if seen is None:
                    seen = FrameReader(len(track.face), self.probe, shown.backdrop)
                seen.push(unit, frames)
                if pictures is not None:
                    pictures.push(unit, frames, true_frames)
        except BaseException:
            if pictures is not None:
                pictures.discard()
            raise
        assert seen is not None, "a scene has at least one unit"
        return Pair(seen.log, shown.log)

    def heard(self, name: str, track: Track, net: MouthRegressor, watch: Marks) -> FrameLog:
        """The scene with a mouth regressed from its sound, painted as the truth is."""
        weights = regress(net, track.audio, track.face.weights)
        face = FaceTrack(
            weights=weights,
            pose=track.face.pose,
            gaze=track.face.gaze,
            breath=track.face.breath,
            controls=track.face.controls,
            state=track.face.state,
        )
        key = self._key(track, watch, float(weights.sum()))
        shown = truth(self.pipeline, face.labels(), self.renderer, watch, self.avatar)
        return self._log(name, key, len(track.face), shown)

    def variant(self, name: str, track: Track, variant: Variant) -> FrameLog:
        """The scene's sound as a file, played to the engine by a session that speaks."""
        path = write_variant(track.audio, variant, self.folder / name)
        shown = play(self.pipeline, path, seed=track.seed, steps=self.steps, avatar=self.avatar)
        units = len(track.audio) // UNIT_SAMPLES
        # A codec may end a few samples late, in a unit of its own.
        first = itertools.takewhile(lambda pair: pair[0] < units, shown)
        return self._log(name, self._key(track, list(variant)), len(track.face), first)

    def _key(self, track: Track, *facts: object) -> str:
        plain = [fact.tolist() if isinstance(fact, np.ndarray) else fact for fact in facts]
        sound = hashlib.sha256(track.audio.tobytes() + track.face.labels().tobytes()).hexdigest()
        return digest((), self.key, sound, track.event.tolist(), self.steps, self.avatar, plain)

    def _log(self, name: str, key: str, num_frames: int, shown: Shown) -> FrameLog:
        path = self.folder / f"{name}.npz"
        log = FrameLog.load(path, key)
        if log is None:
            logger.info("%s: %d frames", name, num_frames)
            reader = FrameReader(num_frames, self.probe)
            for unit, frames in shown:
                reader.push(unit, frames)
            log = reader.log
            log.save(path, key)
        return log


class Pictures:
    """Contact sheet and side-by-side clip of a scene's first seconds, made as frames come.

    Args:
        track: the scene.
        folder: gets sheet.png and clip.mp4, the truth on the left.
        seconds: of the scene that is shown, from its start.
    """

    def __init__(self, track: Track, folder: Path, seconds: float) -> None:
        self._track, self._folder = track, folder
        self._units = min(len(track.face), round(seconds * FPS)) // FRAMES_PER_UNIT
        self._wanted = sheet_frames(track, self._units * FRAMES_PER_UNIT)
        self._kept: dict[int, Frames] = {}
        self._clip: ClipWriter | None = None

    def is_done(self, key: str) -> bool:
        """Whether the files of that key are there."""
        mark = self._folder / "clip.key"
        return mark.exists() and mark.read_text() == key

    def push(self, unit: int, made: Frames, true: Frames) -> None:
        """Takes the frames [4, H, W, 3] of the next unit."""
        if unit >= self._units:
            return
        if self._clip is None:
            height, width = made.shape[1:3]
            self._clip = ClipWriter(self._folder / "clip.mp4", 2 * width, height, self._track)
        self._clip.write(np.concatenate([true, made], 2))
        for i in range(FRAMES_PER_UNIT):
            if (frame := unit * FRAMES_PER_UNIT + i) in self._wanted:
                self._kept[frame] = np.concatenate([true[i], made[i]], 0)

    def discard(self) -> None:
        """Removes a clip that is not finished."""
        if self._clip is not None:
            self._clip.discard()

    def finish(self, key: str) -> None:
        """Closes the clip and draws the sheet."""
        if self._clip is not None:
            self._clip.finish()
        shown = [frame for frame in self._wanted if frame in self._kept]
        rows = -(-len(shown) // SHEET_COLUMNS)
        contact_sheet(
            [(frame, self._kept[frame]) for frame in shown],
            self._track,
            self._folder / "sheet.png",
            rows=rows,
        )
        (self._folder / "clip.key").write_text(key)


def windows(log: FrameLog) -> Iterator[tuple[int, int]]:
    """Stretches of frames looked at without a gap, of ten seconds and more."""
    seen = np.concatenate([[False], log.seen, [False]])
    edges = np.flatnonzero(np.diff(seen.astype(np.int8)))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if stop - start >= 10 * FPS:
            yield start, stop
