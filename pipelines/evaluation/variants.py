"""The same speech in other clothes: rates, channels, codec, level, through the whole product.

Each variant is written to a file, opened by the reader that serves `rtgen render`, and played to
a session of the engine, so that every resampler between a user's file and the model is measured.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
import numpy.typing as npt
from scipy.signal import resample_poly

from pipelines.audio_reader import SAMPLE_RATE as READ_RATE
from pipelines.audio_reader import AudioReader
from pipelines.avatar import AvatarPipeline
from pipelines.evaluation.streams import Shown
from pipelines.train.speech import SAMPLE_RATE
from rtgen.engine.engine import Engine
from rtgen.errors import BackendUnavailable
from rtgen.types import Grant, SessionSpec, SpeechState

__all__ = ["VARIANTS", "Variant", "play", "write_variant"]

FloatArray = npt.NDArray[np.float32]


class Variant(NamedTuple):
    """How a sound is dressed.

    Attributes:
        rate: Hz of the file.
        channels: 1, or 2 with the voice in both.
        codec: name of the encoder.
        suffix: of the file, which chooses the container.
        gain_db: of the samples, which are clipped at full scale.
    """

    rate: int = SAMPLE_RATE
    channels: int = 1
    codec: str = "pcm_s16le"
    suffix: str = ".wav"
    gain_db: float = 0.0


VARIANTS: dict[str, Variant] = {
    "clean": Variant(),
    "8 kHz": Variant(rate=8000),
    "22.05 kHz": Variant(rate=22050),
    "44.1 kHz": Variant(rate=44100),
    "48 kHz": Variant(rate=48000),
    "stereo": Variant(rate=48000, channels=2),
    "Opus": Variant(rate=48000, codec="libopus", suffix=".ogg"),
    "+12 dB": Variant(gain_db=12.0),
    "-12 dB": Variant(gain_db=-12.0),
}


def write_variant(audio: FloatArray, variant: Variant, stem: Path) -> Path:
    """Writes a sound dressed as a variant.

    Args:
        audio: [n] float32 at 16 kHz.
        variant: how.
        stem: of the file, without its suffix.

    Returns:
        The file.
    """
    path = stem.with_name(stem.name + variant.suffix)
    divisor = int(np.gcd(variant.rate, SAMPLE_RATE))
    sound = resample_poly(audio, variant.rate // divisor, SAMPLE_RATE // divisor)
    loud = np.clip(sound * 10 ** (variant.gain_db / 20), -1, 1)
    pcm = np.round(loud * 32767).astype(np.int16)
    layout = "stereo" if variant.channels == 2 else "mono"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(variant.codec, rate=variant.rate)
        assert isinstance(stream, av.AudioStream)
        stream.layout = layout
        packed = np.repeat(pcm, variant.channels)[None]
        resampler = av.AudioResampler(stream.format.name, layout, variant.rate)
        frame = av.AudioFrame.from_ndarray(packed, format="s16", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = variant.rate, 0, Fraction(1, variant.rate)
        frames = [*resampler.resample(frame), *resampler.resample(None)]
        for part in frames:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return path


def play(
    pipeline: AvatarPipeline, path: Path, *, seed: int, steps: int | None, avatar: str | None
) -> Shown:
    """A speaking session that hears a file from start to end.

    Raises:
        BackendUnavailable: the engine refuses the session.
        MediaError: the file cannot be read.
    """
    spec = SessionSpec(
        seed=seed,
        num_inference_steps=steps,
        avatar=avatar,
        service_class="offline",
        state=SpeechState.SPEAKING,
    )
    with Engine(pipeline) as engine, AudioReader(path) as reader:
        grant = engine.reserve(spec)
        if not isinstance(grant, Grant):
            raise BackendUnavailable(f"the engine takes no session: {grant.reason}")
        for unit, made in enumerate(grant.session.render(reader.blocks(), READ_RATE)):
            yield unit, made.frames
