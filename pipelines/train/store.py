"""Reads what `rtgen train data` wrote: rendered frames with their labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipelines.train.visemes import FaceTrack
from rtgen.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Clip:
    """Rendered frames with their labels.

    Attributes:
        frames: uint8 [F, H, W, 3].
        labels: float32 [F, n] of about unit scale (`FaceTrack.labels`).
        weights: float32 [F, U] over `FACE_UNITS`.
        pose: float32 [F, 3].
        is_sequence: whether the frames follow each other at 25 fps.
        held_out: whether the clip must not be trained on.
    """

    frames: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    pose: npt.NDArray[np.float32]
    is_sequence: bool
    held_out: bool


def face_of(data: dict[str, npt.NDArray[np.generic]]) -> FaceTrack:
    """The labels in a file's arrays."""
    state = data.get("state", np.zeros(len(data["weights"]), np.int8))
    return FaceTrack(
        **{
            k: data[k].astype(np.float32) for k in ("weights", "pose", "gaze", "breath", "controls")
        },
        state=state.astype(np.int8),
    )


def read_npz(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    """All arrays of a file."""
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def track_files(directory: Path, split: str) -> list[Path]:
    """The label tracks of "train" or "test", in the order of names.

    Raises:
        CheckpointError: there is none.
    """
    paths = sorted(directory.glob(f"tracks/{split}_*.npz"))
    if not paths:
        raise CheckpointError(f"no {split} tracks under {directory}; run `rtgen train data` first")
    return paths


def load_clips(directory: Path) -> list[Clip]:
    """Every rendered file, in the order of names.

    Raises:
        CheckpointError: there is none.
    """
    paths = sorted(directory.glob("clips/*.npz")) + sorted(directory.glob("wide/*.npz"))
    if not paths:
        raise CheckpointError(f"no rendered clips under {directory}; run `rtgen train data` first")
    clips = []
    for path in paths:
        data = read_npz(path)
        face = face_of(data)
        clips.append(
            Clip(
                frames=data["frames"].astype(np.uint8, copy=False),
                labels=face.labels(),
                weights=face.weights,
                pose=face.pose,
                is_sequence=path.parent.name == "clips",
                held_out=path.name.startswith("test"),
            )
        )
    return clips
