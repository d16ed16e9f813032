from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("scipy", reason="needs the train extra")

from pipelines.motion import CONTROL_NAMES
from pipelines.train import dataset
from pipelines.train.dataset import (
    MAX_FRAMES,
    Job,
    add_arguments,
    clip_jobs,
    make_file,
    make_files,
    plan,
    run,
    save_npz,
    track_jobs,
    wide_jobs,
)
from pipelines.train.speech import is_available
from pipelines.train.tracks import make_track
from pipelines.train.visemes import FACE_UNITS, FaceTrack
from pipelines.train.wide import wide_labels
from rtgen.errors import BackendUnavailable, ConfigError


def need_voices() -> None:
    missing = [p for p in ("espeak", "festival", "flite") if not is_available(p)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.fixture
def voices() -> None:
    need_voices()


@pytest.fixture
def art(voices: None) -> Path:
    folder = os.environ.get("RTGEN_ART_DIR")
    if not folder:
        pytest.skip("RTGEN_ART_DIR names no folder with the MakeHuman art")
    gl = pytest.importorskip("pipelines.train.gl", reason="needs the train extra")
    try:
        gl.make_context().release()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return Path(folder)


def flags(*values: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--out", "out", "--art", "art", *values])


def load(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def assert_same_file(one: Path, two: Path) -> None:
    a, b = load(one), load(two)
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


class Unwritable(list[float]):
    """An array-like that fails when it is read, as a full disk does in the middle of a file."""

    def __array__(self, dtype: object = None, copy: object = None) -> npt.NDArray[np.float64]:
        raise OSError("no space left")


def is_atomic(save: object, folder: Path) -> bool:
    """Whether a save that fails half way leaves the old file and no other."""
    path = folder / "a.npz"
    save_npz(path, {"x": np.arange(3)})
    with pytest.raises(OSError, match="no space"):
        save(path, {"x": np.arange(9), "y": Unwritable()})  # type: ignore[operator]
    try:
        return np.array_equal(load(path)["x"], np.arange(3)) and list(folder.iterdir()) == [path]
    except (KeyError, OSError, ValueError):
        return False


def test_a_failed_save_leaves_the_old_file_alone(tmp_path: Path) -> None:
    assert is_atomic(save_npz, tmp_path)


def test_planted_save_in_place_is_caught(tmp_path: Path) -> None:
    def in_place(path: Path, arrays: dict[str, npt.NDArray[np.generic]]) -> None:
        with path.open("wb") as file:
            file.write(b"PK")
            np.savez(file, **arrays)  # type: ignore[arg-type]

    assert not is_atomic(in_place, tmp_path)


def test_the_plan_has_the_numbers_asked_for() -> None:
    jobs = plan(flags("--minutes", "4", "--clips", "5", "--clip-seconds", "12", "--wide", "600"))
    assert len({job.path for job in jobs}) == len(jobs)
    tracks = [job for job in jobs if job.kind == "track"]
    assert sum(job.seconds for job in tracks if job.split == "train") == 240.0
    assert sum(job.split == "test" for job in tracks) == 1
    for split, count in (("train", 5), ("test", 3)):
        clips = [job for job in jobs if job.kind == "clip" and job.split == split]
        assert sum(job.num_frames for job in clips) == count * 300
        assert len({job.seed for job in clips}) == count
    wide = [job for job in jobs if job.kind == "wide"]
    assert [job.num_frames for job in wide] == [248, 248, 104]
    assert max(job.num_frames for job in jobs) <= MAX_FRAMES <= 250
    assert all(job.num_frames % 4 == 0 for job in jobs if job.kind == "clip")


def test_a_larger_plan_begins_with_the_files_of_the_smaller() -> None:
    small = plan(flags("--minutes", "2", "--clips", "2", "--wide", "496"))
    large = plan(flags("--minutes", "8", "--clips", "9", "--wide", "1240"))
    assert set(small) <= set(large)


def test_clips_and_wide_frames_are_made_in_step() -> None:
    kinds = [job.kind for job in plan(flags("--minutes", "0", "--test-clips", "0"))]
    half = kinds[: len(kinds) // 2]
    assert abs(half.count("clip") - 12) <= 1
    assert abs(half.count("wide") - 8) <= 1


@pytest.mark.parametrize(
    "values",
    [("--minutes", "-1"), ("--wide", "-4"), ("--workers", "0"), ("--clip-seconds", "0.1")],
)
def test_flags_out_of_range_are_refused(values: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=values[0]):
        plan(flags(*values))


def short_tracks(folder: Path) -> list[Job]:
    return track_jobs(folder, "train", 3, 3.2, 7)


@pytest.mark.usefixtures("voices")
def test_files_that_exist_are_not_made_again(tmp_path: Path) -> None:
    jobs = short_tracks(tmp_path)
    assert make_file(jobs[1])
    before = jobs[1].path.stat().st_mtime_ns
    make_files(jobs, workers=1)
    assert jobs[1].path.stat().st_mtime_ns == before
    assert not make_file(jobs[1])
    assert sorted(p.name for p in (tmp_path / "tracks").iterdir()) == [
        "train_0000.npz", "train_0001.npz", "train_0002.npz",
    ]  # fmt: skip


@pytest.mark.usefixtures("voices")
def test_a_file_depends_on_seed_and_index_alone(tmp_path: Path) -> None:
    forwards, backwards = short_tracks(tmp_path / "a"), short_tracks(tmp_path / "b")
    make_files(forwards, workers=1)
    make_files(backwards[::-1], workers=1)
    for one, two in zip(forwards, backwards, strict=True):
        assert_same_file(one.path, two.path)
    first, second = (load(job.path)["audio"] for job in forwards[:2])
    assert not np.array_equal(first, second)


@pytest.mark.slow
@pytest.mark.usefixtures("voices")
def test_two_workers_make_the_same_files_as_one(tmp_path: Path) -> None:
    alone, shared = short_tracks(tmp_path / "a"), short_tracks(tmp_path / "b")
    make_files(alone, workers=1)
    make_files(shared, workers=2)
    for one, two in zip(alone, shared, strict=True):
        assert_same_file(one.path, two.path)


@pytest.mark.usefixtures("voices")
def test_track_files_can_be_read_without_this_code(tmp_path: Path) -> None:
    job = short_tracks(tmp_path)[0]
    make_file(job)
    data = load(job.path)
    assert data["weights"].shape == (80, len(data["face_units"]))
    assert data["controls"].shape == (80, len(data["control_names"]))
    assert data["audio"].shape == (80 * 640,)
    assert data["face_units"].tolist() == list(FACE_UNITS)


@pytest.mark.usefixtures("voices")
def test_run_makes_tracks_without_any_art(tmp_path: Path) -> None:
    args = flags("--minutes", "0", "--clips", "0", "--test-clips", "0", "--wide", "0")
    args.out = tmp_path / "data"
    run(args)
    assert [p.name for p in args.out.iterdir()] == ["data.json"]


@pytest.fixture(scope="module")
def wide() -> FaceTrack:
    need_voices()
    return wide_labels(2000, 3)


def test_wide_labels_cover_more_than_live_motion(wide: FaceTrack) -> None:
    live = make_track("train", 40.0, 3).face
    assert (wide.pose.std(0) > 1.2 * live.pose.std(0)).all()
    assert (wide.gaze.std(0) > 1.1 * live.gaze.std(0)).all()
    jaw = FACE_UNITS.index("jawOpen")
    assert wide.weights[:, jaw].std() > live.weights[:, jaw].std()
    blink = wide.controls[:, CONTROL_NAMES.index("blink")]
    assert (blink == 0.0).mean() > 0.3
    assert (blink == 1.0).mean() > 0.1
    assert ((blink > 0.2) & (blink < 0.8)).mean() > 0.1


def largest_coupling(labels: FaceTrack) -> float:
    """Largest correlation between two controls, or between one and the jaw."""
    jaw = labels.weights[:, [FACE_UNITS.index("jawOpen")]]
    matrix = np.corrcoef(np.concatenate([labels.controls, jaw], axis=1).T)
    return float(np.abs(matrix - np.eye(len(matrix))).max())


def test_wide_labels_are_independent_of_each_other(wide: FaceTrack) -> None:
    assert largest_coupling(wide) < 0.1
    planted = copy.deepcopy(wide)
    planted.controls[:, 0] += planted.controls[:, 6]
    assert largest_coupling(planted) > 0.1


def test_clip_parts_are_pieces_of_one_dialogue(art: Path, tmp_path: Path) -> None:
    dataset._renderer.cache_clear()
    dataset._start_worker()
    seconds = 10.4  # 260 frames: a part of 248 and one of 12
    whole, rest = clip_jobs(
        tmp_path, "male1", art=art, split="train", count=1, seconds=seconds, seed=1, size=64
    )
    assert (whole.num_frames, rest.num_frames) == (248, 12)
    make_file(rest)
    data = load(rest.path)
    track = make_track("train", seconds, rest.seed)
    assert data["frames"].shape == (12, 64, 64, 3)
    assert data["frames"].dtype == np.uint8
    assert np.array_equal(data["weights"], track.face.weights[248:])
    assert np.array_equal(data["audio"], track.arrays()["audio"][248 * 640 :])
    assert data["first_frame"] == 248


def test_wide_pictures_differ_and_repeat(art: Path, tmp_path: Path) -> None:
    dataset._renderer.cache_clear()
    one = wide_jobs(tmp_path / "a", "male1", art=art, count=6, seed=1, size=64)[0]
    two = wide_jobs(tmp_path / "b", "male1", art=art, count=6, seed=1, size=64)[0]
    make_file(one)
    make_file(two)
    assert_same_file(one.path, two.path)
    frames = load(one.path)["frames"].astype(np.float64)
    assert np.abs(np.diff(frames, axis=0)).mean((1, 2, 3)).min() > 0.5


def test_an_unknown_head_is_refused(art: Path, tmp_path: Path) -> None:
    job = wide_jobs(tmp_path, "nobody", art=art, count=4, seed=1, size=64)[0]
    with pytest.raises(ConfigError, match="head must be one of"):
        make_file(job)
    assert not list(tmp_path.rglob("*"))
