"""A thousand latents through every decoder (`make soak`): the memory holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.decoders.cases import CASES

LATENTS = 1000


def resident_kib() -> int:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("/proc/self/status has no VmRSS")


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_a_thousand_latents_leave_the_memory_where_it_was(name: str) -> None:
    case = CASES[name]()
    state, latents = case.state(), case.latents(8)
    nbytes, early = state.nbytes, 0
    for index in range(LATENTS):
        (unit,) = case.decoder.step([state], latents[index % 8])
        assert unit.isfinite().all()
        early = resident_kib() if index == LATENTS // 5 else early
    assert state.nbytes == nbytes
    grown = (resident_kib() - early) / 1024
    assert grown < 16, f"memory grew by {grown:.0f} MiB from latent {LATENTS // 5} to {LATENTS}"
