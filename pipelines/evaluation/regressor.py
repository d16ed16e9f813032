"""Sound straight to the mouth's labels: the yardstick of what the sound gives away.

A small network reads the same audio tokens as the model, as far ahead, and regresses
the speech units of the four frames of a unit: no pictures, no history, no noise. It is trained
here, on the training tracks alone, rather than taken from the model, so that a model cannot
lower the bar that it is held to.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipelines.audio import MelConfig, tokens_of_track
from pipelines.motion import EXPRESSION_UNITS, FRAMES_PER_UNIT
from pipelines.train.augment import augment
from pipelines.train.store import read_npz
from pipelines.train.visemes import FACE_UNITS
from rtgen.errors import CheckpointError

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]

SPOKEN = tuple(i for i, name in enumerate(FACE_UNITS) if name not in EXPRESSION_UNITS)
STEPS = 1200
BATCH = 128
LEARNING_RATE = 1.5e-3


class MouthRegressor(nn.Module):
    """Audio tokens of a unit to the speech units of its frames.

    Args:
        config: of the tokens.
        width: of the convolutions over time.
    """

    def __init__(self, config: MelConfig, width: int = 64) -> None:
        super().__init__()
        self.config = config
        rows = -(-config.num_rows // 2)
        self.convs = nn.Sequential(
            nn.Conv1d(config.num_mels, width, 5, 2, 2),
            nn.SiLU(),
            nn.Conv1d(width, width, 3, padding=1),
            nn.SiLU(),
        )
        self.join = nn.Linear(width * rows, 256)
        self.out = nn.Linear(256, FRAMES_PER_UNIT * len(SPOKEN))

    def forward(self, tokens: Tensor) -> Tensor:
        """Mouth [U, 4, n] for tokens [U, A, audio_dim]; n as `SPOKEN`."""
        rows = tokens.reshape(len(tokens), -1, self.config.num_mels).transpose(1, 2)
        inner = F.silu(self.join(F.dropout(self.convs(rows).flatten(1), 0.1, self.training)))
        return self.out(inner).reshape(len(tokens), FRAMES_PER_UNIT, -1)


def train_regressor(
    directories: Sequence[Path],
    config: MelConfig,
    *,
    steps: int = STEPS,
    batch: int = BATCH,
    seed: int = 0,
) -> MouthRegressor:
    """Trains on `tracks/train_*.npz`, each as recorded and in one augmented variant.

    Raises:
        CheckpointError: there are no training tracks.
    """
    tokens, mouths = _load(directories, config, seed)
    torch.manual_seed(seed)
    net = MouthRegressor(config)
    optimizer = torch.optim.AdamW(net.parameters(), LEARNING_RATE, weight_decay=0.02, fused=True)
    random = torch.Generator().manual_seed(seed)
    for step in range(steps):
        fall = max(0.02, 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * fall * min(1.0, (step + 1) / 100)
        index = torch.randint(tokens.shape[1], (batch,), generator=random)
        variant = torch.randint(len(tokens), (batch,), generator=random)
        # A tilt of all bands is a change of gain; it must not change the mouth.
        level = 0.3 * torch.randn(batch, 1, 1, generator=random)
        loss = 20 * (net(tokens[variant, index].float() + level) - mouths[index]).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if (step + 1) % 500 == 0:
            logger.info("regressor step %d: loss %.3f", step + 1, loss.item())
    return net.eval().requires_grad_(False)


def _load(directories: Sequence[Path], config: MelConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens [2, U, A, D] in fp16 and mouths [U, 4, n] of all training tracks."""
    rng = np.random.default_rng(seed)
    tokens: list[Tensor] = []
    mouths: list[Tensor] = []
    for path in (p for d in directories for p in sorted(d.glob("tracks/train_*.npz"))):
        arrays = read_npz(path)
        sound = arrays["audio"].astype(np.float32) / np.float32(32768)
        variants = [tokens_of_track(x, config) for x in (sound, augment(sound, rng))]
        tokens.append(torch.from_numpy(np.stack(variants)).half())
        mouth = arrays["weights"].astype(np.float32)[:, SPOKEN]
        mouths.append(torch.from_numpy(mouth.reshape(-1, FRAMES_PER_UNIT, len(SPOKEN))))
    if not tokens:
        raise CheckpointError(
            f"no training tracks under {[str(d) for d in directories]}; run `rtgen train data`"
        )
    return torch.cat(tokens, 1), torch.cat(mouths)


@torch.no_grad()
def regress(net: MouthRegressor, audio: FloatArray, weights: FloatArray) -> FloatArray:
    """Labels whose mouth is regressed from the sound.

    Args:
        net: trained.
        audio: [F * 640] float32 at 16 kHz.
        weights: [F, U] true weights, which keep what is not speech.

    Returns:
        [F, U] float32 in 0..1.
    """
    tokens = torch.from_numpy(tokens_of_track(audio, net.config))
    out = weights.copy()
    mouth = net(tokens).flatten(0, 1).clamp(0, 1).numpy()
    out[: len(mouth), SPOKEN] = mouth
    return out


def save_regressor(net: MouthRegressor, path: Path) -> None:
    """Writes the weights."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(net.state_dict(), path)


def load_regressor(path: Path, config: MelConfig) -> MouthRegressor:
    """Reads what `save_regressor` wrote."""
    net = MouthRegressor(config)
    net.load_state_dict(load_file(path))
    return net.eval().requires_grad_(False)
