"""One session's generation: `ChunkStream` holds all of its state, `run_passes` moves many at once.

A chunk is begun with its conditioning, denoised in a few noisy passes, and finished: its x0 leaves
at once, and its clean pass, which puts the finished frames into the cache, is owed. The owed pass
comes next, or runs together with the first noisy pass of the following chunk. That is exact: every
group of frames attends to frames up to its own end only, and the finished frames' keys are written
before anyone reads them.

    begin -> noisy pass 0 .. n-1 -> x0 out -> (clean pass | merged with the next noisy pass 0)

The state is one frozen record that a completed pass replaces in one assignment; tensors in it are
never written in place. A pass that fails leaves the record as it was, and what it wrote to the
cache is rewritten when it is run again. Noise depends on (seed, frame, step) only. So neither
company, nor a failure, a roll-back or a restore changes what a stream produces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rtgen.config import CacheConfig, SamplingConfig
from rtgen.errors import ConfigError, RtgenError, ShapeError
from rtgen.models.conditioning import Conditioning, PreparedConditioning
from rtgen.models.denoiser import CachePass, CausalDenoiser
from rtgen.models.kv_cache import CacheSnapshot
from rtgen.sampling.noise import CLEAN_STEP, chunk_noise
from rtgen.sampling.schedulers import FlowMatchSchedule

PassKind = Literal["clean", "noisy", "merged"]


class NonFiniteError(RtgenError, ArithmeticError):
    """A pass returned NaN or infinity; no stream has advanced.

    Attributes:
        rows: positions of the streams concerned in the list given to `run_passes`.
    """

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__(
            f"expected finite output, got NaN or infinity for stream {', '.join(map(str, rows))} "
            f"of the batch; close it, or run its pass again with other weights or dtype"
        )
        self.rows = rows


@dataclass(frozen=True, slots=True)
class StreamPass:
    """The next forward of one stream, as one batch row.

    Attributes:
        kind: "clean", "noisy", or "merged" (the clean pass before, the noisy one behind).
        latents: [T, C, h, w] float32. Shared with the stream: do not write to it.
        timestep: [T] float32, 0..1000.
        cache: where the row stands in the stream's ring.
        prepared: conditioning of the T frames, B = 1.
        emits: whether completing it yields x0.
    """

    kind: PassKind
    latents: Tensor
    timestep: Tensor
    cache: CachePass
    prepared: PreparedConditioning
    emits: bool


@dataclass(frozen=True, slots=True)
class _Running:
    """A chunk that is being denoised: its latents as the next noisy step takes them."""

    start: int
    step: int
    latents: Tensor
    prepared: PreparedConditioning
    prompt: Tensor | None


@dataclass(frozen=True, slots=True)
class _Finished:
    """A chunk whose x0 is out: what its clean pass takes."""

    start: int
    context: Tensor
    prepared: PreparedConditioning
    prompt: Tensor | None

    @property
    def end(self) -> int:
        return self.start + len(self.context)


@dataclass(frozen=True, slots=True)
class _State:
    """Everything about a stream but its ring.

    `prompt` is the last prompt and what was prepared from it. `floor` is the earliest position
    that can be returned to. `owed` are the chunks whose clean pass is due, oldest first. `recent`
    are finished chunks whose merged clean pass a roll-back makes due again.
    """

    seed: int
    position: int = 0
    floor: int = 0
    primed: int = 0
    running: _Running | None = None
    owed: tuple[_Finished, ...] = ()
    recent: tuple[_Finished, ...] = ()
    prompt: tuple[Tensor, PreparedConditioning] | None = None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What completing a pass changes: the record, frames to commit, what leaves."""

    state: _State
    commit: int
    x0: Tensor | None


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """A stream at one moment, for `ChunkStream.restore`; shares no memory that changes."""

    cache_config: CacheConfig
    sampling_config: SamplingConfig
    latent_shape: tuple[int, int, int]
    state: _State
    cache: CacheSnapshot


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """No gradients, but tensors that may be kept and used outside inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class ChunkStream:
    """All state of one session; weights are shared and never written.

    Args:
        denoiser: the network.
        cache_config: window, sink, chunk length, lead, merging, position mode.
        sampling_config: steps, shift, re-noising, context noise.
        latent_shape: (C, h, w) of one latent frame.
        seed: of the noise, 0 <= seed < 2**64.
        check_finite: raise `NonFiniteError` when a pass returns NaN or infinity. It reads from
            the device; None: on the CPU only.

    Raises:
        ConfigError: the latent shape does not fit the denoiser.
    """

    def __init__(
        self,
        denoiser: CausalDenoiser,
        cache_config: CacheConfig,
        sampling_config: SamplingConfig,
        *,
        latent_shape: tuple[int, int, int],
        seed: int = 0,
        check_finite: bool | None = None,
    ) -> None:
        channels, height, width = latent_shape
        if channels != denoiser.config.in_channels:
            raise ConfigError(
                f"latent_shape must have the denoiser's {denoiser.config.in_channels} channels, "
                f"got {channels}"
            )
        if denoiser.config.out_channels != channels:
            raise ConfigError(
                f"a denoiser of streams must return its {channels} input channels, "
                f"it returns {denoiser.config.out_channels}"
            )
        self.denoiser = denoiser
        self.cache_config = cache_config
        self.sampling_config = sampling_config
        self.latent_shape = latent_shape
        self.cache = denoiser.new_cache(cache_config, height, width)
        self.device = self.cache.device
        self.check_finite = self.device.type == "cpu" if check_finite is None else check_finite
        self._schedule = FlowMatchSchedule.from_config(
            sampling_config, denoiser.config.prediction_type
        )
        self._state = _State(seed=seed)
        self._timesteps: dict[tuple[float, ...], Tensor] = {}

    @property
    def position(self) -> int:
        """Latent frames so far, primed ones included: the index of the next chunk's first."""
        return self._state.position

    @property
    def is_running(self) -> bool:
        """Whether a chunk is begun and not finished."""
        return self._state.running is not None

    @property
    def num_owed(self) -> int:
        """Chunks that are out and whose clean pass is due."""
        return len(self._state.owed)

    @property
    def nbytes(self) -> int:
        """Bytes of the ring, the largest part of the state by far."""
        return self.cache.nbytes

    def prime(self, latents: Tensor, conditioning: Conditioning) -> None:
        """Gives clean context before the first chunk: a reference for the sink, a video to extend.

        The frames are cut into chunks, the last one shorter if need be, and their clean passes are
        owed like those of generated chunks. May be called again, to start with a single frame.

        Args:
            latents: [T, C, h, w], copied.
            conditioning: of the T frames, B = 1.

        Raises:
            ConfigError: a chunk has been begun, or conditioning does not fit the denoiser.
            ShapeError: latents or conditioning have the wrong shape.
        """
        state, length = self._state, self.cache_config.frames_per_chunk
        if state.running is not None or state.position != state.primed:
            raise ConfigError("a stream is primed before its first chunk; make a new stream")
        if latents.ndim != 4 or tuple(latents.shape[1:]) != self.latent_shape or not len(latents):
            raise ShapeError(f"latents must be [T, *{self.latent_shape}], got {latents.shape}")
        _check_frames(conditioning, len(latents))
        for first in range(0, len(latents), length):
            last = min(first + length, len(latents))
            prepared, prompt = self._prepare(_cut(conditioning, first, last), state)
            with _ordinary_tensors():
                x0 = latents[first:last].to(self.device, torch.float32, copy=True)
                context = self._as_context(x0, state)
            tensor = None if prompt is None else prompt[0]
            end = state.position + len(x0)
            chunk = _Finished(state.position, context, prepared, tensor)
            state = replace(
                state,
                position=end,
                primed=end,
                floor=end,
                owed=(*state.owed, chunk),
                recent=self._recent(state, chunk, end),
                prompt=prompt,
            )
        self._state = state

    def begin(self, conditioning: Conditioning) -> None:
        """Starts the next chunk.

        Everything is computed from `conditioning` now, so its tensors may be overwritten
        afterwards, except `prompt_embeds`: the same tensor object means the same prompt.

        Args:
            conditioning: of the chunk's `frames_per_chunk` frames, B = 1.

        Raises:
            ConfigError: a chunk is running, or conditioning does not fit the denoiser.
            ShapeError: conditioning has the wrong shape.
        """
        state, length = self._state, self.cache_config.frames_per_chunk
        if state.running is not None:
            raise ConfigError(
                f"the chunk at frame {state.running.start} is running; complete its passes, or "
                f"drop it with rollback(0)"
            )
        _check_frames(conditioning, length)
        prepared, prompt = self._prepare(conditioning, state)
        with _ordinary_tensors():
            noise = self._noise(state, length, 0)
        tensor = None if prompt is None else prompt[0]
        running = _Running(state.position, 0, noise, prepared, tensor)
        self._state = replace(state, running=running, prompt=prompt)

    def next_pass(self) -> StreamPass | None:
        """The forward that is due, None if there is none; asking changes nothing.

        Without a running chunk it is an owed clean pass. To have it merged, begin first.
        """
        state, schedule = self._state, self._schedule
        running = state.running
        if running is None and not state.owed:
            return None
        if running is not None:
            count = len(running.latents)
            noisy = (schedule.timesteps[running.step],) * count
            emits = running.step + 1 == schedule.num_steps
            if not state.owed:
                where = CachePass(self.cache, running.start, (count,))
                return StreamPass(
                    "noisy", running.latents, self._timestep(noisy), where, running.prepared, emits
                )
        first = state.owed[0]
        clean = (schedule.context_timestep,) * len(first.context)
        if running is None or not self._can_merge(state):
            where = CachePass(self.cache, first.start, (len(clean),))
            return StreamPass(
                "clean", first.context, self._timestep(clean), where, first.prepared, False
            )
        with _ordinary_tensors():
            latents = torch.cat((first.context, running.latents))
            prepared = PreparedConditioning.join_frames((first.prepared, running.prepared))
        where = CachePass(self.cache, first.start, (len(clean), count))
        return StreamPass("merged", latents, self._timestep(clean + noisy), where, prepared, emits)

    def complete(self, output: Tensor) -> Tensor | None:
        """Takes the denoiser's output for `next_pass` and moves on.

        Args:
            output: [T, C, h, w], any float dtype.

        Returns:
            x0 [frames_per_chunk, C, h, w] float32 when the chunk is finished, the caller's to
            keep and change; else None.

        Raises:
            ConfigError: no pass is due.
            ShapeError: output has another shape than the pass.
            NonFiniteError: output holds NaN or infinity, and is checked for it.
        """
        due = self.next_pass()
        if due is None:
            raise ConfigError("no pass is due; begin a chunk first")
        if self.check_finite and not bool(output.isfinite().all()):
            self._discard(due)
            raise NonFiniteError((0,))
        return self._apply(self._outcome(due, output))

    def step(self, conditioning: Conditioning) -> Tensor:
        """Generates one chunk alone: begin, and passes until x0; its clean pass stays owed.

        Args:
            conditioning: of the chunk's frames, B = 1.

        Returns:
            x0 [frames_per_chunk, C, h, w] float32.
        """
        self.begin(conditioning)
        while True:
            (x0,) = run_passes(self.denoiser, [self])
            if x0 is not None:
                return x0

    def rollback(self, num_frames: int) -> None:
        """Returns to an earlier position: drops the running chunk and the last finished frames.

        What follows is what would have followed then, bit for bit, if `num_frames` ends at a
        chunk's border. Inside a chunk the frames before the border stay as context.

        Args:
            num_frames: finished frames to drop, 0 to `lead`; 0 drops the running chunk alone.

        Raises:
            ConfigError: the position lies before the primed frames, or more than `lead` frames
                behind the furthest one reached.
        """
        state = self._state
        target = state.position - num_frames
        if num_frames < 0 or target < state.floor:
            raise ConfigError(
                f"can drop 0 to {state.position - state.floor} frames at frame {state.position} "
                f"(lead {self.cache_config.lead}, primed {state.primed}), got {num_frames}"
            )
        owed = tuple(chunk for chunk in state.owed if chunk.start < target)
        recent = tuple(chunk for chunk in state.recent if chunk.start < target)
        if not owed and recent and recent[-1].end == target:
            owed = recent[-1:]
        prompt = state.prompt
        if owed:
            last = owed[-1]
            prompt = None if last.prompt is None else (last.prompt, last.prepared)
        self.cache.rollback(max(0, self.cache.committed - target))
        self._state = replace(
            state, position=target, running=None, owed=owed, recent=recent, prompt=prompt
        )

    def snapshot(self) -> StreamSnapshot:
        """A copy of the whole state; the stream may go on, the snapshot stays."""
        with _ordinary_tensors():
            cache = self.cache.snapshot()
        return StreamSnapshot(
            self.cache_config, self.sampling_config, self.latent_shape, self._state, cache
        )

    def restore(self, snapshot: StreamSnapshot) -> None:
        """Takes over a snapshot of this stream or of another one with the same configuration.

        Raises:
            ConfigError: the configurations differ.
        """
        for name in ("cache_config", "sampling_config", "latent_shape"):
            ours, theirs = getattr(self, name), getattr(snapshot, name)
            if ours != theirs:
                raise ConfigError(f"snapshot was made with {name} {theirs}, the stream has {ours}")
        with _ordinary_tensors():
            self.cache.restore(snapshot.cache)
        self._state = snapshot.state

    def _prepare(
        self, conditioning: Conditioning, state: _State
    ) -> tuple[PreparedConditioning, tuple[Tensor, PreparedConditioning] | None]:
        """Prepared conditioning and the prompt to remember; text is computed once per prompt."""
        prompt = state.prompt
        embeds = conditioning.prompt_embeds
        known = prompt is not None and prompt[0] is embeds
        with _ordinary_tensors():
            prepared = self.denoiser.prepare(
                conditioning, text=prompt[1] if prompt is not None and known else None
            )
        return prepared, None if embeds is None else (embeds, prepared)

    def _noise(self, state: _State, num_frames: int, step: int) -> Tensor:
        shape = self.latent_shape
        return chunk_noise(state.seed, state.position, num_frames, step, shape, self.device)

    def _as_context(self, x0: Tensor, state: _State) -> Tensor:
        sigma = self._schedule.context_sigma
        if sigma == 0.0:
            return x0
        return self._schedule.add_noise(x0, self._noise(state, len(x0), CLEAN_STEP), sigma)

    def _recent(self, state: _State, chunk: _Finished, floor: int) -> tuple[_Finished, ...]:
        if not self.cache_config.merge_clean_pass:
            return ()
        return tuple(kept for kept in (*state.recent, chunk) if kept.end >= floor)

    def _can_merge(self, state: _State) -> bool:
        running, length = state.running, self.cache_config.frames_per_chunk
        last = state.owed[-1]
        return (
            self.cache_config.merge_clean_pass
            and running is not None
            and len(state.owed) == 1
            and len(last.context) == length
            and last.end == running.start
            and last.prepared.same_text(running.prepared)
        )

    def _timestep(self, values: tuple[float, ...]) -> Tensor:
        """[T] float32; there are as many different ones as steps, and each is kept."""
        timestep = self._timesteps.get(values)
        if timestep is None:
            with _ordinary_tensors():
                timestep = torch.tensor(values, dtype=torch.float32, device=self.device)
            self._timesteps[values] = timestep
        return timestep

    def _outcome(self, due: StreamPass, output: Tensor) -> _Outcome:
        """What completing the pass would change; changes nothing itself."""
        if output.shape != due.latents.shape:
            raise ShapeError(f"output must be {due.latents.shape}, got {output.shape}")
        state, commit, x0 = self._state, 0, None
        if due.kind != "noisy":
            border = state.owed[1].start if len(state.owed) > 1 else state.position
            commit = max(0, border - self.cache.committed)
            state = replace(state, owed=state.owed[1:])
        if due.kind != "clean":
            with _ordinary_tensors():
                state, x0 = self._denoised(state, output)
        return _Outcome(state, commit, x0)

    def _denoised(self, state: _State, output: Tensor) -> tuple[_State, Tensor | None]:
        """The state after a noisy step, and x0 if it was the last."""
        schedule, running = self._schedule, state.running
        assert running is not None
        count, step = len(running.latents), running.step + 1
        sigma = schedule.sigmas[running.step]
        x0 = schedule.predict_x0(running.latents, output[-count:], sigma)
        if step < schedule.num_steps:
            next_sigma = schedule.sigmas[step]
            if schedule.renoise == "fresh":
                latents = schedule.add_noise(x0, self._noise(state, count, step), next_sigma)
            else:
                latents = schedule.follow_path(running.latents, x0, sigma, next_sigma)
            return replace(state, running=replace(running, step=step, latents=latents)), None
        position = running.start + count
        floor = max(state.floor, position - self.cache_config.lead)
        context = self._as_context(x0, state)
        chunk = _Finished(running.start, context, running.prepared, running.prompt)
        state = replace(
            state,
            position=position,
            floor=floor,
            running=None,
            owed=(*state.owed, chunk),
            recent=self._recent(state, chunk, floor),
        )
        return state, x0.clone() if context is x0 else x0

    def _apply(self, outcome: _Outcome) -> Tensor | None:
        self.cache.commit(outcome.commit)
        self._state = outcome.state
        return outcome.x0

    def _discard(self, due: StreamPass) -> None:
        """Zeroes what a failed pass may have written; the pass will write it again."""
        self.cache.discard(due.cache.start_frame, len(due.latents))


