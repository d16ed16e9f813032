"""The rolling cache of keys and values of one stream: a ring of frame slots that never moves.

Slots `0..sink-1` hold the stream's first frames for ever; frame `i >= sink` lives in slot
`sink + (i - sink) % ring_frames`. A key carries its rotation, and softmax does not care about
the order of keys, so nothing is shifted when the window rolls. What a chunk may see is a range
of frames, thus a range of slots modulo the ring: one contiguous span with at most one hole.

Absolute positions: keys stay as they were written. Relative positions (LongLive's infinite mode,
Infinity-RoPE): distances stay bounded because the sink follows the window. Turning all positions
by the same amount changes no score, so only the sink is turned, lazily for each layer, to stand
`max(0, query_end - window)` frames later than it was written.

All bookkeeping is host integers: no pass reads from the device or copies the window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rtgen.config import CacheConfig
from rtgen.errors import ConfigError, ShapeError
from rtgen.models.rope import apply_rope, time_shift

Pieces = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class KeyValueView:
    """What one chunk attends to in one layer.

    Attributes:
        keys: [S, heads, d], the span of slots; shares memory with the cache.
        values: [S, heads, d].
        mask: [S] bool, False in a hole of the span; None without one.
        pieces: (begin, end) of the tokens in the span that are not holes.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    pieces: Pieces

    def compact(self) -> KeyValueView:
        """The same keys and values without holes, copied if there were any."""
        if self.mask is None:
            return self
        keys = torch.cat([self.keys[a:b] for a, b in self.pieces])
        values = torch.cat([self.values[a:b] for a, b in self.pieces])
        return KeyValueView(keys, values, None, ((0, len(keys)),))


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """A copy of a cache's state, on the cache's device."""

    keys: Tensor
    values: Tensor
    sink_keys: Tensor | None
    sink_offsets: tuple[int | None, ...]
    counters: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Span:
    """The slots of one range of visible frames, in tokens."""

    tokens: slice
    mask: Tensor | None
    pieces: Pieces


