"""Names of the weights of Wan's video autoencoder: the original files and diffusers' (ours).

The original counts everything that stands in a row: in Wan2.1 one flat list holds the residual
blocks and resamplers of all stages, in Wan2.2 every stage has a list of its own. Only the decoding
half is kept; what belongs to the encoder is dropped by name, so that a foreign weight still shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rtgen.errors import CheckpointError
from rtgen.weights.key_maps import unwrap

# Per channel, of raw latents: raw = normalised * std + mean. From the files' own configurations.
# fmt: off
WAN21_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
WAN21_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)
WAN22_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
    -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
    -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
    -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
    0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)
WAN22_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
    0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
    0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
    0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
    0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)
# fmt: on

_ENCODING = ("encoder.", "quant_conv.", "conv1.")
_PARTS = {"conv2": "post_quant_conv", "decoder.conv1": "decoder.conv_in"}
_HEAD = {"0": "norm_out", "2": "conv_out"}
_RESIDUAL = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}
_RESIDUAL_BACK = {new: old for old, new in _RESIDUAL.items()}
_MIDDLE = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}
_MIDDLE_BACK = {new: old for old, new in _MIDDLE.items()}

_FLAT = re.compile(r"decoder\.upsamples\.(\d+)\.(.+)")
_STAGED = re.compile(r"decoder\.upsamples\.(\d+)\.upsamples\.(\d+)\.(.+)")
_UP_RESNET = re.compile(r"decoder\.up_blocks\.(\d+)\.resnets\.(\d+)\.(.+)")
_UP_SAMPLER = re.compile(r"decoder\.up_blocks\.(\d+)\.upsampler(s\.0)?\.(.+)")


def is_original_naming(names: Mapping[str, Any]) -> bool:
    """Whether a bare state dict uses the names of Wan's own files."""
    return any(name.startswith(("decoder.upsamples.", "decoder.middle.")) for name in names)


def vae_to_diffusers(name: str, blocks: int) -> str:
    """Diffusers' name of a decoding weight of Wan's files; an unknown name stays as it is.

    Args:
        name: original name.
        blocks: residual blocks of a stage of the decoder (`num_res_blocks` + 1).
    """
    if found := _STAGED.fullmatch(name):
        stage, place, rest = int(found[1]), int(found[2]), found[3]
        if place == blocks:
            return f"decoder.up_blocks.{stage}.upsampler.{rest}"
        return f"decoder.up_blocks.{stage}.resnets.{place}.{_swap_start(rest, _RESIDUAL)}"
    if found := _FLAT.fullmatch(name):
        stage, place = divmod(int(found[1]), blocks + 1)
        if place == blocks:
            return f"decoder.up_blocks.{stage}.upsamplers.0.{found[2]}"
        return f"decoder.up_blocks.{stage}.resnets.{place}.{_swap_start(found[2], _RESIDUAL)}"
    if name.startswith("decoder.middle."):
        _, _, number, rest = name.split(".", 3)
        if number in _MIDDLE:
            return f"decoder.mid_block.{_MIDDLE[number]}.{_swap_start(rest, _RESIDUAL)}"
    if name.startswith("decoder.head."):
        _, _, number, rest = name.split(".", 3)
        if number in _HEAD:
            return f"decoder.{_HEAD[number]}.{rest}"
    return _swap_start(name, _PARTS)


def vae_to_original(name: str, blocks: int, *, staged: bool) -> str:
    """The inverse of `vae_to_diffusers`.

    Args:
        name: diffusers' name.
        blocks: residual blocks of a stage of the decoder.
        staged: Wan2.2's layout, a list per stage.
    """
    if found := _UP_RESNET.fullmatch(name):
        stage, place = int(found[1]), int(found[2])
        where = f"{stage}.upsamples.{place}" if staged else str(stage * (blocks + 1) + place)
        return f"decoder.upsamples.{where}.{_swap_start(found[3], _RESIDUAL_BACK)}"
    if found := _UP_SAMPLER.fullmatch(name):
        stage = int(found[1])
        where = f"{stage}.upsamples.{blocks}" if staged else str(stage * (blocks + 1) + blocks)
        return f"decoder.upsamples.{where}.{found[3]}"
    for new, old in _MIDDLE_BACK.items():
        start = f"decoder.mid_block.{new}."
        if name.startswith(start):
            return f"decoder.middle.{old}.{_swap_start(name[len(start) :], _RESIDUAL_BACK)}"
    for old, new in _HEAD.items():
        if name.startswith(f"decoder.{new}."):
            return f"decoder.head.{old}." + name[len(f"decoder.{new}.") :]
    return _swap_start(name, {new: old for old, new in _PARTS.items()})


def _swap_start(name: str, table: Mapping[str, str]) -> str:
    for old, new in table.items():
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
    return name


def decoding_state(checkpoint: Mapping[str, Any], blocks: int) -> dict[str, Tensor]:
    """The weights of the decoding half under diffusers' names.

    Args:
        checkpoint: a state dict of either naming, bare or in a known container.
        blocks: residual blocks of a stage of the decoder (`num_res_blocks` + 1).

    Raises:
        CheckpointError: no state dict is found, or it has no decoder.
    """
    state = unwrap(checkpoint)
    kept = {name: value for name, value in state.items() if not name.startswith(_ENCODING)}
    if not any(name.startswith("decoder.") for name in kept):
        raise CheckpointError(
            "expected weights of a Wan autoencoder, with names that begin with 'decoder.'; found "
            f"{', '.join(sorted(state)[:3]) or 'nothing'}"
        )
    if not is_original_naming(kept):
        return kept
    return {vae_to_diffusers(name, blocks): value for name, value in kept.items()}