def run_passes(
    denoiser: CausalDenoiser,
    streams: Sequence[ChunkStream],
    allowed_sizes: Collection[int] | None = None,
) -> list[Tensor | None]:
    """Runs the pass that is due in each stream, as few forwards as their shapes allow.

    Streams may stand at different positions and steps. All advance, or on an exception none.

    Args:
        denoiser: the network of all the streams.
        streams: different streams; one without a pass that is due takes no part.
        allowed_sizes: batch sizes to use, 1 among them; None for any.

    Returns:
        For each stream x0 [frames_per_chunk, C, h, w] float32 if its chunk is finished, else None.

    Raises:
        ConfigError: a stream is listed twice, or `allowed_sizes` lacks 1.
        NonFiniteError: a pass returned NaN or infinity in a stream that checks for it.
    """
    if len({id(stream) for stream in streams}) != len(streams):
        raise ConfigError("every stream may be listed once; it has one pass that is due")
    due = [(row, item) for row, stream in enumerate(streams) if (item := stream.next_pass())]
    outcomes: dict[int, _Outcome] = {}
    try:
        outputs: dict[int, Tensor] = {}
        for batch in _batches(due, allowed_sizes):
            output = _forward(denoiser, [item for _, item in batch])
            outputs.update((row, output[index]) for index, (row, _) in enumerate(batch))
        bad = [
            row
            for row, output in outputs.items()
            if streams[row].check_finite and not bool(output.isfinite().all())
        ]
        if bad:
            raise NonFiniteError(tuple(sorted(bad)))
        for row, item in due:
            outcomes[row] = streams[row]._outcome(item, outputs[row])
    except BaseException:
        for row, item in due:
            streams[row]._discard(item)
        raise
    return [
        stream._apply(outcomes[row]) if row in outcomes else None
        for row, stream in enumerate(streams)
    ]


