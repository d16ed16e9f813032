"""What every decoder must do, as checks that the tests of decoders share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rtgen.errors import ConfigError, RtgenError, ShapeError


@dataclass(frozen=True)
class Case:
    """A decoder under test.

    Attributes:
        decoder: ready for use, in float32 on the CPU; keeps two latent frames for rollback.
        size: latent rows and columns.
        channels: of its latents.
        first: pixel frames of the first latent frame.
        frames: pixel frames of later ones.
        scale: pixel rows per latent row.
        has_memory: whether earlier latents matter.
    """

    decoder: Any
    size: tuple[int, int]
    channels: int
    first: int
    frames: int
    scale: int
    has_memory: bool

    def state(self) -> Any:
        return self.decoder.new_state(*self.size, torch.float32, "cpu")

    def latents(self, count: int, seed: int = 0) -> Tensor:
        """[count, 1, 1, C, h, w]: one row, one frame at a time."""
        random = torch.Generator().manual_seed(seed)
        return torch.randn(count, 1, 1, self.channels, *self.size, generator=random)

    def decode(self, latents: Tensor, state: Any = None) -> list[Tensor]:
        state = self.state() if state is None else state
        return [self.decoder.step([state], row)[0] for row in latents]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit."""
    assert [f.shape for f in found] == [e.shape for e in expected]
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def check_shapes(case: Case) -> None:
    units = case.decode(case.latents(3))
    height, width = (side * case.scale for side in case.size)
    assert [unit.shape for unit in units] == [
        (case.first if i == 0 else case.frames, 3, height, width) for i in range(3)
    ]
    assert all(unit.dtype == torch.float32 and unit.isfinite().all() for unit in units)
    assert units[1].std() > 0.01


def check_memory_matters(case: Case) -> None:
    """Earlier latents change later frames exactly where a decoder has a memory."""
    latents, other = case.latents(3), case.latents(3, seed=1)
    changed = torch.cat((other[:1], latents[1:]))
    same = torch.equal(case.decode(latents)[2], case.decode(changed)[2])
    assert same != case.has_memory


def check_interleaved_sessions(case: Case) -> None:
    """Sessions that take turns do not see each other."""
    rows = [case.latents(4, seed) for seed in (0, 1)]
    alone = [case.decode(row) for row in rows]
    states = [case.state(), case.state()]
    turns = [[case.decoder.step([states[s]], rows[s][i])[0] for s in (0, 1)] for i in range(4)]
    for session in (0, 1):
        assert_same([turn[session] for turn in turns], alone[session])


def check_rows_together(case: Case) -> None:
    """Rows of one call, at different places of their streams, get the bits that each gets alone."""
    rows, states = [case.latents(4, seed) for seed in range(3)], [case.state() for _ in range(3)]
    alone = [case.decode(row) for row in rows]
    for age, state in enumerate(states):
        case.decode(rows[age][:age], state)
    found = case.decoder.step(states, torch.cat([rows[age][age] for age in range(3)]))
    assert_same(found, [alone[age][age] for age in range(3)])
    found = case.decoder.step([states[2]], rows[2][3])
    assert_same(found, [alone[2][3]])


