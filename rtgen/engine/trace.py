"""Decisions of the scheduler, written down and made again.

A decision depends on nothing but its arguments. So a trace that was recorded live, or in a
simulation, gives the same actions wherever it is replayed; one that does not has found a change of
the scheduler, or a hidden input.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rtgen.engine.scheduler import Action, Costs, Forward, Row, Sleep, decide
from rtgen.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Decision:
    """One call of `decide` and its answer."""

    now_ns: int
    live: tuple[Row, ...]
    offline: tuple[Row, ...]
    costs: Costs
    action: Action

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        is_forward = isinstance(self.action, Forward)
        return {
            "now_ns": self.now_ns,
            "live": [asdict(row) for row in self.live],
            "offline": [asdict(row) for row in self.offline],
            "forward_ns": [[*key, ns] for key, ns in self.costs.forward_ns.items()],
            "sizes": dict(self.costs.sizes),
            "forward" if is_forward else "sleep": asdict(self.action),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Decision:
        """Reads what `to_dict` gave.

        Raises:
            ConfigError: it is not that.
        """
        try:
            forward_ns = {(shape, size): ns for shape, size, ns in values["forward_ns"]}
            sizes = {shape: tuple(known) for shape, known in values["sizes"].items()}
            action: Action
            if "forward" in values:
                parts = values["forward"]
                action = Forward(tuple(parts["live"]), tuple(parts["offline"]))
            else:
                action = Sleep(values["sleep"]["until_ns"])
            live, offline = (
                tuple(Row(**row) for row in values[name]) for name in ("live", "offline")
            )
            return cls(values["now_ns"], live, offline, Costs(forward_ns, sizes), action)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a decision as `to_dict` writes it: {error!r}") from error


def changed(trace: Iterable[Decision]) -> Iterator[tuple[Decision, Action]]:
    """Decisions that come out differently now, each with what comes out."""
    for decision in trace:
        again = decide(decision.now_ns, decision.live, decision.offline, decision.costs)
        if again != decision.action:
            yield decision, again


def save_trace(path: Path, trace: Iterable[Decision]) -> None:
    """Writes one JSON object a line."""
    path.write_text("".join(json.dumps(decision.to_dict()) + "\n" for decision in trace))


def load_trace(path: Path) -> list[Decision]:
    """Reads what `save_trace` wrote.

    Raises:
        ConfigError: a line is no decision.
    """
    try:
        return [Decision.from_dict(json.loads(line)) for line in path.read_text().splitlines()]
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is no trace: {error}") from error