@torch.inference_mode()
def _forward(denoiser: CausalDenoiser, rows: Sequence[StreamPass]) -> Tensor:
    if len(rows) == 1:
        latents, timestep = rows[0].latents[None], rows[0].timestep[None]
    else:
        latents = torch.stack([row.latents for row in rows])
        timestep = torch.stack([row.timestep for row in rows])
    prepared = PreparedConditioning.stack([row.prepared for row in rows])
    output: Tensor = denoiser(latents, timestep, prepared, caches=[row.cache for row in rows])
    return output


def _batches(
    due: Sequence[tuple[int, StreamPass]], allowed_sizes: Collection[int] | None
) -> Iterator[list[tuple[int, StreamPass]]]:
    """Passes of one shape together, cut into allowed sizes, largest first."""
    sizes = sorted({len(due)} if allowed_sizes is None else set(allowed_sizes), reverse=True)
    if allowed_sizes is not None and (1 not in sizes or sizes[-1] < 1):
        raise ConfigError(f"allowed_sizes must be positive and hold 1, got {sizes}")
    shapes: dict[object, list[tuple[int, StreamPass]]] = {}
    for row, item in due:
        text = item.prepared.text
        key = (item.cache.groups, item.latents.shape, None if text is None else text.shape[3])
        shapes.setdefault(key, []).append((row, item))
    for alike in shapes.values():
        while alike:
            size = next((size for size in sizes if size <= len(alike)), len(alike))
            yield alike[:size]
            alike = alike[size:]


def _check_frames(conditioning: Conditioning, num_frames: int) -> None:
    if conditioning.prompt_embeds is not None and len(conditioning.prompt_embeds) != 1:
        raise ShapeError(
            f"prompt_embeds must have B = 1, got {len(conditioning.prompt_embeds)} rows"
        )
    for name in _PER_FRAME:
        value: Tensor | None = getattr(conditioning, name)
        if value is not None and tuple(value.shape[:2]) != (1, num_frames):
            raise ShapeError(f"{name} must be [1, {num_frames}, ...], got {list(value.shape)}")


def _cut(conditioning: Conditioning, first: int, last: int) -> Conditioning:
    """Conditioning of some of its frames."""
    parts: dict[str, Tensor] = {}
    for name in _PER_FRAME:
        value: Tensor | None = getattr(conditioning, name)
        if value is not None:
            parts[name] = value[:, first:last]
    return Conditioning(prompt_embeds=conditioning.prompt_embeds, **parts)


_PER_FRAME = ("audio", "state", "event", "control")
