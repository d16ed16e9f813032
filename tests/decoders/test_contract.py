"""One contract for all decoders, and proof that its checks find what they are for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decoders.base import (
    MemorylessDecoder,
    StreamingDecoder,
    StreamingNetwork,
    TensorState,
    require_latent_space,
)
from rtgen.errors import ConfigError
from tests.decoders.cases import CASES
from tests.decoders.contract import (
    CHECKS,
    Case,
    check_bad_calls,
    check_clone,
    check_input_is_not_written,
    check_interleaved_sessions,
    check_interrupted_step,
    check_nbytes,
    check_output_is_not_the_memory,
    check_rollback,
    check_rows_together,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", CASES)
def test_contract(name: str, check: Callable[[Case], None]) -> None:
    check(CASES[name]())


@pytest.mark.parametrize("name", CASES)
def test_a_cancelled_step_moves_no_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]()
    is_memoryless = isinstance(case.decoder, MemorylessDecoder)
    check_interrupted_step(case, monkeypatch, "forward" if is_memoryless else "stream")


@pytest.mark.parametrize("name", CASES)
def test_a_state_of_another_dtype_is_refused(name: str) -> None:
    case = CASES[name]()
    with pytest.raises(ConfigError, match=r"torch\.bfloat16"):
        case.decoder.new_state(*case.size, torch.bfloat16, "cpu")


@pytest.mark.parametrize("name", CASES)
def test_a_tag_is_checked_where_it_travels(name: str) -> None:
    case = CASES[name]()
    case.decoder.step([case.state()], case.latents(1)[0], "toy")
    require_latent_space(case.decoder, "toy")
    with pytest.raises(ConfigError, match="'wan2.1'"):
        require_latent_space(case.decoder, "wan2.1")


class Sum(StreamingNetwork):
    """Paints the running sum of its latents; the smallest network with a memory."""

    latent_channels = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)

    def new_memory(self, height: int, width: int) -> tuple[Tensor, ...]:
        return (torch.zeros(3, height, width),)

    def stream(
        self, latents: Tensor, memory: tuple[Tensor, ...], is_first: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        total = memory[0] + latents
        return total[None].clone(), (total,)


def sum_case(network: StreamingNetwork | None = None) -> Case:
    decoder = StreamingDecoder(network or Sum(), latent_space="toy", lead=2)
    return Case(decoder, (2, 3), 3, first=1, frames=1, scale=1, has_memory=True)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_smallest_decoder_keeps_the_contract(check: Callable[[Case], None]) -> None:
    check(sum_case())


class WrittenMemory(Sum):
    """Bug: adds to the memory in place."""

    def stream(
        self, latents: Tensor, memory: tuple[Tensor, ...], is_first: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        total = memory[0].add_(latents)
        return total[None].clone(), memory


class SharedMemory(Sum):
    """Bug: what it remembers is the network's."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(())

    def stream(
        self, latents: Tensor, memory: tuple[Tensor, ...], is_first: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        self.kept = (memory[0] if is_first else self.kept) + latents
        return self.kept[None].clone(), (self.kept,)


class WrittenLatents(Sum):
    """Bug: adds the memory to the caller's latents."""

    def stream(
        self, latents: Tensor, memory: tuple[Tensor, ...], is_first: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        total = latents.add_(memory[0])
        return total[None].clone(), (total.clone(),)


class ReturnedMemory(Sum):
    """Bug: hands its memory out as the picture."""

    def stream(
        self, latents: Tensor, memory: tuple[Tensor, ...], is_first: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        total = memory[0] + latents
        return total[None], (total,)


class GrowingMemory(Sum):
    """Bug: remembers every frame."""

    def stream(
        self, latents: Tensor, memory: tuple[Tensor, ...], is_first: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return (memory[0][:3] + latents)[None], (torch.cat((memory[0], latents)),)


@pytest.mark.parametrize(
    ("network", "check"),
    [
        (WrittenMemory, check_clone),
        (WrittenMemory, check_rollback),
        (SharedMemory, check_interleaved_sessions),
        (SharedMemory, check_rows_together),
        (SharedMemory, check_rollback),
        (WrittenLatents, check_input_is_not_written),
        (ReturnedMemory, check_output_is_not_the_memory),
        (GrowingMemory, check_nbytes),
    ],
)
def test_planted_bugs_break_the_contract(network: type[Sum], check: Callable[[Case], None]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        check(sum_case(network()))


def test_planted_step_without_checks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoders.base._check_latents", lambda *arguments: None)
    with pytest.raises(AssertionError, match="was taken"):
        check_bad_calls(sum_case())


def test_planted_commit_before_the_last_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(self: StreamingDecoder, states: list[TensorState], latents: Tensor) -> list[Tensor]:
        outs = []
        for state, row in zip(states, latents, strict=True):
            pixels, memory = self.network.stream(row[0], state.memory, state.frames == 0)
            state.advance(memory)
            outs.append(pixels)
        return outs

    monkeypatch.setattr(StreamingDecoder, "step", eager)
    with pytest.raises(AssertionError):
        check_interrupted_step(sum_case(), monkeypatch, "stream")


def test_rollback_needs_a_lead() -> None:
    decoder = StreamingDecoder(Sum(), latent_space="toy", lead=0)
    state = decoder.new_state(2, 3, torch.float32, "cpu")
    decoder.step([state], torch.ones(1, 1, 3, 2, 3))
    with pytest.raises(ConfigError, match="larger lead than 0"):
        state.rollback(1)
    assert state.nbytes == 3 * 2 * 3 * 4
    with pytest.raises(ConfigError, match="negative"):
        StreamingDecoder(Sum(), latent_space="toy", lead=-1)
