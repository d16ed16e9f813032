"""Writing of finished units to an MP4 file: H.264 picture and AAC sound of equal length.

The file is written under a temporary name in the target's folder and gets its own name only when
it is whole, so that a file with the asked name is never a half one. The index stands at the start
of the file ("faststart"). Encoder delay of the sound (1024 samples) and reordering of the picture
are declared in edit lists: frame n is shown at n / fps and sample n is heard at n / 48000, to the
sample. A fragmented file would survive a power cut but has no edit lists, so its streams are
80 ms and 21 ms late; an interrupted render is finished properly instead.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Self

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, VideoReformatter

from rtgen import __version__
from rtgen.errors import ConfigError, MediaError, ShapeError, StreamClosed

__all__ = ["VideoWriter", "check_output", "partial_path"]

Frames = npt.NDArray[np.uint8]
Int16 = npt.NDArray[np.int16]

AUDIO_BIT_RATE = 128_000
# One encoder thread keeps up with small pictures and leaves the other cores to the model.
ONE_THREAD_PIXELS = 512 * 512
# Matrix coefficients of H.273: what players assume for a picture of that size.
BT709_MATRIX, BT601_MATRIX = 1, 6


def partial_path(path: Path) -> Path:
    """Returns the name under which an interrupted render keeps what was made.

    An earlier file of that name is replaced.
    """
    return path.with_name(f"{path.stem}.partial.mp4")


def check_output(path: str | Path, *, overwrite: bool, source: str | Path | None = None) -> Path:
    """Checks that a video can be written under a name, before any work is done for it.

    Args:
        path: the asked name; its links are followed.
        overwrite: whether an existing file may be replaced.
        source: the input file, which must be another one.

    Returns:
        The path with links resolved.

    Raises:
        MediaError: the name is a folder, not an .mp4, taken, the input, or in a folder that is
            missing or cannot be written to.
    """
    try:
        target = Path(path).resolve()
        status = _status(target)
        same = source is not None and (
            _is_same(target, source) or _is_same(partial_path(target), source)
        )
    except (OSError, ValueError, RuntimeError) as error:  # null characters, loops of links
        raise MediaError(f"{path}: not a usable file name ({error})") from error
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise MediaError(f"{path}: expected a file to write, this is a folder; add a file name")
    if target.suffix.lower() != ".mp4":
        raise MediaError(
            f"{path}: expected a name that ends in .mp4, got {target.suffix or 'no extension'!r}"
        )
    if same:
        raise MediaError(
            f"{path}: output (or the partial output of Ctrl-C) and input are the same file; "
            "choose another output"
        )
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise MediaError(f"{path}: expected a regular file to write, this is a device or pipe")
    if status is not None and not overwrite:
        raise MediaError(f"{path}: the file exists; choose another name or pass --force")
    folder = target.parent
    if not folder.is_dir():
        raise MediaError(f"{path}: the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise MediaError(f"{path}: the folder {folder} cannot be written to")
    return target


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_same(path: Path, other: str | Path) -> bool:
    return path.exists() and os.path.exists(other) and os.path.samefile(path, other)


class VideoWriter:
    """An MP4 file being written; nothing stands under its name before `finish`.

    As a context manager it discards the file unless `finish` was called.

    Args:
        path: the final name; an existing file is replaced by `finish`, see `check_output`.
        width: pixels, even.
        height: pixels, even.
        fps: frames per second, exact.
        sample_rate: of the sound, Hz.
        crf: constant rate factor of x264, 0 (lossless) to 51.
        preset: speed preset of x264.

    Raises:
        ConfigError: a size is odd or not positive.
        MediaError: the temporary file cannot be created.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        width: int,
        height: int,
        fps: Fraction | int,
        sample_rate: int = 48000,
        crf: int = 18,
        preset: str = "veryfast",
    ) -> None:
        if width < 2 or height < 2 or width % 2 or height % 2:
            raise ConfigError(f"H.264 needs an even width and height, got {width}x{height}")
        self.path = Path(path)
        self.width, self.height = width, height
        self.fps = Fraction(fps)
        self.sample_rate = sample_rate
        self.num_frames = 0
        self.num_samples = 0
        self._reformatter = VideoReformatter()
        self._bt709 = height > 576 or width >= 1280
        self._temporary = self._create_temporary()
        try:
            self._container = av.open(
                str(self._temporary), mode="w", format="mp4", options={"movflags": "+faststart"}
            )
            self._open_streams(crf, preset)
        except (av.FFmpegError, ValueError) as error:
            self._temporary.unlink(missing_ok=True)
            raise MediaError(f"{path}: cannot set up H.264 and AAC in MP4 ({error})") from error
        self._open = True

    def _create_temporary(self) -> Path:
        temporary = self.path.absolute().parent / f".rtgen-{secrets.token_hex(6)}.mp4.part"
        try:
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except OSError as error:
            raise MediaError(
                f"{self.path}: cannot create a file in {temporary.parent} ({error.strerror})"
            ) from error
        return temporary

    def _open_streams(self, crf: int, preset: str) -> None:
        self._container.metadata["comment"] = f"Synthetic video made by rtgen {__version__}"
        video = self._container.add_stream(
            "libx264", rate=self.fps, options={"crf": str(crf), "preset": preset}
        )
        video.width, video.height, video.pix_fmt = self.width, self.height, "yuv420p"
        context = video.codec_context
        context.time_base = 1 / self.fps
        context.gop_size = round(2 * self.fps)
        context.thread_count = 1 if self.width * self.height <= ONE_THREAD_PIXELS else 0
        # The network's RGB has sRGB's primaries; only the matrix depends on the size.
        context.color_range = ColorRange.MPEG
        context.color_primaries = ColorPrimaries.BT709
        context.color_trc = ColorTrc.BT709
        context.colorspace = BT709_MATRIX if self._bt709 else BT601_MATRIX
        audio = self._container.add_stream("aac", rate=self.sample_rate)
        audio.layout = "mono"
        audio.bit_rate = AUDIO_BIT_RATE
        self._video, self._audio = video, audio

    @property
    def duration_s(self) -> Fraction:
        """Seconds of picture written so far."""
        return self.num_frames / self.fps

    def write(self, frames: Frames, audio: Int16) -> None:
        """Appends frames and exactly the sound that belongs to them.

        Args:
            frames: [F, H, W, 3] uint8, RGB.
            audio: [samples] int16 mono; picture and sound must stay equally long to the sample.

        Raises:
            ShapeError: a wrong shape or dtype, or sound and picture of different length.
            MediaError: the file cannot be written (disk full); it has been removed.
            StreamClosed: after `finish` or `discard`.
        """
        self._check(frames, audio)
        try:
            for image in frames:
                self._container.mux(self._video.encode(self._picture(image)))
            sound = av.AudioFrame.from_ndarray(audio[None], format="s16", layout="mono")
            sound.sample_rate = self.sample_rate
            sound.pts, sound.time_base = self.num_samples, Fraction(1, self.sample_rate)
            self._container.mux(self._audio.encode(sound))
        except (av.FFmpegError, OSError) as error:
            raise self._failed(error) from error
        self.num_samples += len(audio)

    def _check(self, frames: Frames, audio: Int16) -> None:
        expected = (self.height, self.width, 3)
        if frames.ndim != 4 or frames.shape[1:] != expected or frames.dtype != np.uint8:
            raise ShapeError(
                f"frames must be uint8 [F, {self.height}, {self.width}, 3], "
                f"got {frames.dtype} {list(frames.shape)}"
            )
        if audio.ndim != 1 or audio.dtype != np.int16:
            raise ShapeError(f"audio must be int16 [samples], got {audio.dtype} {audio.shape}")
        if not self._open:
            raise StreamClosed(f"{self.path}: the file is finished; open another writer")
        samples = round((self.num_frames + len(frames)) / self.fps * self.sample_rate)
        if self.num_samples + len(audio) != samples:
            raise ShapeError(
                f"{len(frames)} frames need {samples - self.num_samples} samples of sound, "
                f"got {len(audio)}"
            )

    def _picture(self, image: Frames) -> av.VideoFrame:
        picture = self._reformatter.reformat(
            av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24"),
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709 if self._bt709 else Colorspace.ITU601,
            dst_color_range=ColorRange.MPEG,
            interpolation="BICUBIC",
        )
        picture.pts, picture.time_base = self.num_frames, 1 / self.fps
        self.num_frames += 1
        return picture

    def finish(self, path: Path | None = None) -> Path:
        """Writes what the encoders still hold and the index, and gives the file its name.

        Args:
            path: another final name in the same folder (see `partial_path`).

        Returns:
            The final name.

        Raises:
            MediaError: nothing was written, or the file cannot be completed (disk full).
            StreamClosed: after `finish` or `discard`.
        """
        target = path or self.path
        if not self._open:
            raise StreamClosed(f"{target}: the file is finished; open another writer")
        if self.num_frames == 0:
            self.discard()
            raise MediaError(f"{target}: there is no picture to write")
        try:
            self._container.mux(self._video.encode(None))
            self._container.mux(self._audio.encode(None))
            self._open = False
            self._container.close()
            os.replace(self._temporary, target)
        except (av.FFmpegError, OSError) as error:
            raise self._failed(error) from error
        return target

    def discard(self) -> None:
        """Removes the temporary file. Safe to call again, and after `finish`."""
        self._open = False
        with contextlib.suppress(av.FFmpegError, OSError):
            self._container.close()
        self._temporary.unlink(missing_ok=True)

    def _failed(self, error: Exception) -> MediaError:
        self.discard()
        reason = getattr(error, "strerror", None) or error
        return MediaError(f"{self.path}: cannot be written on ({reason}); nothing was kept")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.discard()
