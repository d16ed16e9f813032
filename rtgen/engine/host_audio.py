"""How much sound a session takes, known on this side of the link without asking.

The engine's bound is kept here as credits, so that `push_audio` answers at once and what it
accepts is never refused later: sound that was sent is subtracted, and the engine's own figure,
which names the last sound it has counted, replaces the estimate whenever it comes.
"""

from __future__ import annotations

from rtgen.types import OUTPUT_RATE


def cost(samples: int, sample_rate: int) -> int:
    """Samples at `OUTPUT_RATE` that so many samples become, rounded up."""
    return -(-samples * OUTPUT_RATE // sample_rate)


class AudioRoom:
    """The bound of one session's sound; never more than the engine's own.

    Args:
        capacity: samples at `OUTPUT_RATE` that may wait.

    Attributes:
        epoch: interrupts so far; each empties the engine's buffer.
        total: samples at `OUTPUT_RATE` sent in this epoch.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.epoch = self.total = 0
        self._room = capacity

    @property
    def samples(self) -> int:
        """Samples at `OUTPUT_RATE` that would be accepted now."""
        return max(self._room, 0)

    def fits(self, samples: int, sample_rate: int) -> int:
        """How many of so many samples would be accepted."""
        return min(samples, self.samples * sample_rate // OUTPUT_RATE)

    def take(self, samples: int, sample_rate: int) -> None:
        """So many samples are sent."""
        spent = cost(samples, sample_rate)
        self.total += spent
        self._room -= spent

    def reset(self) -> None:
        """An interrupt is sent: what waits is dropped."""
        self.epoch, self.total, self._room = self.epoch + 1, 0, self.capacity

    def report(self, epoch: int, total: int, samples: int) -> None:
        """The engine had room for `samples` once it had counted `total` of `epoch`."""
        if epoch == self.epoch:
            self._room = samples - (self.total - total)
