"""Pictures for people: a contact sheet over the waveform, and a clip with its sound."""

from __future__ import annotations

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

Frames = npt.NDArray[np.uint8]

_TILE = 192
_WAVE = 40
_COLUMNS = 8
_OUTPUT_RATE = 48000


def contact_sheet(frames: Frames, track: Track, path: Path, rows: int = 5) -> None:
    """Saves frames in order of time, each over 160 ms of its sound, with what was asked for.

    Half of the rows are consecutive frames from the first speech on, the others spread over the
    whole clip.

    Args:
        frames: uint8 [F, H, W, 3].
        track: what the frames were made for.
        path: of the PNG file.
        rows: of `_COLUMNS` pictures.
    """
    jaw = track.face.weights[:, FACE_UNITS.index("jawOpen")]
    start = int(np.argmax(jaw[: len(frames)] > 0.15))
    dense = min(start, len(frames) - 1) + 2 * np.arange(rows // 2 * _COLUMNS)
    spread = np.linspace(0, len(frames) - 1, (rows - rows // 2) * _COLUMNS).astype(int)
    index = np.concatenate([np.minimum(dense, len(frames) - 1), spread])
    sheet = Image.new("RGB", (_COLUMNS * _TILE, rows * (_TILE + _WAVE)), "white")
    draw = ImageDraw.Draw(sheet)
    for place, frame in enumerate(index):
        x, y = place % _COLUMNS * _TILE, place // _COLUMNS * (_TILE + _WAVE)
        sheet.paste(Image.fromarray(frames[frame]).resize((_TILE, _TILE)), (x, y))
        state = STATES[int(track.face.state[frame])]
        draw.text((x + 4, y + 3), f"{frame / FPS:.2f} s {state} {jaw[frame]:.2f}", fill="yellow")
        _waveform(draw, track, frame, x, y + _TILE)
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


def save_clip(frames: Frames, track: Track, path: Path) -> None:
    """Saves frames with the track's sound as MP4; an existing file is replaced."""
    count, height, width = frames.shape[:3]
    sound = resample_poly(track.audio, _OUTPUT_RATE // SAMPLE_RATE, 1)
    pcm = np.round(np.clip(sound, -1, 1) * 32767).astype(np.int16)
    per_frame = _OUTPUT_RATE // FPS
    with VideoWriter(path, width=width, height=height, fps=FPS) as writer:
        for first in range(0, count, FPS):
            part = frames[first : first + FPS]
            writer.write(part, pcm[first * per_frame : (first + len(part)) * per_frame])
        writer.finish()
