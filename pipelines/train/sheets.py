"""Pictures for people: a contact sheet over the waveform, and a clip with its sound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from scipy.signal import resample_poly

from pipelines.motion import FPS, STATES
from pipelines.train.speech import SAMPLE_RATE
from pipelines.train.tracks import Track
from pipelines.train.visemes import FACE_UNITS
from pipelines.video_io import VideoWriter

__all__ = ["SHEET_COLUMNS", "ClipWriter", "contact_sheet", "sheet_frames"]

Frames = npt.NDArray[np.uint8]

SHEET_COLUMNS = 8
_TILE = 192
_WAVE = 40
_OUTPUT_RATE = 48000


def sheet_frames(track: Track, num_frames: int, rows: int = 5) -> list[int]:
    """Which frames a sheet shows.

    Half of the rows are every other frame from the first speech on, the others are spread over
    the first `num_frames` of the track.
    """
    jaw = track.face.weights[:num_frames, FACE_UNITS.index("jawOpen")]
    start = int(np.argmax(jaw > 0.15))
    near = np.minimum(start + 2 * np.arange(rows // 2 * SHEET_COLUMNS), num_frames - 1)
    spread = np.linspace(0, num_frames - 1, (rows - rows // 2) * SHEET_COLUMNS).astype(int)
    return [int(frame) for frame in (*near, *spread)]


def contact_sheet(
    pictures: Sequence[tuple[int, Frames]], track: Track, path: Path, rows: int
) -> None:
    """Saves pictures, each over 160 ms of its sound, with what was asked for.

    Args:
        pictures: pairs of a frame's index and uint8 [H, W, 3], all of one size.
        track: what the frames were made for.
        path: of the PNG file.
        rows: of `SHEET_COLUMNS` pictures.
    """
    jaw = track.face.weights[:, FACE_UNITS.index("jawOpen")]
    height, width = pictures[0][1].shape[:2]
    tall = _TILE * height // width
    size = SHEET_COLUMNS * _TILE, rows * (tall + _WAVE)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for place, (frame, picture) in enumerate(pictures):
        x, y = place % SHEET_COLUMNS * _TILE, place // SHEET_COLUMNS * (tall + _WAVE)
        sheet.paste(Image.fromarray(picture).resize((_TILE, tall)), (x, y))
        state = STATES[int(track.face.state[frame])]
        draw.text((x + 4, y + 3), f"{frame / FPS:.2f} s {state} {jaw[frame]:.2f}", fill="yellow")
        _waveform(draw, track, frame, x, y + tall)
    sheet.save(path)


def _waveform(draw: ImageDraw.ImageDraw, track: Track, frame: int, x: int, y: int) -> None:
    """160 ms of sound, centred on the frame, whose own 40 ms are dark."""
    per_frame = SAMPLE_RATE // FPS
    first = int((frame - 1.5) * per_frame)
    for column in range(_TILE):
        begin = first + column * 4 * per_frame // _TILE
        part = track.audio[max(0, begin) : max(1, begin + 4 * per_frame // _TILE)]
        height = float(np.abs(part).max(initial=0.0)) * _WAVE
        colour = "navy" if 3 * _TILE // 8 <= column < 5 * _TILE // 8 else "lightsteelblue"
        middle = y + _WAVE // 2
        draw.line((x + column, middle - height / 2, x + column, middle + height / 2), fill=colour)


class ClipWriter:
    """Writes frames with the track's sound as MP4, part by part; replaces an existing file.

    Args:
        path: of the file.
        width: pixels.
        height: pixels.
        track: whose sound it is.
    """

    def __init__(self, path: Path, width: int, height: int, track: Track) -> None:
        sound = resample_poly(track.audio, _OUTPUT_RATE // SAMPLE_RATE, 1)
        self._pcm = np.round(np.clip(sound, -1, 1) * 32767).astype(np.int16)
        self._writer = VideoWriter(path, width=width, height=height, fps=FPS)
        self._frames = 0

    def write(self, frames: Frames) -> None:
        """Adds frames uint8 [F, H, W, 3], those that follow."""
        step = _OUTPUT_RATE // FPS
        part = slice(self._frames * step, (self._frames + len(frames)) * step)
        self._writer.write(frames, self._pcm[part])
        self._frames += len(frames)

    def finish(self) -> None:
        """Closes the file, which has its name from now on."""
        self._writer.finish()

    def discard(self) -> None:
        """Removes what was written, unless it is finished."""
        self._writer.discard()
