"""Reads a face back from pixels: jaw, lips, lids and head pose by ridge regression.

The probe is fitted on rendered frames, whose labels are exact, so a generated clip can be measured
against the labels it was asked for. It is linear in small grey crops: deterministic, quick to fit,
and it cannot learn the model's habits. Its own accuracy on held-out frames is part of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from rtgen.errors import CheckpointError, ShapeError

Frames = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]

SIZE = 256
# Crops of the shipped framing: (top, bottom, left, right, pixels per cell).
MOUTH = (144, 224, 80, 176, 2)
FACE = (64, 224, 48, 208, 4)
RIDGE = 2.0


def features(frames: Frames) -> FloatArray:
    """Grey cells of the mouth and face crops.

    Args:
        frames: uint8 [F, 256, 256, 3].

    Returns:
        float32 [F, n] in 0..1.

    Raises:
        ShapeError: another shape.
    """
    if frames.ndim != 4 or frames.shape[1:] != (SIZE, SIZE, 3):
        raise ShapeError(f"frames must be [F, {SIZE}, {SIZE}, 3], got {list(frames.shape)}")
    parts = []
    for top, bottom, left, right, cell in (MOUTH, FACE):
        crop = frames[:, top:bottom, left:right].astype(np.float32).mean(-1) / 255
        rows, columns = (bottom - top) // cell, (right - left) // cell
        cells = crop.reshape(len(frames), rows, cell, columns, cell).mean((2, 4))
        parts.append(cells.reshape(len(frames), -1))
    return np.concatenate(parts, 1)


@dataclass(frozen=True, slots=True)
class FaceProbe:
    """A fitted probe.

    Attributes:
        names: what it measures, one name per column.
        mean: float32 [n], mean features.
        weights: float32 [n, K].
        bias: float32 [K].
    """

    names: tuple[str, ...]
    mean: FloatArray
    weights: FloatArray
    bias: FloatArray

    @classmethod
    def fit(
        cls, frames: Frames, labels: FloatArray, names: tuple[str, ...], ridge: float = RIDGE
    ) -> FaceProbe:
        """Ridge regression, solved in whichever of samples and features is smaller.

        Args:
            frames: uint8 [F, 256, 256, 3], rendered.
            labels: [F, K], exact.
            names: K names.
            ridge: added to the diagonal.
        """
        x = features(frames).astype(np.float64)
        mean, bias = x.mean(0), labels.mean(0, dtype=np.float64)
        x -= mean
        y = labels - bias
        if len(x) < x.shape[1]:
            weights = x.T @ np.linalg.solve(x @ x.T + ridge * np.eye(len(x)), y)
        else:
            weights = np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ y)
        single = (array.astype(np.float32) for array in (mean, weights, bias))
        return cls(names, *single)

    def measure(self, frames: Frames) -> dict[str, FloatArray]:
        """What is seen, by name, float32 [F] each."""
        values = np.concatenate(
            [
                (features(part) - self.mean) @ self.weights + self.bias
                for part in np.array_split(frames, max(1, len(frames) // 256))
            ]
        )
        return {name: values[:, i] for i, name in enumerate(self.names)}

    def save(self, path: Path) -> None:
        """Writes the probe as safetensors."""
        tensors = {"mean": self.mean, "weights": self.weights, "bias": self.bias}
        save_file(tensors, path, metadata={"names": ",".join(self.names)})

    @classmethod
    def load(cls, path: Path) -> FaceProbe:
        """Reads a probe written by `save`.

        Raises:
            CheckpointError: the file is missing or not a probe.
        """
        from safetensors import safe_open

        if not path.exists():
            raise CheckpointError(f"no probe at {path}; make one with `rtgen eval avatar --data`")
        tensors = load_file(path)
        with safe_open(path, framework="np") as file:
            names = (file.metadata() or {}).get("names", "")
        if set(tensors) != {"mean", "weights", "bias"} or not names:
            raise CheckpointError(f"{path} is not a probe: it holds {sorted(tensors)}")
        return cls(tuple(names.split(",")), tensors["mean"], tensors["weights"], tensors["bias"])


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
        Milliseconds, positive when late.
    """
    a = (seen - seen.mean()) / (seen.std() + 1e-9)
    b = (asked - asked.mean()) / (asked.std() + 1e-9)
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
