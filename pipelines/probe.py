"""Reads a face back from pixels: jaw, lips, lids, gaze, expression and head pose.

The probe is a small convolutional network fitted on rendered frames, whose labels are exact, and
on the same frames passed through the autoencoder, so that it reads a decoder's pictures without
bias. It never sees a generated picture and so cannot learn the model's habits. Its own accuracy
on held-out frames of both kinds is part of every result (`pipelines.evaluation.probe_fit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from pipelines.train.visemes import FACE_UNITS
from rtgen.errors import CheckpointError, ShapeError

__all__ = [
    "PROBED",
    "SIZE",
    "Crops",
    "FaceProbe",
    "ProbeNet",
    "correlation",
    "crops_of",
    "lag_ms",
    "probed_labels",
]

Frames = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]

SIZE = 256
# Crops of the shipped framing at 256x256: top, bottom, left, right.
MOUTH = (148, 220, 80, 176)
EYES = (88, 144, 64, 192)
FACE = (48, 240, 32, 224)
_FACE_CELL = 8  # pixels per cell of the face crop
_BATCH = 64

# What is read, and the face unit it is; the pose and gaze have no unit.
_UNITS = {
    "jaw": "jawOpen",
    "press": "mouthPressLeft",
    "lip_roll": "mouthRollLower",
    "pucker": "mouthPucker",
    "funnel": "mouthFunnel",
    "smile": "mouthSmileLeft",
    "brow": "browInnerUp",
    "wide": "eyeWideLeft",
    "blink": "eyeBlinkLeft",
}
PROBED = (*_UNITS, "yaw", "pitch", "roll", "gaze_x", "gaze_y")


def probed_labels(weights: FloatArray, pose: FloatArray, gaze: FloatArray) -> dict[str, FloatArray]:
    """What the probe should see, by name.

    Args:
        weights: [F, U] over `FACE_UNITS`.
        pose: [F, 3] yaw, pitch, roll in radians.
        gaze: [F, 2] x, y in radians.

    Returns:
        [F] for each of `PROBED`, in that order.
    """
    labels = {name: weights[:, FACE_UNITS.index(unit)] for name, unit in _UNITS.items()}
    labels |= {name: pose[:, i] for i, name in enumerate(("yaw", "pitch", "roll"))}
    return labels | {"gaze_x": gaze[:, 0], "gaze_y": gaze[:, 1]}


class Crops(NamedTuple):
    """The parts of frames that the network looks at, uint8, colours last.

    Attributes:
        mouth: [F, 72, 96, 3].
        eyes: [F, 56, 128, 3].
        face: [F, 24, 24, 3], coarse.
    """

    mouth: Frames
    eyes: Frames
    face: Frames

    def at(self, index: npt.NDArray[np.int64] | slice) -> Crops:
        """Some of the frames."""
        return Crops(self.mouth[index], self.eyes[index], self.face[index])


def crops_of(frames: Frames) -> Crops:
    """Cuts what the network needs.

    Args:
        frames: uint8 [F, S, S, 3]; another size than 256 is resampled to it first.

    Raises:
        ShapeError: not square colour frames.
    """
    if frames.ndim != 4 or frames.shape[1] != frames.shape[2] or frames.shape[3] != 3:
        raise ShapeError(f"frames must be [F, S, S, 3], got {list(frames.shape)}")
    if frames.shape[1] != SIZE:
        planes = torch.from_numpy(frames).permute(0, 3, 1, 2).float()
        planes = F.interpolate(planes, (SIZE, SIZE), mode="bilinear", antialias=True)
        frames = planes.round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    side = (FACE[1] - FACE[0]) // _FACE_CELL
    face = frames[:, FACE[0] : FACE[1], FACE[2] : FACE[3]]
    cells = face.reshape(len(frames), side, _FACE_CELL, side, _FACE_CELL, 3)
    return Crops(
        mouth=frames[:, MOUTH[0] : MOUTH[1], MOUTH[2] : MOUTH[3]].copy(),
        eyes=frames[:, EYES[0] : EYES[1], EYES[2] : EYES[3]].copy(),
        face=cells.mean((2, 4)).round().astype(np.uint8),
    )


def _branch(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (come, go) in enumerate(zip((3, *widths), widths, strict=False)):
        layers += [nn.Conv2d(come, go, 5 if i == 0 else 3, 2, 2 if i == 0 else 1), nn.SiLU()]
    return nn.Sequential(*layers, nn.Flatten())


class ProbeNet(nn.Module):
    """Three crops to readings of about unit variance.

    Args:
        outputs: number of readings.
        embedding: width of the layer before them, the picture's description.
    """

    def __init__(self, outputs: int, embedding: int = 64) -> None:
        super().__init__()
        self.mouth = _branch((12, 24, 32, 32))
        self.eyes = _branch((12, 24, 24, 24))
        self.face = _branch((16, 24, 24))
        joined = 32 * 5 * 6 + 24 * 4 * 8 + 24 * 3 * 3
        self.join = nn.Linear(joined, embedding)
        self.out = nn.Linear(embedding, outputs)

    def embed(self, crops: Crops) -> Tensor:
        """Description [F, embedding] of the pictures."""
        parts = [
            branch((torch.from_numpy(crop).permute(0, 3, 1, 2).float() - 128) / 64)
            for branch, crop in zip((self.mouth, self.eyes, self.face), crops, strict=True)
        ]
        return F.silu(self.join(torch.cat(parts, 1)))

    def forward(self, crops: Crops) -> Tensor:
        """Readings [F, outputs]."""
        return self.out(self.embed(crops))


@dataclass(frozen=True, slots=True)
class FaceProbe:
    """A fitted probe.

    Attributes:
        names: what it measures, one name per column.
        net: the network, on the CPU, in float32.
        mean: float32 [K], of the labels.
        scale: float32 [K], what a reading of 1 means.
    """

    names: tuple[str, ...]
    net: ProbeNet
    mean: FloatArray
    scale: FloatArray

    @torch.no_grad()
    def describe(self, frames: Frames) -> tuple[FloatArray, FloatArray]:
        """Readings and the description they come from.

        Args:
            frames: uint8 [F, S, S, 3].

        Returns:
            [F, K] in the labels' units, and [F, D].
        """
        rows = []
        for start in range(0, len(frames), _BATCH):
            rows.append(self.net.embed(crops_of(frames[start : start + _BATCH])))
        inner = torch.cat(rows)
        values = self.net.out(inner).numpy() * self.scale + self.mean
        return values.astype(np.float32), inner.numpy()

    def measure(self, frames: Frames) -> dict[str, FloatArray]:
        """What is seen, by name, float32 [F] each."""
        values, _ = self.describe(frames)
        return {name: values[:, i] for i, name in enumerate(self.names)}

    def save(self, path: Path) -> None:
        """Writes the probe as safetensors, weights in float16."""
        tensors = {k: v.numpy().astype(np.float16) for k, v in self.net.state_dict().items()}
        tensors |= {"mean": self.mean, "scale": self.scale}
        save_file(tensors, path, metadata={"names": ",".join(self.names), "format": "cnn"})

    @classmethod
    def load(cls, path: Path) -> FaceProbe:
        """Reads a probe written by `save`.

        Raises:
            CheckpointError: the file is missing or not a probe of this kind.
        """
        if not path.exists():
            raise CheckpointError(f"no probe at {path}; make one with `rtgen eval avatar --data`")
        try:
            with safe_open(path, framework="pt") as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if facts.get("format") != "cnn" or not {"mean", "scale"} <= set(tensors):
            raise CheckpointError(
                f"{path} is not a probe of this version (it holds {sorted(tensors)[:4]}); "
                f"fit it anew with `rtgen eval avatar --data`"
            )
        names = tuple(facts["names"].split(","))
        net = ProbeNet(len(names), tensors["join.bias"].numel())
        mean, scale = (tensors.pop(key).numpy() for key in ("mean", "scale"))
        try:
            net.load_state_dict({key: value.float() for key, value in tensors.items()})
        except RuntimeError as error:
            raise CheckpointError(f"{path} does not fit the probe's network: {error}") from error
        return cls(names, net.eval().requires_grad_(False), mean, scale)


def correlation(a: FloatArray, b: FloatArray) -> float:
    """Pearson correlation; 0 where either does not vary."""
    if a.std() < 1e-9 or b.std() < 1e-9:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def lag_ms(seen: FloatArray, asked: FloatArray, fps: float, largest: int = 12) -> float:
    """By how much `seen` comes after `asked`, from the peak of their cross-correlation.

    The peak is refined by a parabola through its neighbours.

    Args:
        seen: [F].
        asked: [F].
        fps: frames per second.
        largest: frames of lag looked at, either way.

    Returns:
        Milliseconds, positive when late; NaN where either does not vary.
    """
    if seen.std() < 1e-9 or asked.std() < 1e-9:
        return float("nan")
    a = (seen - seen.mean()) / seen.std()
    b = (asked - asked.mean()) / asked.std()
    count = len(a)
    lags = range(-largest, largest + 1)
    scores = np.array(
        [
            np.mean(a[max(0, k) : count + min(0, k)] * b[max(0, -k) : count - max(0, k)])
            for k in lags
        ]
    )
    peak = int(scores.argmax())
    shift = 0.0
    if 0 < peak < len(scores) - 1:
        left, middle, right = scores[peak - 1 : peak + 2]
        bend = left - 2 * middle + right
        shift = 0.5 * (left - right) / bend if bend else 0.0
    return float((lags[peak] + shift) * 1000 / fps)
