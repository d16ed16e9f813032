"""Lips from sound: a small causal network that says what a mouth does for each pixel frame.

The network reads the mel rows of one unit (`pipelines.audio`) and returns the mouth of its four
frames as controls beside those of the motion controller. Every frame is the same function of its
own stretch of sound, so nothing changes at unit borders and there is no state but the sound.

Squared error alone would leave lips half open where it is not sure, and lets them shiver in
silence. Two classifiers mend that: one says that the lips touch (p, b, m), the other that nobody
speaks; each pulls the mouth all the way once it is more sure than not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtgen.errors import ConfigError, ShapeError
from rtgen.weights.loaders import load_checkpoint, load_strict

__all__ = ["MOUTH_NAMES", "LipConfig", "LipNet", "load_lips"]

MOUTH_NAMES = (
    "jawOpen", "mouthClose", "mouthFunnel", "mouthLowerDown", "mouthPress", "mouthPucker",
    "mouthRollLower", "mouthRollUpper", "mouthShrugLower", "mouthSmile", "mouthStretch",
    "mouthUpperUp", "tongueOut",
)  # fmt: skip
"""The mouth's controls: ARKit units in 0..1, left and right as one."""

_STRIDE = 4  # mel rows per pixel frame: 100 Hz to 25 Hz
_SURE = (0.25, 0.5)  # probabilities between which a classifier takes over


@dataclass(frozen=True, slots=True, kw_only=True)
class LipConfig:
    """Shape of a `LipNet`.

    Attributes:
        num_mels: numbers of one mel row.
        width: channels of the first layers.
        hidden: channels before the output.
        names: what it returns, in order.
    """

    num_mels: int = 64
    width: int = 128
    hidden: int = 256
    names: tuple[str, ...] = MOUTH_NAMES

    def __post_init__(self) -> None:
        if min(self.num_mels, self.width, self.hidden) < 1:
            raise ConfigError(
                f"num_mels, width and hidden must be at least 1, got {self.num_mels}, "
                f"{self.width}, {self.hidden}"
            )
        if self.width % 2:
            raise ConfigError(f"width must be even, got {self.width}")
        if self.names != MOUTH_NAMES:
            raise ConfigError(f"names must be {MOUTH_NAMES}, got {self.names}")


class LipNet(nn.Module):
    """Mel rows at 100 Hz to the mouth at 25 Hz.

    Args:
        config: shape.
    """

    RECEPTIVE_ROWS = 36
    """Mel rows that one pixel frame is a function of."""

    def __init__(self, config: LipConfig) -> None:
        super().__init__()
        self.config = config
        width, deep = config.width, config.width * 3 // 2
        self.stem = nn.Conv1d(config.num_mels, width, 7)
        self.down = nn.Conv1d(width, width, 4, stride=2)
        self.near = nn.Conv1d(width, width, 3)
        self.wide = nn.Conv1d(width, width, 3, dilation=2)
        self.down_again = nn.Conv1d(width, deep, 4, stride=2)
        self.frames = nn.Conv1d(deep, deep, 3)
        self.head = nn.Conv1d(deep, config.hidden, 1)
        self.out = nn.Conv1d(config.hidden, len(config.names) + 2, 1)
        self.closed_shape: Tensor
        self.register_buffer("closed_shape", torch.zeros(len(config.names)))

    @classmethod
    def rows_for(cls, frames: int) -> int:
        """Mel rows needed for that many consecutive frames."""
        return cls.RECEPTIVE_ROWS + _STRIDE * (frames - 1)

    def raw(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Before the classifiers have their say.

        Args:
            rows: [B, R, num_mels] float, R at least `RECEPTIVE_ROWS`.

        Returns:
            The mouth [B, F, K] and logits [B, F, 2] of "lips touch" and "at rest"; F is
            1 + (R - 36) // 4.

        Raises:
            ShapeError: another shape.
        """
        if rows.ndim != 3 or rows.shape[2] != self.config.num_mels:
            raise ShapeError(f"rows must be [B, R, {self.config.num_mels}], got {list(rows.shape)}")
        if rows.shape[1] < self.RECEPTIVE_ROWS:
            raise ShapeError(f"R must be at least {self.RECEPTIVE_ROWS}, got {rows.shape[1]}")
        x = F.silu(self.stem(rows.transpose(1, 2)))
        x = F.silu(self.down(x))
        x = F.silu(self.near(x)) + x[..., 1:-1]
        x = F.silu(self.wide(x)) + x[..., 2:-2]
        x = F.silu(self.down_again(x))
        x = F.silu(self.frames(x)) + x[..., 1:-1]
        out = self.out(F.silu(self.head(x))).transpose(1, 2)
        return out[..., :-2], out[..., -2:]

    def forward(self, rows: Tensor) -> Tensor:
        """The mouth of consecutive frames.

        Args:
            rows: [B, R, num_mels] float, R at least `RECEPTIVE_ROWS`.

        Returns:
            [B, F, K] in 0..1, columns as `config.names`.
        """
        mouth, logits = self.raw(rows)
        low, high = _SURE
        sure = ((logits.sigmoid() - low) / (high - low)).clamp(0, 1)
        sure = sure.square() * (3 - 2 * sure)
        mouth = mouth.lerp(self.closed_shape.expand_as(mouth), sure[..., :1])
        return (mouth * (1 - sure[..., 1:])).clamp(0, 1)


def load_lips(path: Path, config: LipConfig) -> LipNet:
    """The network in float32 on the CPU, for inference.

    Raises:
        CheckpointError: the file is missing, damaged, or does not fit.
    """
    lips = LipNet(config)
    load_strict(lips, load_checkpoint(path), str(path))
    return lips.eval().requires_grad_(False)