def check_threads(case: Case) -> None:
    """Sessions in threads of their own do not see each other."""
    rows = [case.latents(5, seed) for seed in (0, 1)]
    alone = [case.decode(row) for row in rows]
    found: list[list[Tensor]] = [[], []]
    threads = [
        threading.Thread(target=lambda s=s: found[s].extend(case.decode(rows[s]))) for s in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for session in (0, 1):
        assert_same(found[session], alone[session])


def check_clone(case: Case) -> None:
    """A copy goes its own way and leaves the original where it was."""
    latents = case.latents(4)
    alone, state = case.decode(latents), case.state()
    case.decode(latents[:2], state)
    twin = state.clone()
    case.decode(case.latents(2, seed=1), twin)
    assert_same(case.decode(latents[2:], state), alone[2:])


def check_rollback(case: Case) -> None:
    """Frames that were taken back leave no trace, however often; none goes below the memory."""
    latents = case.latents(6)
    alone, state = case.decode(latents), case.state()
    case.decode(latents[:2], state)
    for back in (2, 1, 0):
        state.rollback(back)
        done = 2 - back
        case.decode(case.latents(back, seed=1), state)
        state.rollback(back)
        assert_same(case.decode(latents[done:2], state), alone[done:2])
    case.decode(latents[2:5], state)
    state.rollback(2)
    if case.has_memory:
        with pytest.raises(ConfigError, match="roll back"):
            state.rollback(1)
    with pytest.raises(ConfigError):
        state.rollback(-1)
    assert_same(case.decode(latents[3:], state), alone[3:])


def _step(case: Case, latents: Tensor, state: Any) -> object:
    return case.decoder.step([state], latents)


def bad_calls(case: Case) -> dict[str, tuple[type[RtgenError], Callable[[Any], object]]]:
    """What `step` must refuse, by name: the error, and the call on a state."""
    good, step = case.latents(1)[0], case.decoder.step
    spoilt = {value: good.clone() for value in (float("nan"), float("inf"), float("-inf"))}
    for value, latents in spoilt.items():
        latents[0, 0, -1, 0, -1] = value
    return {
        **{str(v): (ConfigError, partial(_step, case, z)) for v, z in spoilt.items()},
        "space": (ConfigError, lambda s: step([s], good, "another space")),
        "twice": (ConfigError, lambda s: step([s, s], torch.cat((good, good)))),
        "two frames": (ShapeError, lambda s: step([s], torch.cat((good, good), 1))),
        "two rows": (ShapeError, lambda s: step([s], torch.cat((good, good)))),
        "no row": (ShapeError, lambda s: step([s], good[:0])),
        "no time": (ShapeError, lambda s: step([s], good[0])),
        "channels": (ShapeError, lambda s: step([s], torch.cat((good, good), 2))),
        "size": (ShapeError, lambda s: step([s], torch.cat((good, good), 3))),
    }


def check_bad_calls(case: Case) -> None:
    """A refused call leaves the state where it was."""
    latents = case.latents(3)
    alone, state = case.decode(latents), case.state()
    case.decode(latents[:1], state)
    for name, (error, call) in bad_calls(case).items():
        try:
            call(state)
        except error:
            continue
        raise AssertionError(f"{name} was taken")
    assert_same(case.decode(latents[1:], state), alone[1:])


def check_input_is_not_written(case: Case) -> None:
    latents, state = case.latents(3), case.state()
    before = latents.clone()
    case.decode(latents, state)
    assert torch.equal(latents, before)


def check_output_is_not_the_memory(case: Case) -> None:
    """A caller may write into the frames that it got."""
    latents = case.latents(4)
    alone, state = case.decode(latents), case.state()
    for row, expected in zip(latents, alone, strict=True):
        (unit,) = case.decoder.step([state], row)
        assert torch.equal(unit, expected)
        with torch.inference_mode():
            unit.fill_(7)


def check_interrupted_step(case: Case, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A cancellation while the second row is decoded moves no state, the first row's either."""
    rows, states = [case.latents(3, seed) for seed in (0, 1)], [case.state(), case.state()]
    alone = [case.decode(row) for row in rows]
    for row, state in zip(rows, states, strict=True):
        case.decode(row[:1], state)
    network = case.decoder.network
    run, calls = getattr(network, method), [0]

    def interrupted(*arguments: Any) -> Any:
        calls[0] += 1
        out = run(*arguments)
        if calls[0] == 2:
            raise KeyboardInterrupt
        return out

    with monkeypatch.context() as patch:
        patch.setattr(network, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            case.decoder.step(states, torch.cat([row[1] for row in rows]))
    for row, state, expected in zip(rows, states, alone, strict=True):
        assert_same(case.decode(row[1:], state), expected[1:])


def check_nbytes(case: Case) -> None:
    """The bytes of a state are known beforehand, and do not grow."""
    state = case.state()
    before = state.nbytes
    assert (before > 0) == case.has_memory
    case.decode(case.latents(12), state)
    assert state.nbytes == before == state.clone().nbytes


CHECKS = (
    check_shapes,
    check_memory_matters,
    check_interleaved_sessions,
    check_rows_together,
    check_threads,
    check_clone,
    check_rollback,
    check_bad_calls,
    check_input_is_not_written,
    check_output_is_not_the_memory,
    check_nbytes,
)
