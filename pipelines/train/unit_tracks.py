"""Label tracks as the denoiser sees them: latents, audio tokens, state and control per unit."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipelines.audio import MelConfig, tokens_of_track
from pipelines.motion import FRAMES_PER_UNIT, STATES
from pipelines.train.augment import augment
from pipelines.train.latent_renderer import LatentRenderer
from pipelines.train.store import face_of, read_npz
from pipelines.train.visemes import FACE_UNITS, FaceTrack
from rtgen.errors import CheckpointError

_MOUTH_PREFIXES = ("jaw", "mouth", "tongue")
_EYE_PREFIXES = ("eye", "brow")


@dataclass(frozen=True, slots=True)
class UnitTrack:
    """A label track as the denoiser sees it; U units.

    Attributes:
        latents: fp16 [U, C, h, w], normalised.
        audio: fp16 [V, U, A, audio_dim], one variant of the sound each.
        state: int64 [U].
        control: fp32 [U, 4 * K].
    """

    latents: Tensor
    audio: Tensor
    state: Tensor
    control: Tensor

    def cut(self, start: int, units: int, variant: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Latents, audio, state and control of a run of units."""
        part = slice(start, start + units)
        return self.latents[part], self.audio[variant, part], self.state[part], self.control[part]


@dataclass(frozen=True, slots=True)
class UnitTracks:
    """All tracks, and what they have in common.

    Attributes:
        train: tracks to train on.
        test: tracks of held-out voices and sentences.
        latent_mean: [C, 1, 1] of the raw latents of the training tracks.
        latent_std: [C, 1, 1].
        reference: [C, h, w], normalised latent of the resting face.
        label_sample: [n, L] labels of random frames.
        mouth_labels: indices of the mouth's labels.
        eye_labels: indices of the eyes' labels.
    """

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
        """Standard deviation of each control number over the training tracks, [4 * K]."""
        frames = torch.cat([track.control for track in self.train])
        names = frames.unflatten(1, (FRAMES_PER_UNIT, -1))  # type: ignore[no-untyped-call]
        std: Tensor = names.std((0, 1)).clamp_min(1e-3).repeat(FRAMES_PER_UNIT)
        return std

    @property
    def control_dim(self) -> int:
        """Control numbers per unit."""
        return self.train[0].control.shape[1]

    @property
    def num_states(self) -> int:
        """Size of the state vocabulary."""
        return len(STATES)


def label_indices(prefixes: tuple[str, ...]) -> Tensor:
    """Columns of `FaceTrack.labels` whose face unit starts with one of the prefixes."""
    return torch.tensor([i for i, name in enumerate(FACE_UNITS) if name.startswith(prefixes)])


def _units(labels: npt.NDArray[np.float32], renderer: LatentRenderer) -> Tensor:
    """Raw latents [U, C, h, w] of labels [F, L], four frames to a unit."""
    frames = renderer(torch.from_numpy(labels))
    return frames.unflatten(0, (-1, FRAMES_PER_UNIT)).flatten(1, 2)


def load_unit_tracks(
    directory: Path, renderer: LatentRenderer, *, variants: int, seed: int
) -> UnitTracks:
    """Reads the tracks and prepares what training samples from.

    Args:
        directory: folder made by `rtgen train data`.
        renderer: labels to latents.
        variants: copies of each sound; the first is as recorded, the others are augmented.
        seed: of the augmentation.

    Raises:
        CheckpointError: there are no tracks.
    """
    paths = sorted(directory.glob("tracks/*.npz"))
    if not paths:
        raise CheckpointError(f"no tracks under {directory}; run `rtgen train data` first")
    faces = {path: face_of(read_npz(path)) for path in paths}
    train = [path for path in paths if path.name.startswith("train")]
    sample = np.concatenate([faces[path].labels()[::8] for path in train])
    raw = _units(sample[: len(sample) // 4 * 4], renderer)
    mean = raw.mean((0, 2, 3), keepdim=True)[0]
    std = raw.std((0, 2, 3), keepdim=True)[0]
    # One statistic for all four frames of a unit: they are alike by construction.
    per_frame = -1, raw.shape[1] // FRAMES_PER_UNIT, 1, 1
    mean = mean.view(per_frame).mean(0).repeat(FRAMES_PER_UNIT, 1, 1)
    std = std.view(per_frame).square().mean(0).sqrt().repeat(FRAMES_PER_UNIT, 1, 1)
    tracks = {
        path: _unit_track(path, faces[path], renderer, mean, std, variants, seed) for path in paths
    }
    rest = torch.from_numpy(np.median(sample, 0)).repeat(FRAMES_PER_UNIT, 1)
    return UnitTracks(
        train=[tracks[path] for path in train],
        test=[tracks[path] for path in paths if path not in set(train)],
        latent_mean=mean,
        latent_std=std,
        reference=((renderer(rest).flatten(0, 1) - mean) / std),
        label_sample=torch.from_numpy(sample[:: max(1, len(sample) // 2000)]),
        mouth_labels=label_indices(_MOUTH_PREFIXES),
        eye_labels=label_indices(_EYE_PREFIXES),
    )


def _unit_track(
    path: Path,
    face: FaceTrack,
    renderer: LatentRenderer,
    mean: Tensor,
    std: Tensor,
    variants: int,
    seed: int,
) -> UnitTrack:
    recorded = read_npz(path)["audio"].astype(np.float32) / np.float32(32768)
    rng = np.random.default_rng((seed, zlib.crc32(path.name.encode())))
    config = MelConfig()
    sounds = [recorded]
    sounds += [augment(recorded, rng) for _ in range(variants - 1)]
    tokens = np.stack([tokens_of_track(sound, config) for sound in sounds])
    units = len(face) // FRAMES_PER_UNIT
    return UnitTrack(
        latents=((_units(face.labels(), renderer) - mean) / std).half(),
        audio=torch.from_numpy(tokens).half(),
        state=torch.from_numpy(face.state[::FRAMES_PER_UNIT].astype(np.int64)),
        control=torch.from_numpy(face.controls.reshape(units, -1)),
    )
