"""Trains the lips: sound to mouth controls (`rtgen train lips`).

Tracks carry exact labels, so this is regression on random stretches of random variants of their
sound. Frames in which lips touch weigh more, changes from frame to frame count too, and the two
classifiers of `LipNet` learn beside the mouth what its squared error blurs.
"""

from __future__ import annotations

import argparse
import json
import logging
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pipelines.audio import MelConfig, rows_of_track
from pipelines.lips import LipConfig, LipNet
from pipelines.train.augment import augment
from pipelines.train.loop import TrainConfig, Trainer, add_train_arguments, train_config
from pipelines.train.store import face_of, read_npz, track_files
from pipelines.train.visemes import VISEMES, mouth_of, touching, viseme_mouth
from rtgen.weights.loaders import save_weights

logger = logging.getLogger(__name__)

DEFAULTS = TrainConfig(steps=6000, learning_rate=2e-3, warmup=100, flat=0.1, weight_decay=0.02)
BATCH = 12
FRAMES = 80  # of one stretch
TOUCH_WEIGHT = 4.0
LOGIT_WEIGHT = 0.02
_SHUT = 0.02  # a jaw less open than this, with every lip control as small, is at rest


@dataclass(frozen=True, slots=True)
class SpokenTrack:
    """Sound and mouth of one track.

    Attributes:
        rows: fp16 [V, R, num_mels], one variant of the sound each; the rows of frame i are
            `rows[:, 4 * i : 4 * i + LipNet.RECEPTIVE_ROWS]`.
        mouth: fp32 [F, K].
        touch: fp32 [F], 1 where lips touch.
        rest: fp32 [F], 1 where nobody speaks.
    """

    rows: Tensor
    mouth: Tensor
    touch: Tensor
    rest: Tensor


def read_track(path: Path, variants: int, seed: int, config: MelConfig) -> SpokenTrack:
    """Reads a track made by `rtgen train data`.

    Args:
        path: of the npz file.
        variants: copies of the sound; the first is as recorded, the others are augmented.
        seed: of the augmentation.
        config: audio front end.
    """
    data = read_npz(path)
    face = face_of(data)
    sound = data["audio"].astype(np.float32) / np.float32(32768)
    rng = np.random.default_rng((seed, zlib.crc32(path.name.encode())))
    sounds = [sound, *(augment(sound, rng) for _ in range(variants - 1))]
    rows = np.stack([rows_of_track(each, config) for each in sounds])
    segments = [(float(a), float(b), VISEMES[int(v)]) for a, b, v in data["segments"]]
    mouth = mouth_of(face)
    return SpokenTrack(
        rows=torch.from_numpy(rows).half(),
        mouth=torch.from_numpy(mouth),
        touch=torch.from_numpy(touching(segments, len(face))),
        rest=torch.from_numpy(_at_rest(mouth)),
    )


def _at_rest(mouth: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """1 for frames [F] in which no mouth control is up."""
    return (mouth.max(1) < _SHUT).astype(np.float32)


@dataclass
class LipStage:
    """Sampling, loss and evaluation."""

    model: LipNet
    train: list[SpokenTrack]
    test: list[SpokenTrack]
    seed: int

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [B, R, M], mouths [B, F, K] and classes [B, F, 2] of random stretches.

        Loudness moves as a whole, a band of mels is blanked in half of the stretches, and a
        little noise lies over all: a stand-in for voices and microphones that were never heard.
        """
        rng = np.random.default_rng((self.seed, step))
        rows, mouths, classes = [], [], []
        for _ in range(BATCH):
            track = self.train[rng.integers(len(self.train))]
            first = int(rng.integers(len(track.mouth) - FRAMES + 1))
            part = slice(first, first + FRAMES)
            heard = track.rows[rng.integers(len(track.rows))]
            x = heard[4 * first : 4 * first + LipNet.rows_for(FRAMES)].float()
            x = x + 0.3 * float(rng.standard_normal())
            if rng.random() < 0.5:
                low = int(rng.integers(x.shape[1] - 8))
                x[:, low : low + int(rng.integers(1, 8))] = 0
            rows.append(x + 0.05 * torch.from_numpy(rng.standard_normal(x.shape)).float())
            mouths.append(track.mouth[part])
            classes.append(torch.stack([track.touch[part], track.rest[part]], 1))
        return torch.stack(rows), torch.stack(mouths), torch.stack(classes)

    def loss(self, step: int) -> dict[str, Tensor]:
        """Squared error of mouths and of their motion, and the classifiers' cross-entropy."""
        rows, truth, classes = self.batch(step)
        mouth, logits = self.model.raw(rows)
        weight = 1 + TOUCH_WEIGHT * classes[..., :1]
        error = ((mouth - truth).square() * weight).mean()
        motion = (mouth.diff(dim=1) - truth.diff(dim=1)).square().mean()
        entropy = F.binary_cross_entropy_with_logits(
            logits, classes, pos_weight=torch.tensor([3.0, 1.0])
        )
        loss = error + motion + LOGIT_WEIGHT * entropy
        return {"loss": loss, "error": error.detach(), "entropy": entropy.detach()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Correlations per control, and recall and precision of touching lips, held out."""
        seen = torch.cat([self.model(t.rows[0].float()[None])[0] for t in self.test])
        truth = torch.cat([t.mouth for t in self.test])
        touch = torch.cat([t.touch for t in self.test]).bool()
        logits = torch.cat([self.model.raw(t.rows[0].float()[None])[1][0] for t in self.test])
        names = self.model.config.names
        out = {}
        for name in ("jawOpen", "mouthPress", "mouthPucker", "mouthStretch"):
            column = names.index(name)
            pair = torch.stack([seen[:, column], truth[:, column]])
            out[f"{name}_r"] = float(torch.corrcoef(pair)[0, 1])
        jaw = names.index("jawOpen")
        found = logits[:, 0] > 0
        out["jaw_std_ratio"] = float(seen[:, jaw].std() / truth[:, jaw].std())
        out["touch_recall"] = float(found[touch].float().mean())
        out["touch_precision"] = float(touch[found].float().mean()) if found.any() else 0.0
        return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `rtgen train lips`."""
    add_train_arguments(parser, DEFAULTS)
    parser.add_argument("--variants", type=int, default=3, help="augmented copies of each sound")


def run(args: argparse.Namespace) -> int:
    """Reads the tracks, trains, and writes lips.safetensors with its metrics."""
    torch.manual_seed(args.seed)
    config = MelConfig()
    model = LipNet(LipConfig(num_mels=config.num_mels))
    model.closed_shape.copy_(torch.from_numpy(viseme_mouth("PP")))
    splits = {
        split: [
            read_track(path, count, args.seed, config) for path in track_files(args.data, split)
        ]
        for split, count in (("train", args.variants), ("test", 1))
    }
    logger.info("read %d and %d tracks", len(splits["train"]), len(splits["test"]))
    stage = LipStage(model, splits["train"], splits["test"], args.seed)
    trainer = Trainer(model, train_config(args, DEFAULTS), args.out)
    trainer.run(stage.loss, stage.evaluate, evaluate_every=500)
    with trainer.averaged_weights():
        metrics = stage.evaluate()
        save_weights(args.out / "lips.safetensors", model.state_dict())
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    return 0
