"""What is kept of every frame of a stream: a few numbers, so that ten minutes fit in memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from pipelines.motion import FRAMES_PER_UNIT
from pipelines.probe import FACE, MOUTH, SIZE, FaceProbe
from rtgen.errors import CheckpointError

__all__ = ["FrameLog", "FrameReader", "lab_of"]

Frames = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]
S = TypeVar("S", bound=np.generic)

REGIONS = ("picture", "face", "mouth")
_CORNER = 40  # pixels of 256: side of the two top corners, which no head reaches
# Linear sRGB to XYZ over the D65 white (IEC 61966-2-1; CIE 15).
_XYZ = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
) / np.array([[0.9505], [1.0], [1.089]])


def lab_of(pixels: Frames) -> npt.NDArray[np.float64]:
    """CIE L*a*b* of sRGB pixels uint8 [..., 3], white D65."""
    x = pixels / 255.0
    linear = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
    t = linear @ _XYZ.T
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    channels = 116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])
    return np.stack(channels, -1)


@dataclass(slots=True)
class FrameLog:
    """Numbers of F frames of one stream; NaN where a frame was not looked at.

    Attributes:
        readings: float32 [F, K], of the probe.
        description: float32 [F, D], the probe's inner layer.
        lab: float32 [F, 3], mean colour of the face crop.
        change: float32 [F, 3], mean absolute difference to the frame before, of 255, over
            `REGIONS`; NaN also where that frame was not looked at.
        backdrop: float32 [F], mean squared difference of the top corners to the reference's.
        detail: float32 [F], mean absolute horizontal step in the face crop.
    """

    readings: FloatArray
    description: FloatArray
    lab: FloatArray
    change: FloatArray
    backdrop: FloatArray
    detail: FloatArray

    @classmethod
    def empty(cls, num_frames: int, probe: FaceProbe) -> FrameLog:
        """A log of frames not yet looked at."""
        widths = (len(probe.names),), (probe.net.out.in_features,), (3,), (len(REGIONS),), (), ()
        return cls(*(np.full((num_frames, *w), np.nan, np.float32) for w in widths))

    def __len__(self) -> int:
        return len(self.detail)

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """Which frames were looked at, [F]."""
        return ~np.isnan(self.detail)

    def part(self, start: int, stop: int) -> FrameLog:
        """Frames start..stop-1."""
        return FrameLog(*(getattr(self, f.name)[start:stop] for f in fields(self)))

    def column(self, names: tuple[str, ...], name: str) -> FloatArray:
        """One reading [F]; `names` are the probe's."""
        return self.readings[:, names.index(name)]

    def save(self, path: Path, key: str) -> None:
        """Writes the log with the key of what made it."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp.npz")
        np.savez_compressed(temporary, key=np.array(key), **arrays)
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path, key: str) -> FrameLog | None:
        """A log written under the same key, None if there is none.

        Raises:
            CheckpointError: the file is damaged.
        """
        if not path.exists():
            return None
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                if str(file["key"]) != key:
                    return None
                return cls(*(file[f.name] for f in fields(cls)))
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise CheckpointError(f"cannot read {path} ({error}); remove it") from error


class FrameReader:
    """Fills a log unit by unit; holds one frame.

    Args:
        num_frames: F.
        probe: reads the pictures.
        backdrop: float32 [h, 2 w, 3], corners to compare with; None for those of the first unit.
    """

    def __init__(
        self, num_frames: int, probe: FaceProbe, backdrop: FloatArray | None = None
    ) -> None:
        self.log = FrameLog.empty(num_frames, probe)
        self.backdrop = backdrop
        self._probe = probe
        self._last: tuple[int, npt.NDArray[np.int16]] | None = None

    def push(self, unit: int, frames: Frames) -> None:
        """Looks at the frames [4, S, S, 3] of a unit."""
        start = unit * FRAMES_PER_UNIT
        part = slice(start, start + len(frames))
        log, size = self.log, frames.shape[1]
        log.readings[part], log.description[part] = self._probe.describe(frames)
        face = _cut(frames, FACE)
        log.lab[part] = lab_of(face[:, ::3, ::3]).mean((1, 2))
        luma = face.mean(-1)
        log.detail[part] = np.abs(np.diff(luma, axis=2)).mean((1, 2))
        side = max(1, _CORNER * size // SIZE)
        corners = np.concatenate([frames[:, :side, :side], frames[:, :side, -side:]], 2)
        if self.backdrop is None:
            self.backdrop = corners.mean(0, dtype=np.float32)
        log.backdrop[part] = ((corners - self.backdrop) ** 2).mean((1, 2, 3))
        self._changes(start, frames)

    def _changes(self, start: int, frames: Frames) -> None:
        signed = frames.astype(np.int16)
        first = start
        if self._last is not None and self._last[0] == start - 1:
            signed, first = np.concatenate([self._last[1][None], signed]), start - 1
        steps = np.abs(np.diff(signed, axis=0))
        views = steps, _cut(steps, FACE), _cut(steps, MOUTH)
        rows = np.stack([view.mean((1, 2, 3)) for view in views], 1)
        self.log.change[first + 1 : first + 1 + len(rows)] = rows
        self._last = start + len(frames) - 1, frames[-1].astype(np.int16)


def _cut(frames: npt.NDArray[S], box: tuple[int, int, int, int]) -> npt.NDArray[S]:
    """A crop given for 256x256 pixels, of frames [F, S, S, 3] of any size."""
    size = frames.shape[1]
    top, bottom, left, right = (max(0, value * size // SIZE) for value in box)
    return frames[:, top : max(bottom, top + 1), left : max(right, left + 1)]
