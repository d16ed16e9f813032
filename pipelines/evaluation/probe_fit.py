"""Fits the probe on rendered frames and on the same labels painted by the decoder.

Half of every batch shows dialogue, half widely drawn poses, in which every label is free of every
other; a third of both is painted by the decoder, so that its softness is not read as a changed
face. Files are cut to crops one at a time, so memory holds no whole pictures.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoders.unit_conv import UnitDecoder
from pipelines.base import to_uint8
from pipelines.probe import (
    PROBED,
    Crops,
    FaceProbe,
    ProbeNet,
    correlation,
    crops_of,
    lag_ms,
    probed_labels,
)
from pipelines.train.store import face_of, read_npz
from rtgen.errors import CheckpointError

logger = logging.getLogger(__name__)

Frames = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]
Renderer = Callable[[Tensor], Tensor]
"""Labels [F, L] to raw latents [F, c, h, w] of single frames."""

STEPS = 2400
BATCH = 64
LEARNING_RATE = 2e-3
DECODED_SHARE = 1 / 3  # of a batch
DECODED_STEP = 6  # every so many frames of a training file are painted by the decoder too
_FLOOR = 0.02  # least scale of a label
_UNIT = 4
_LAGS = (-3, 0, 2)  # frames, planted in the self-test


@dataclass(frozen=True, slots=True)
class Samples:
    """Pictures with their labels.

    Attributes:
        crops: of F frames.
        labels: float32 [F, K], columns as `PROBED`.
        is_dialogue: bool [F], whether a frame is of a dialogue, not widely drawn.
    """

    crops: Crops
    labels: FloatArray
    is_dialogue: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ProbeData:
    """What the probe is fitted on and judged by.

    Attributes:
        rendered: training frames as rendered.
        decoded: some of them as the decoder paints their labels.
        held_out: frames of held-out dialogues, in order of time.
        held_out_decoded: the same as the decoder paints them.
    """

    rendered: Samples
    decoded: Samples
    held_out: Samples
    held_out_decoded: Samples


@torch.no_grad()
def paint(renderer: Renderer, decoder: UnitDecoder, labels: FloatArray) -> Frames:
    """What the decoder makes of labels [F, L], uint8 [F, H, W, 3]; F must be a multiple of four."""
    rows = []
    for part in torch.split(torch.from_numpy(labels), 4 * _UNIT):
        frames = renderer(part)
        latents = frames.reshape(-1, _UNIT * frames.shape[1], *frames.shape[2:])
        rows.append(to_uint8(decoder(latents[None])[0]))
    return np.concatenate(rows)


def gather(directories: Sequence[Path], renderer: Renderer, decoder: UnitDecoder) -> ProbeData:
    """Reads rendered files and cuts them to crops.

    Raises:
        CheckpointError: a folder holds no training or no held-out frames.
    """
    groups: dict[str, list[Samples]] = {}
    for path in _files(directories):
        arrays = read_npz(path)
        frames, face = arrays["frames"].astype(np.uint8, copy=False), face_of(arrays)
        columns = probed_labels(face.weights, face.pose, face.gaze)
        labels = np.stack([columns[name] for name in PROBED], 1)
        held_out, is_dialogue = path.name.startswith("test"), path.parent.name == "clips"
        step = 1 if held_out else DECODED_STEP
        count = len(frames[::step]) // _UNIT * _UNIT
        decoded = paint(renderer, decoder, face.labels()[::step][:count])
        kind = "held_out" if held_out else "rendered"
        both = ((kind, frames, labels), (f"{kind}_decoded", decoded, labels[::step][:count]))
        for name, pictures, truth in both:
            marks = np.full(len(truth), is_dialogue)
            groups.setdefault(name, []).append(Samples(crops_of(pictures), truth, marks))
        logger.info("probe: read %s", path.name)
    for name in ("rendered", "held_out"):
        if name not in groups:
            raise CheckpointError(
                f"no {name} frames under {[str(d) for d in directories]}; "
                f"make them with `rtgen train data --clips 12 --test-clips 3 --wide 6000`"
            )
    joined = {name: _join(parts) for name, parts in groups.items()}
    return ProbeData(
        joined["rendered"], joined["rendered_decoded"],
        joined["held_out"], joined["held_out_decoded"],
    )  # fmt: skip


def _files(directories: Sequence[Path]) -> Iterator[Path]:
    for directory in directories:
        yield from sorted(directory.glob("clips/*.npz"))
        yield from sorted(directory.glob("wide/*.npz"))


def _join(parts: list[Samples]) -> Samples:
    crops = Crops(*(np.concatenate(c) for c in zip(*(part.crops for part in parts), strict=True)))
    labels = np.concatenate([part.labels for part in parts])
    return Samples(crops, labels, np.concatenate([part.is_dialogue for part in parts]))


def fit(
    rendered: Samples, decoded: Samples, *, steps: int = STEPS, batch: int = BATCH, seed: int = 0
) -> FaceProbe:
    """Fits a probe by AdamW with a cosine; weights are rounded to what a file holds.

    Args:
        rendered: training frames.
        decoded: training frames through the autoencoder.
        steps: of the optimizer.
        batch: frames of a step.
        seed: of weights and sampling.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    mean = rendered.labels.mean(0)
    scale = np.maximum(rendered.labels.std(0), _FLOOR)
    net = ProbeNet(len(PROBED))
    optimizer = torch.optim.AdamW(net.parameters(), LEARNING_RATE, weight_decay=0.01, fused=True)
    through = round(batch * DECODED_SHARE)
    sources = (rendered, batch - through), (decoded, through)
    for step in range(steps):
        fall = max(0.02, 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * fall * min(1.0, (step + 1) / 100)
        loss = torch.zeros(())
        for samples, count in sources:
            index = _draw(samples.is_dialogue, count, rng)
            truth = torch.from_numpy((samples.labels[index] - mean) / scale)
            error = net(_vary(samples.crops.at(index), rng)) - truth
            loss = loss + error.square().mean() * (count / batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if (step + 1) % 400 == 0:
            logger.info("probe step %d: error %.4f", step + 1, loss.item())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(parameter.half().float())
    net.eval().requires_grad_(False)
    return FaceProbe(PROBED, net, mean.astype(np.float32), scale.astype(np.float32))


def _draw(
    is_dialogue: npt.NDArray[np.bool_], count: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Indices, half of them of dialogues where there are both kinds."""
    kinds = [np.flatnonzero(is_dialogue), np.flatnonzero(~is_dialogue)]
    kinds = [kind for kind in kinds if len(kind)]
    parts = np.array_split(np.empty(count), len(kinds))
    return np.concatenate([rng.choice(k, len(p)) for k, p in zip(kinds, parts, strict=True)])


def _vary(crops: Crops, rng: np.random.Generator) -> Crops:
    """Slight changes of contrast and brightness, the same for all parts of a frame."""
    count = len(crops.mouth)
    gain = rng.uniform(0.97, 1.03, (count, 1, 1, 1)).astype(np.float32)
    shift = rng.uniform(-4, 4, (count, 1, 1, 1)).astype(np.float32)
    return Crops(*((c * gain + shift).clip(0, 255).astype(np.uint8) for c in crops))


@torch.no_grad()
def read(probe: FaceProbe, crops: Crops) -> FloatArray:
    """Readings [F, K] of crops already cut."""
    count = len(crops.mouth)
    rows = [probe.net(crops.at(slice(i, i + 256))).numpy() for i in range(0, count, 256)]
    return (np.concatenate(rows) * probe.scale + probe.mean).astype(np.float32)


def accuracy(seen: FloatArray, truth: FloatArray) -> dict[str, dict[str, float]]:
    """How well readings [F, K] repeat labels [F, K], by name: correlation, slope, RMS error.

    The slope is that of readings over labels: below 1 the probe flattens.
    """
    out = {}
    for i, name in enumerate(PROBED):
        a, b = seen[:, i], truth[:, i]
        varies = b.std() > 1e-6
        out[name] = {
            "r": round(correlation(a, b), 4),
            "slope": round(float(np.cov(a, b)[0, 1] / b.var(ddof=1)), 3) if varies else 0.0,
            "rmse": round(float(np.sqrt(np.mean((a - b) ** 2))), 4),
        }
    return out


def planted_lags(seen: FloatArray, truth: FloatArray, fps: float = 25) -> dict[str, float]:
    """Self-test: the lag in ms that is found for each number of frames planted in the readings."""
    jaw = PROBED.index("jaw")
    return {
        str(planted): round(lag_ms(np.roll(seen[:, jaw], planted), truth[:, jaw], fps), 1)
        for planted in _LAGS
    }


def report(probe: FaceProbe, data: ProbeData) -> dict[str, object]:
    """Accuracy on held-out frames, rendered and decoded, and the self-test of lags."""
    rendered, decoded = data.held_out, data.held_out_decoded
    seen, seen_decoded = read(probe, rendered.crops), read(probe, decoded.crops)
    return {
        "frames": [len(data.rendered.labels), len(data.decoded.labels), len(seen)],
        "rendered": accuracy(seen, rendered.labels),
        "decoded": accuracy(seen_decoded, decoded.labels),
        "planted_lags_ms": planted_lags(seen_decoded, decoded.labels),
    }