class RollingKVCache:
    """Keys and values of one stream for every layer.

    Frames enter by `write` and count as context after `commit`. A pass may rewrite the frames
    after the committed ones as often as it likes.

    Args:
        config: window, sink, lead and position mode.
        num_layers: transformer blocks.
        tokens_per_frame: tokens of one latent frame.
        num_heads: attention heads.
        head_dim: width of one head.
        device: where keys and values live.
        dtype: their dtype.

    Attributes:
        committed: frames whose final keys and values are in the cache.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        num_layers: int,
        tokens_per_frame: int,
        num_heads: int,
        head_dim: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = config
        self.num_layers = num_layers
        self.tokens_per_frame = tokens_per_frame
        self.head_dim = head_dim
        self.device = torch.device(device)
        self.dtype = dtype
        self.committed = 0
        self._peak = 0  # most frames ever committed: what `lead` is counted from
        self._written = 0  # end of the latest frame ever written: tells which slots are overwritten
        self._turns = config.position_mode == "relative" and config.sink > 0
        slots = (num_layers, config.num_frames * tokens_per_frame, num_heads, head_dim)
        sink = (num_layers, config.sink * tokens_per_frame, num_heads, head_dim)
        # Tensors born in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self.keys = torch.zeros(slots, device=self.device, dtype=dtype)
            self.values = torch.zeros(slots, device=self.device, dtype=dtype)
            self._sink_keys = (
                torch.zeros(sink, device=self.device, dtype=dtype) if self._turns else None
            )
        # By how many frames each layer's sink stands turned; None: its slots are stale.
        self._sink_offsets: list[int | None] = [0] * num_layers
        self._masks: dict[Pieces, Tensor] = {}
        self._spans: dict[int, _Span] = {}
        self._shift: tuple[int, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        tensors = (self.keys, self.values, self._sink_keys)
        return sum(t.nbytes for t in tensors if t is not None)

    @property
    def max_ahead(self) -> int:
        """Frames that may be written after the committed ones."""
        return self.config.frames_per_chunk * (2 if self.config.merge_clean_pass else 1)

    def write(self, layer: int, start_frame: int, k: Tensor, v: Tensor) -> None:
        """Puts the keys and values of consecutive frames into their slots.

        Args:
            layer: 0..num_layers-1.
            start_frame: index of the first frame in the stream.
            k: [frames * tokens_per_frame, heads, d], rotated to their absolute positions.
            v: [frames * tokens_per_frame, heads, d].

        Raises:
            ConfigError: the frames lie beyond what the ring can take (see `check_range`).
        """
        frames = len(k) // self.tokens_per_frame
        if layer == 0:
            self.check_range(start_frame, frames)
            self._written = max(self._written, start_frame + frames)
        n = self.tokens_per_frame
        for first, slot, count in self._runs(start_frame, frames):
            source = slice(first * n, (first + count) * n)
            target = slice(slot * n, (slot + count) * n)
            self.keys[layer, target].copy_(k[source])
            self.values[layer, target].copy_(v[source])
            if self._sink_keys is not None and slot < self.config.sink:
                self._sink_keys[layer, target].copy_(k[source])
                if self._sink_offsets[layer] != 0:
                    self._sink_offsets[layer] = None

    def check_range(self, start_frame: int, frames: int) -> None:
        """Refuses frames that leave a gap, run too far ahead, or whose slots are taken.

        Raises:
            ConfigError: names the allowed range.
        """
        if not 0 <= start_frame <= self.committed:
            raise ConfigError(
                f"a pass must start at or before frame {self.committed}, the first without clean "
                f"keys, got {start_frame}; commit the frames before it"
            )
        if start_frame + frames > self.committed + self.max_ahead:
            raise ConfigError(
                f"a pass may reach {self.max_ahead} frames beyond frame {self.committed}, got "
                f"frames {start_frame}..{start_frame + frames - 1}; use smaller chunks"
            )
        if self.config.sink <= start_frame < self._written - self.config.ring_frames:
            raise ConfigError(
                f"frame {start_frame} has left the ring, which starts at frame "
                f"{self._written - self.config.ring_frames}"
            )

    def view(self, layer: int, query_end: int) -> KeyValueView:
        """The keys and values that a chunk may see: sink, recent frames and itself.

        Args:
            layer: 0..num_layers-1.
            query_end: index of the frame after the chunk's last.

        Raises:
            ConfigError: a frame that should be visible was never written or is overwritten.
        """
        span = self._spans.get(query_end)
        if span is None:
            span = self._find_span(query_end)
        if self._turns:
            self._turn_sink(layer, max(0, query_end - self.config.window))
        return KeyValueView(
            self.keys[layer, span.tokens], self.values[layer, span.tokens], span.mask, span.pieces
        )

    def read(self, start_frame: int, frames: int) -> tuple[Tensor, Tensor]:
        """A copy of the keys and values of some frames in the ring, as they stand now.

        Returns:
            keys, values: [L, frames * tokens_per_frame, heads, d].
        """
        n = self.tokens_per_frame
        slots = [slice(s * n, (s + count) * n) for _, s, count in self._runs(start_frame, frames)]
        keys = torch.cat([self.keys[:, slot] for slot in slots], dim=1)
        return keys, torch.cat([self.values[:, slot] for slot in slots], dim=1)

    def commit(self, frames: int) -> None:
        """Declares that the next `frames` frames hold their final keys and values.

        Raises:
            ConfigError: they were not all written.
        """
        if frames < 0 or self.committed + frames > self._written:
            raise ConfigError(
                f"only {self._written - self.committed} frames are written beyond frame "
                f"{self.committed}, cannot commit {frames}"
            )
        self.committed += frames
        self._peak = max(self._peak, self.committed)
        self._spans.clear()

    def rollback(self, frames: int) -> None:
        """Forgets the last committed frames; the next pass starts at the earlier frame.

        Raises:
            ConfigError: more than `lead` frames behind the furthest committed one.
        """
        target = self.committed - frames
        if frames < 0 or target < max(0, self._peak - self.config.lead):
            raise ConfigError(
                f"can roll back to frame {max(0, self._peak - self.config.lead)} (lead "
                f"{self.config.lead}), not from frame {self.committed} by {frames}; raise lead"
            )
        self.committed = target
        self._spans.clear()

    def discard(self, start_frame: int, frames: int) -> None:
        """Zeroes frames after a failed pass: NaN times a masked weight of 0 is still NaN."""
        n = self.tokens_per_frame
        for _, slot, count in self._runs(start_frame, frames):
            target = slice(slot * n, (slot + count) * n)
            self.keys[:, target].zero_()
            self.values[:, target].zero_()
            if self._sink_keys is not None and slot < self.config.sink:
                self._sink_keys[:, target].zero_()

    def snapshot(self) -> CacheSnapshot:
        """A copy of everything, for `restore`."""
        return CacheSnapshot(
            self.keys.clone(),
            self.values.clone(),
            None if self._sink_keys is None else self._sink_keys.clone(),
            tuple(self._sink_offsets),
            (self.committed, self._peak, self._written),
        )

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Returns to a snapshot of this cache or of one with the same configuration.

        Raises:
            ShapeError: the snapshot is of another size.
        """
        if snapshot.keys.shape != self.keys.shape:
            raise ShapeError(
                f"a snapshot of shape {tuple(self.keys.shape)} is needed, got "
                f"{tuple(snapshot.keys.shape)}; restore into a cache of the same configuration"
            )
        self.keys.copy_(snapshot.keys)
        self.values.copy_(snapshot.values)
        if self._sink_keys is not None and snapshot.sink_keys is not None:
            self._sink_keys.copy_(snapshot.sink_keys)
        self._sink_offsets = list(snapshot.sink_offsets)
        self.committed, self._peak, self._written = snapshot.counters
        self._spans.clear()

    def clone(self) -> RollingKVCache:
        """An independent cache in the same state."""
        twin = RollingKVCache(
            self.config,
            num_layers=self.num_layers,
            tokens_per_frame=self.tokens_per_frame,
            num_heads=self.keys.shape[2],
            head_dim=self.head_dim,
            device=self.device,
            dtype=self.dtype,
        )
        twin.restore(self.snapshot())
        return twin

    def check_integrity(self) -> None:
        """Checks counters and that everything visible is finite; reads from the device.

        Raises:
            ConfigError: says what is broken.
        """
        floor = max(0, self._peak - self.config.lead)
        if not floor <= self.committed <= self._peak <= self._written:
            raise ConfigError(
                f"cache counters are inconsistent: committed {self.committed}, peak {self._peak}, "
                f"written {self._written}, lead {self.config.lead}"
            )
        if self.committed == 0:
            return
        for layer in range(self.num_layers):
            view = self.view(layer, self.committed).compact()
            if not (view.keys.isfinite().all() and view.values.isfinite().all()):
                raise ConfigError(f"the cache holds NaN or infinity in layer {layer}")

    def _runs(self, start_frame: int, frames: int) -> list[tuple[int, int, int]]:
        """(index within the frames, slot, count) of each run of adjacent slots."""
        sink, ring = self.config.sink, self.config.ring_frames
        runs: list[tuple[int, int, int]] = []
        frame, end = start_frame, start_frame + frames
        while frame < end:
            slot = frame if frame < sink else sink + (frame - sink) % ring
            limit = sink if frame < sink else sink + ring
            count = min(end - frame, limit - slot)
            runs.append((frame - start_frame, slot, count))
            frame += count
        return runs

    def _find_span(self, query_end: int) -> _Span:
        config, n = self.config, self.tokens_per_frame
        first = max(config.sink, query_end - config.recent)
        gone = first < min(query_end, self._written - config.ring_frames)
        if not 0 < query_end <= self._written or gone:
            raise ConfigError(
                f"a chunk that ends before frame {query_end} needs frames from {first} on; the "
                f"ring holds {max(0, self._written - config.ring_frames)}..{self._written - 1}"
            )
        runs = [(slot, count) for _, slot, count in self._runs(0, min(config.sink, query_end))]
        runs += [(slot, count) for _, slot, count in self._runs(first, max(0, query_end - first))]
        runs.sort()
        start = runs[0][0]
        merged: list[list[int]] = []
        for slot, count in runs:
            if merged and merged[-1][1] == slot - start:
                merged[-1][1] += count
            else:
                merged.append([slot - start, slot - start + count])
        pieces = tuple((a * n, b * n) for a, b in merged)
        tokens = slice(start * n, (start + merged[-1][1]) * n)
        mask = self._mask(pieces) if len(pieces) > 1 else None
        span = _Span(tokens, mask, pieces)
        self._spans[query_end] = span
        return span

    def _mask(self, pieces: Pieces) -> Tensor:
        """[S] bool; there are at most `ring_frames` different ones, and each is kept."""
        mask = self._masks.get(pieces)
        if mask is None:
            with torch.inference_mode(False):
                mask = torch.zeros(pieces[-1][1], dtype=torch.bool)
                for begin, end in pieces:
                    mask[begin:end] = True
                mask = self._masks[pieces] = mask.to(self.device)
        return mask

    def _turn_sink(self, layer: int, offset: int) -> None:
        """Makes one layer's sink keys stand `offset` frames later than written."""
        if self._sink_offsets[layer] == offset:
            return
        assert self._sink_keys is not None  # only called in relative mode with a sink
        if self._shift is None or self._shift[0] != offset:
            self._shift = (offset, time_shift(offset, self.head_dim, self.device))
        source = self._sink_keys[layer]
        self.keys[layer, : len(source)].copy_(apply_rope(source, self._shift[1]))
        self._sink_offsets[layer] = offset
