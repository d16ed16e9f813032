from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor
from torch.testing import assert_close

from rtgen.models.rope import apply_rope, axis_dims, frame_rope, rope_table, time_shift
from tests.oracles import slow_rotate


def rotated(x: Tensor, frames: list[int], grid: tuple[int, int]) -> Tensor:
    return apply_rope(x, frame_rope(frames, *grid, x.shape[-1]))


@pytest.mark.parametrize("head_dim", [24, 32, 40, 64, 128])
def test_rotations_are_those_of_diffusers(head_dim: int) -> None:
    rope = WanRotaryPosEmbed(head_dim, (1, 2, 2), 1024)
    cos, sin = rope(torch.zeros(1, 4, 5, 6, 8))  # [1, N, 1, d], every pair twice
    rotation = frame_rope(range(5), 3, 4, head_dim)
    assert_close(rotation.real, cos[0, :, 0, ::2], check_dtype=False)
    assert_close(rotation.imag, sin[0, :, 0, 1::2], check_dtype=False)
    assert axis_dims(128) == (44, 42, 42)


@pytest.mark.parametrize("frame", [0, 1, 1023, 1024, 2**20, -7])
def test_rotation_equals_the_slow_rotation_at_any_frame(frame: int) -> None:
    x = torch.randn(6, 2, 40)
    assert_close(rotated(x, [frame], (2, 3)), slow_rotate(x.double(), frame, 3).float())


def test_planted_half_split_pairs_are_seen() -> None:
    x = torch.randn(6, 2, 40)
    halves = torch.complex(x[..., :20], x[..., 20:]) * frame_rope([5], 2, 3, 40)[:, None]
    wrong = torch.cat((halves.real, halves.imag), dim=-1)
    assert (wrong - slow_rotate(x.double(), 5, 3)).abs().max() > 0.1


def test_scores_depend_on_distance_alone_up_to_two_to_the_twenty() -> None:
    q, k = torch.randn(2, 6, 1, 40)

    def scores(start: int) -> Tensor:
        a, b = rotated(q, [start + 9], (2, 3)), rotated(k, [start], (2, 3))
        return a[:, 0] @ b[:, 0].T

    assert_close(scores(2**20), scores(0), atol=1e-4, rtol=1e-4)


def test_planted_float32_angles_lose_the_distance() -> None:
    _, sin = rope_table([2**20 + 1], 16)
    ladder = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    assert ((2**20 + 1) * ladder.float()).sin().sub(sin[0]).abs().max() > 1e-3


def test_a_time_shift_moves_keys_that_are_already_rotated() -> None:
    k = torch.randn(6, 2, 40)
    moved = apply_rope(rotated(k, [3], (2, 3)), time_shift(500, 40))
    assert_close(moved, rotated(k, [503], (2, 3)), atol=1e-5, rtol=1e-5)


def test_rotations_made_in_inference_mode_serve_in_training() -> None:
    with torch.inference_mode():
        frame_rope([77], 2, 5, 24)
    x = torch.randn(10, 2, 24, requires_grad=True)
    loss = apply_rope(x, frame_rope([77], 2, 5, 24)).square().sum()
    assert torch.autograd.grad(loss, x)[0].any()


def test_half_precision_is_rotated_in_float32() -> None:
    x = torch.randn(4, 2, 24, dtype=torch.bfloat16)
    assert_close(rotated(x, [9], (2, 2)), rotated(x.float(), [9], (2, 2)), atol=0, rtol=0)
