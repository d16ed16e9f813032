"""Names of weights: Wan's original names, diffusers' names (which are ours), and wrappers.

Public checkpoints come bare, inside a dictionary (`generator_ema`, `state_dict`, ...), with a
prefix, or with segments that FSDP or activation checkpointing left in the names. One trap: the
original calls the affine norm before cross-attention `norm3` and the one before the feed-forward
`norm2`; diffusers has them the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rtgen.errors import CheckpointError

_TOP = {
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.modulation": "scale_shift_table",
    "head.head": "proj_out",
}
_BLOCK = {
    "modulation": "scale_shift_table",
    "norm2": "norm3",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    **{
        f"{old}.{part}": f"{new}.{target}"
        for old, new in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for part, target in (
            ("q", "to_q"),
            ("k", "to_k"),
            ("v", "to_v"),
            ("o", "to_out.0"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    },
}
_TOP_BACK = {new: old for old, new in _TOP.items()}
_BLOCK_BACK = {new: old for old, new in _BLOCK.items()}

# The longest first: "model." is a beginning of "model.diffusion_model.".
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.", "net.")
_SEGMENTS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
# Training-time heads that some generators carry along.
_FOREIGN = ("_cls_pred_branch", "_register_tokens", "_gan_ca_blocks")
_CONTAINERS = ("generator_ema", "generator", "model", "state_dict")


def wan_to_diffusers(name: str) -> str:
    """Diffusers' name of a weight of Wan's original model; an unknown name stays as it is."""
    return _rename(name, _TOP, _BLOCK)


def diffusers_to_wan(name: str) -> str:
    """The inverse of `wan_to_diffusers`."""
    return _rename(name, _TOP_BACK, _BLOCK_BACK)


def _rename(name: str, top: Mapping[str, str], block: Mapping[str, str]) -> str:
    parts = name.split(".")
    if parts[0] == "blocks" and len(parts) > 2:
        return ".".join(parts[:2]) + "." + _replace_start(".".join(parts[2:]), block)
    return _replace_start(name, top)


def _replace_start(name: str, table: Mapping[str, str]) -> str:
    for old, new in table.items():
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
    return name


def is_wan_naming(names: Mapping[str, Any]) -> bool:
    """Whether a bare state dict uses Wan's original names."""
    return any(name.startswith(("time_embedding.", "head.modulation")) for name in names)


def unwrap(checkpoint: Mapping[str, Any], use_ema: bool = True) -> dict[str, Tensor]:
    """The bare state dict inside a checkpoint, under the names it was trained with.

    Args:
        checkpoint: a state dict, or a dictionary that holds one as `generator_ema`, `generator`,
            `model` or `state_dict`.
        use_ema: prefer `generator_ema` to `generator` where there are both.

    Raises:
        CheckpointError: no state dict is found, or two weights end up with one name.
    """
    state: Mapping[str, Any] = checkpoint
    order = _CONTAINERS if use_ema else (*_CONTAINERS[1:], _CONTAINERS[0])
    for key in order:
        if isinstance(checkpoint.get(key), Mapping):
            state = checkpoint[key]
            break
    bare: dict[str, Tensor] = {}
    for full_name, value in state.items():
        name = _strip(full_name)
        if any(part in name for part in _FOREIGN):
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"expected a state dict of tensors, found {type(value).__name__} under "
                f"{full_name!r}; the known containers are {', '.join(_CONTAINERS)}"
            )
        if name in bare:
            raise CheckpointError(f"two weights are both called {name!r} after stripping wrappers")
        bare[name] = value
    return bare


def _strip(name: str) -> str:
    for segment in _SEGMENTS:
        name = name.replace(segment, "")
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def to_diffusers(checkpoint: Mapping[str, Any], use_ema: bool = True) -> dict[str, Tensor]:
    """Unwraps a checkpoint and renames its weights to diffusers' names if need be.

    Raises:
        CheckpointError: see `unwrap`.
    """
    state = unwrap(checkpoint, use_ema)
    if not is_wan_naming(state):
        return state
    return {wan_to_diffusers(name): value for name, value in state.items()}
