"""Label tracks as the denoiser sees them: latents, state and controls, unit by unit.

The mouth is a control like the others, so what a unit looks like follows from its controls, and
latents are drawn from labels when a batch asks for them. The mouth of a batch is varied on the
way: live lips come from `LipNet`, which is now and then weaker and smoother than the labels are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipelines.motion import FRAMES_PER_UNIT, STATES
from pipelines.train.latent_renderer import LatentRenderer
from pipelines.train.store import face_of, read_npz, track_files
from pipelines.train.visemes import FACE_UNITS, FaceTrack, mouth_of, weights_of_mouth

_MOUTH_PREFIXES = ("jaw", "mouth", "tongue")
_EYE_PREFIXES = ("eye", "brow")
_GAIN = (0.7, 1.15)  # strength of a varied mouth
_SMOOTH = 0.7  # largest share of its three-frame mean in a varied mouth
_SHIVER = 0.015  # standard deviation of noise on it

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class UnitTrack:
    """A label track of U units, four frames each.

    Attributes:
        mouth: fp32 [4 * U, M] over `MOUTH_NAMES`.
        controls: fp32 [4 * U, K] over `CONTROL_NAMES`.
        state: int64 [U].
    """

    mouth: FloatArray
    controls: FloatArray
    state: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.state)

    @classmethod
    def of(cls, face: FaceTrack) -> UnitTrack:
        """The track of labels whose length is a whole number of units."""
        return cls(mouth_of(face), face.controls, face.state[::FRAMES_PER_UNIT].astype(np.int64))


@dataclass(frozen=True, slots=True)
class UnitRun:
    """Consecutive units of B tracks.

    Attributes:
        latents: fp32 [B, U, C, h, w], normalised.
        state: int64 [B, U].
        control: fp32 [B, U, 4 * (K + M)].
    """

    latents: Tensor
    state: Tensor
    control: Tensor


def vary_mouth(mouth: FloatArray, rng: np.random.Generator) -> FloatArray:
    """A mouth [F, M] weaker or stronger, smoother and less steady than it came."""
    padded = np.pad(mouth, ((1, 1), (0, 0)), mode="edge")
    mean = (padded[:-2] + padded[1:-1] + padded[2:]) / 3
    share = np.float32(rng.uniform(0.0, _SMOOTH))
    varied = (mouth + share * (mean - mouth)) * np.float32(rng.uniform(*_GAIN))
    varied += np.float32(_SHIVER) * rng.standard_normal(mouth.shape).astype(np.float32)
    return np.clip(varied, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class UnitTracks:
    """All tracks, and what they have in common.

    Attributes:
        renderer: labels to raw latents.
        train: tracks to train on.
        test: tracks of held-out voices and sentences.
        latent_mean: [C, 1, 1] of the raw latents of the training tracks.
        latent_std: [C, 1, 1].
        reference: [C, h, w], normalised latent of the resting face.
        label_sample: [n, L] labels of random frames.
        mouth_labels: indices of the mouth's labels.
        eye_labels: indices of the eyes' labels.
    """

    renderer: LatentRenderer
    train: list[UnitTrack]
    test: list[UnitTrack]
    latent_mean: Tensor
    latent_std: Tensor
    reference: Tensor
    label_sample: Tensor
    mouth_labels: Tensor
    eye_labels: Tensor

    @property
    def control_std(self) -> Tensor:
        """Standard deviation of each control number over the training tracks, [4 * (K + M)]."""
        frames = [np.concatenate([t.controls, t.mouth], 1) for t in self.train]
        std = torch.from_numpy(np.concatenate(frames)).std(0).clamp_min(1e-3)
        return std.repeat(FRAMES_PER_UNIT)

    @property
    def control_dim(self) -> int:
        """Control numbers per unit."""
        track = self.train[0]
        return FRAMES_PER_UNIT * (track.controls.shape[1] + track.mouth.shape[1])

    @property
    def num_states(self) -> int:
        """Size of the state vocabulary."""
        return len(STATES)

    @torch.no_grad()
    def sample(
        self, rng: np.random.Generator, size: int, units: int, *, held_out: bool = False
    ) -> UnitRun:
        """Random runs of random tracks; the mouths of half of the training runs are varied.

        Args:
            rng: drawn from.
            size: B.
            units: U.
            held_out: from the test tracks, as they are.
        """
        tracks = self.test if held_out else self.train
        labels, states, controls = [], [], []
        for _ in range(size):
            track = tracks[rng.integers(len(tracks))]
            first = int(rng.integers(len(track) - units + 1))
            part = slice(FRAMES_PER_UNIT * first, FRAMES_PER_UNIT * (first + units))
            mouth, motion = track.mouth[part], track.controls[part]
            if not held_out and rng.random() < 0.5:
                mouth = vary_mouth(mouth, rng)
            state = track.state[first : first + units]
            face = FaceTrack.from_parts(
                weights_of_mouth(mouth), motion, np.repeat(state, FRAMES_PER_UNIT)
            )
            labels.append(face.labels())
            states.append(state)
            controls.append(np.concatenate([motion, mouth], 1).reshape(units, -1))
        raw = _units(np.concatenate(labels), self.renderer)
        latents = (raw - self.latent_mean) / self.latent_std
        return UnitRun(
            latents.unflatten(0, (size, units)),  # type: ignore[no-untyped-call]
            torch.from_numpy(np.stack(states)),
            torch.from_numpy(np.stack(controls)),
        )


def label_indices(prefixes: tuple[str, ...]) -> Tensor:
    """Columns of `FaceTrack.labels` whose face unit starts with one of the prefixes."""
    return torch.tensor([i for i, name in enumerate(FACE_UNITS) if name.startswith(prefixes)])


def _units(labels: FloatArray, renderer: LatentRenderer) -> Tensor:
    """Raw latents [U, C, h, w] of labels [F, L], four frames to a unit."""
    frames = renderer(torch.from_numpy(labels))
    return frames.unflatten(0, (-1, FRAMES_PER_UNIT)).flatten(1, 2)


def load_unit_tracks(directory: Path, renderer: LatentRenderer) -> UnitTracks:
    """Reads the tracks and prepares what training samples from.

    Args:
        directory: folder made by `rtgen train data`.
        renderer: labels to latents.

    Raises:
        CheckpointError: there are no tracks.
    """
    train, test = (
        [face_of(read_npz(path)) for path in track_files(directory, split)]
        for split in ("train", "test")
    )
    sample = np.concatenate([face.labels()[::8] for face in train])
    raw = _units(sample[: len(sample) // 4 * 4], renderer)
    mean = raw.mean((0, 2, 3), keepdim=True)[0]
    std = raw.std((0, 2, 3), keepdim=True)[0]
    # One statistic for all four frames of a unit: they are alike by construction.
    per_frame = -1, raw.shape[1] // FRAMES_PER_UNIT, 1, 1
    mean = mean.view(per_frame).mean(0).repeat(FRAMES_PER_UNIT, 1, 1)
    std = std.view(per_frame).square().mean(0).sqrt().repeat(FRAMES_PER_UNIT, 1, 1)
    rest = torch.from_numpy(np.median(sample, 0)).repeat(FRAMES_PER_UNIT, 1)
    return UnitTracks(
        renderer=renderer,
        train=[UnitTrack.of(face) for face in train],
        test=[UnitTrack.of(face) for face in test],
        latent_mean=mean,
        latent_std=std,
        reference=((renderer(rest).flatten(0, 1) - mean) / std),
        label_sample=torch.from_numpy(sample[:: max(1, len(sample) // 2000)]),
        mouth_labels=label_indices(_MOUTH_PREFIXES),
        eye_labels=label_indices(_EYE_PREFIXES),
    )
