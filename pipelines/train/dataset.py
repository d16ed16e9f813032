"""The data command: label tracks, rendered dialogue clips and widely sampled frames, as npz files.

    out/tracks/{train,test}_0000.npz   sound and labels of one dialogue (`Track.arrays`)
    out/clips/{train,test}_000_00.npz  consecutive frames of a dialogue with sound and labels
    out/wide/0000.npz                  independent frames, every label drawn widely

Files with pictures hold at most `MAX_FRAMES` frames: `frames` uint8 [F, H, W, 3], the labels of
`FaceTrack` (`weights`, `pose`, `gaze`, `breath`, `controls`), and the column names. A file's
content depends on the seed, its index and the sizes alone; it appears under its name only when
it is complete, and one that exists is not made again. So the command can be stopped and repeated,
and workers share one list of files.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipelines.motion import (
    CONTROL_NAMES,
    EVENTS,
    FPS,
    FRAMES_PER_UNIT,
    STATES,
)
from pipelines.train.speech import SAMPLE_RATE
from pipelines.train.tracks import SPLITS, Track, make_track
from pipelines.train.visemes import FACE_UNITS, VISEMES, FaceTrack
from pipelines.train.wide import wide_labels
from rtgen.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from pipelines.train.renderer import HeadRenderer

__all__ = [
    "MAX_FRAMES",
    "Job",
    "add_arguments",
    "clip_jobs",
    "wide_jobs",
    "run",
    "save_npz",
    "track_jobs",
]

logger = logging.getLogger(__name__)

MAX_FRAMES = 248  # a whole number of units below 250
_TRACK_S = 40.0
_TEST_TRACK_SHARE = 0.05
_SAMPLES_PER_FRAME = SAMPLE_RATE // FPS

Arrays = Mapping[str, npt.NDArray[np.generic]]


def save_npz(path: Path, arrays: Arrays) -> None:
    """Writes an npz file that is either absent or whole under its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _names() -> dict[str, npt.NDArray[np.generic]]:
    """Column names that make a file readable without this code."""
    columns = {
        "face_units": FACE_UNITS,
        "control_names": CONTROL_NAMES,
        "state_names": STATES,
        "event_names": EVENTS,
        "viseme_names": VISEMES,
    }
    return {key: np.array(names, dtype=np.str_) for key, names in columns.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One file to make.

    Attributes:
        path: where it goes.
        kind: "track", "clip" or "wide".
        split: of the track or clip.
        seconds: length of the whole track or clip.
        seed: of the track, or of the wide frames.
        first: first frame of the track that this file shows.
        num_frames: pictures in this file.
        head: identity, a key of `pipelines.train.head.HEADS`.
        art: folder of the art packages.
        size: picture size in pixels.
    """

    path: Path
    kind: str
    split: str = "train"
    seconds: float = 0.0
    seed: int = 0
    first: int = 0
    num_frames: int = 0
    head: str = ""
    art: Path = Path()
    size: int = 256


def track_jobs(out_dir: Path, split: str, count: int, seconds: float, seed: int) -> list[Job]:
    """Returns the jobs of `count` label tracks of `seconds` each."""
    return [
        Job(
            path=out_dir / "tracks" / f"{split}_{index:04d}.npz",
            kind="track",
            split=split,
            seconds=seconds,
            seed=_seed("track", split, seed, index),
        )
        for index in range(count)
    ]


def clip_jobs(
    out_dir: Path,
    head: str,
    *,
    art: Path,
    split: str,
    count: int,
    seconds: float,
    seed: int,
    size: int = 256,
) -> list[Job]:
    """Returns the jobs of `count` dialogue clips of `seconds` each, cut into files."""
    num_frames = int(seconds * FPS / FRAMES_PER_UNIT + 1e-9) * FRAMES_PER_UNIT
    return [
        Job(
            path=out_dir / "clips" / f"{split}_{index:03d}_{part:02d}.npz",
            kind="clip",
            split=split,
            seconds=seconds,
            seed=_seed("clip", split, seed, index),
            first=first,
            num_frames=min(MAX_FRAMES, num_frames - first),
            head=head,
            art=art,
            size=size,
        )
        for index in range(count)
        for part, first in enumerate(range(0, num_frames, MAX_FRAMES))
    ]


def wide_jobs(
    out_dir: Path, head: str, *, art: Path, count: int, seed: int, size: int = 256
) -> list[Job]:
    """Returns the jobs of `count` independent frames with widely drawn labels."""
    return [
        Job(
            path=out_dir / "wide" / f"{index:04d}.npz",
            kind="wide",
            seed=_seed("wide", "train", seed, index),
            num_frames=min(MAX_FRAMES, count - index * MAX_FRAMES),
            head=head,
            art=art,
            size=size,
        )
        for index in range(-(-count // MAX_FRAMES))
    ]


def _seed(kind: str, split: str, seed: int, index: int) -> int:
    """Seed of one file: no two kinds, splits or indices share one."""
    key = (("track", "clip", "wide").index(kind), SPLITS.index(split), index)
    words = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def _face_arrays(face: FaceTrack, part: slice) -> dict[str, npt.NDArray[np.generic]]:
    names = ("weights", "pose", "gaze", "breath", "controls")
    return {name: getattr(face, name)[part] for name in names}


def _track_part(track: Track, first: int, num_frames: int) -> dict[str, npt.NDArray[np.generic]]:
    """The arrays of a track for a range of its frames; times stay those of the whole track."""
    part = slice(first, first + num_frames)
    sound = slice(first * _SAMPLES_PER_FRAME, (first + num_frames) * _SAMPLES_PER_FRAME)
    whole = track.arrays()
    whole.update(_face_arrays(track.face, part))
    whole.update(state=whole["state"][part], event=whole["event"][part])
    whole.update(audio=whole["audio"][sound], first_frame=np.array(first, np.int64))
    return whole


@functools.lru_cache(maxsize=1)
def _renderer(head: str, art: Path, size: int) -> HeadRenderer:
    """The renderer of this process; the context is made once and lives as long as the process."""
    from pipelines.train.art import find_art
    from pipelines.train.head import HEADS
    from pipelines.train.renderer import HeadRenderer

    if head not in HEADS:
        raise ConfigError(f"head must be one of {tuple(HEADS)}, got {head!r}")
    return HeadRenderer(HEADS[head], find_art(art), size=size, samples=4)


def _pictures(job: Job, face: FaceTrack, part: slice) -> npt.NDArray[np.uint8]:
    """Renders frames `part` of the labels: uint8 [F, H, W, 3]."""
    renderer = _renderer(job.head, job.art, job.size)
    frames = [
        renderer.render(
            dict(zip(FACE_UNITS, face.weights[i].tolist(), strict=True)),
            tuple(face.pose[i].tolist()),
            tuple(face.gaze[i].tolist()),
            float(face.breath[i]),
        )
        for i in range(part.start, part.stop)
    ]
    return np.stack(frames)


def make_file(job: Job) -> bool:
    """Makes the file of a job; returns False if it was there already."""
    if job.path.exists():
        return False
    if job.kind == "wide":
        face = wide_labels(job.num_frames, job.seed)
        arrays = _face_arrays(face, slice(None))
        arrays["frames"] = _pictures(job, face, slice(0, job.num_frames))
    else:
        track = make_track(job.split, job.seconds, job.seed)
        arrays = track.arrays()
        if job.kind == "clip":
            arrays = _track_part(track, job.first, job.num_frames)
            part = slice(job.first, job.first + job.num_frames)
            arrays["frames"] = _pictures(job, track.face, part)
    save_npz(job.path, {**arrays, **_names()})
    return True


def _start_worker() -> None:
    """One software-rendering thread a worker: several workers scale better than several threads."""
    os.environ["LP_NUM_THREADS"] = "1"


def make_files(jobs: Iterable[Job], workers: int) -> None:
    """Makes every missing file, in the order given.

    Args:
        jobs: what to make.
        workers: processes; 1 works in this one.
    """
    missing = [job for job in jobs if not job.path.exists()]
    began = time.monotonic()
    logger.info("%d files to make", len(missing))
    if workers == 1:
        _start_worker()
        for count, job in enumerate(missing, 1):
            make_file(job)
            _log(count, len(missing), job, began)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
        futures = {pool.submit(make_file, job): job for job in missing}
        try:
            for count, future in enumerate(as_completed(futures), 1):
                future.result()
                _log(count, len(missing), futures[future], began)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _log(count: int, total: int, job: Job, began: float) -> None:
    logger.info("%d/%d %s after %.0f s", count, total, job.path.name, time.monotonic() - began)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the data command."""
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write to")
    add("--art", type=Path, required=True, help="folder of the art packages")
    add("--head", default="male1", help="identity to render")
    add("--minutes", type=float, default=60.0, help="minutes of label tracks")
    add("--clips", type=int, default=24, help="rendered training dialogues")
    add("--test-clips", type=int, default=3, help="rendered held-out dialogues")
    add("--clip-seconds", type=float, default=9.92, help="length of each dialogue")
    add("--wide", type=int, default=4000, help="independent frames with widely drawn labels")
    add("--size", type=int, default=256, help="picture size in pixels")
    add("--seed", type=int, default=1, help="0 or more; the data depends on it alone")
    add("--workers", type=int, default=2, help="processes")


def plan(args: argparse.Namespace) -> list[Job]:
    """Returns the files that the flags ask for: tracks, held-out clips, then the rest in turn.

    Raises:
        ConfigError: a flag is out of range.
    """
    for name in ("minutes", "clips", "test_clips", "wide", "seed"):
        if getattr(args, name) < 0:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must not be negative, got {getattr(args, name)}")
    if args.workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {args.workers}")
    if args.clip_seconds * FPS < FRAMES_PER_UNIT:
        raise ConfigError(f"--clip-seconds must hold 4 frames (0.16), got {args.clip_seconds}")
    out, num_tracks = args.out, round(args.minutes * 60.0 / _TRACK_S)
    num_test = -int(-num_tracks * _TEST_TRACK_SHARE // 1)
    jobs = track_jobs(out, "train", num_tracks, _TRACK_S, args.seed)
    jobs += track_jobs(out, "test", num_test, _TRACK_S, args.seed)
    clips = functools.partial(
        clip_jobs,
        out,
        args.head,
        art=args.art,
        seconds=args.clip_seconds,
        seed=args.seed,
        size=args.size,
    )
    jobs += clips(split="test", count=args.test_clips)
    train = clips(split="train", count=args.clips)
    wide = wide_jobs(out, args.head, art=args.art, count=args.wide, seed=args.seed, size=args.size)
    # In step with each other, so that a set cut short still holds both kinds.
    ranked = [(i / max(len(train), 1), job) for i, job in enumerate(train)]
    ranked += [(i / max(len(wide), 1), job) for i, job in enumerate(wide)]
    return jobs + [job for _, job in sorted(ranked, key=lambda pair: pair[0])]


def run(args: argparse.Namespace) -> int:
    """Makes the data that the flags ask for and writes `out/data.json` with the flags."""
    jobs = plan(args)
    args.out.mkdir(parents=True, exist_ok=True)
    flags = {
        key: getattr(args, key)
        for key in (
            "head",
            "minutes",
            "clips",
            "test_clips",
            "clip_seconds",
            "wide",
            "size",
            "seed",
        )
    }
    (args.out / "data.json").write_text(json.dumps(flags, indent=2) + "\n")
    if any(job.kind != "track" for job in jobs):
        _ensure_art(args.art)
    make_files(jobs, args.workers)
    return 0


def _ensure_art(folder: Path) -> None:
    """Downloads the art packages unless they are there."""
    from pipelines.train.art import fetch_art, find_art

    try:
        find_art(folder)
    except BackendUnavailable:
        logger.info("downloading the art packages to %s", folder)
        fetch_art(folder)
