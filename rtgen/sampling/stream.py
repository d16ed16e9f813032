"""One session's generation: `ChunkStream` holds all of its state, `run_passes` moves many at once.

A chunk is begun with its conditioning, denoised in a few noisy passes, and finished: its x0 leaves
at once, and its clean pass, which puts the finished frames into the cache, is owed. The owed pass
comes next, or runs together with the first noisy pass of the following chunk. That is exact: every
group of frames attends to frames up to its own end only, and the finished frames' keys are written
before anyone reads them.

    begin -> noisy pass 0 .. n-1 -> x0 out -> (clean pass | merged with the next noisy pass 0)

The state is one frozen record that a completed pass replaces in one assignment; what a failed pass
wrote to the cache is rewritten when it is run again. Noise depends on (seed, frame, step) only. So
neither company, nor a failure, a roll-back or a restore changes what a stream produces.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rtgen.config import CacheConfig, SamplingConfig
from rtgen.errors import ConfigError, ShapeError
from rtgen.models.conditioning import Conditioning
from rtgen.models.denoiser import CausalDenoiser
from rtgen.sampling.noise import CLEAN_STEP, chunk_noise, require_seed
from rtgen.sampling.passes import (
    NonFiniteError,
    StreamPass,
    batches,
    can_merge,
    clean_pass,
    forward_rows,
    merged_pass,
    noisy_pass,
)
from rtgen.sampling.schedulers import FlowMatchSchedule
from rtgen.sampling.state import (
    Conditions,
    FinishedChunk,
    Outcome,
    RunningChunk,
    StreamSnapshot,
    StreamState,
    check_frames,
    cut_frames,
    ordinary_tensors,
)


class ChunkStream:
    """All state of one session; it lives beside the weights, which are shared and never written.

    Args:
        denoiser: the network.
        cache_config: window, sink, chunk length, lead, merging, position mode.
        sampling_config: steps, shift, re-noising, context noise.
        latent_shape: (C, h, w) of one latent frame.
        seed: of the noise, 0 <= seed < 2**64.
        check_finite: raise `NonFiniteError` when a pass returns NaN or infinity. It reads from
            the device; None: on the CPU only.

    Raises:
        ConfigError: the latent shape does not fit the denoiser, or the seed is out of range.
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
        config = denoiser.config
        if not channels == config.in_channels == config.out_channels:
            raise ConfigError(
                f"latent_shape has {channels} channels, the denoiser takes {config.in_channels} "
                f"and returns {config.out_channels}; a stream needs them equal"
            )
        require_seed(seed)
        self.denoiser = denoiser
        self.cache_config = cache_config
        self.latent_shape = latent_shape
        self.cache = denoiser.new_cache(cache_config, height, width)
        self.device = self.cache.device
        self.check_finite = self.device.type == "cpu" if check_finite is None else check_finite
        self._state = StreamState(seed=seed)
        self.set_sampling(sampling_config)

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
        """Clean passes that are due."""
        return len(self._state.owed)

    @property
    def nbytes(self) -> int:
        """Bytes of the ring, the largest part of the state by far."""
        return self.cache.nbytes

    def set_sampling(self, sampling_config: SamplingConfig) -> None:
        """Changes steps and noise from the next chunk on; a running chunk keeps its own.

        Raises:
            ConfigError: the timesteps cannot be warped.
        """
        prediction_type = self.denoiser.config.prediction_type
        self._schedule = FlowMatchSchedule.from_config(sampling_config, prediction_type)
        self.sampling_config = sampling_config

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
            raise ShapeError(
                f"latents must be [T, {', '.join(map(str, self.latent_shape))}] with T >= 1, "
                f"got {list(latents.shape)}"
            )
        check_frames(conditioning, len(latents))
        with ordinary_tensors():
            for first in range(0, len(latents), length):
                last = min(first + length, len(latents))
                conditions = self._prepare(cut_frames(conditioning, first, last), state)
                x0 = latents[first:last].to(self.device, torch.float32, copy=True)
                end = state.position + len(x0)
                state = self._finish(state, x0, conditions, self._schedule, end)
                state = replace(state, primed=end, conditions=conditions)
        self._state = state

    def begin(self, conditioning: Conditioning) -> None:
        """Starts the next chunk.

        Everything is computed from `conditioning` now, so its tensors may be overwritten
        afterwards, except `prompt_embeds`: the same tensor object means the same prompt.

        Args:
            conditioning: of the chunk's `frames_per_chunk` frames, B = 1, on any device.

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
        check_frames(conditioning, length)
        with ordinary_tensors():
            conditions = self._prepare(conditioning, state)
            noise = self._noise(state, state.position, length, 0)
        running = RunningChunk(state.position, 0, noise, conditions, self._schedule)
        self._state = replace(state, running=running, conditions=conditions)

    def next_pass(self) -> StreamPass | None:
        """The forward that is due, None if there is none; asking changes nothing.

        Without a running chunk it is an owed clean pass. To have it merged, begin first.
        """
        state, running = self._state, self._state.running
        if not state.owed:
            return None if running is None else noisy_pass(self.cache, running)
        if running is not None and can_merge(self.cache_config, state.owed, running):
            with ordinary_tensors():
                return merged_pass(self.cache, state.owed[0], running)
        return clean_pass(self.cache, state.owed[0])

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
        if self._is_bad(output):
            due.discard()
            raise NonFiniteError((0,))
        return self._apply(self._outcome(due, output))

    def step(self, conditioning: Conditioning) -> Tensor:
        """Generates one chunk alone: begin, and passes until x0; its clean pass stays owed.

        Takes what `begin` takes, and returns x0 [frames_per_chunk, C, h, w] float32.
        """
        self.begin(conditioning)
        while True:
            (x0,) = run_passes(self.denoiser, [self])
            if x0 is not None:
                return x0

    def rollback(self, num_frames: int) -> None:
        """Returns to an earlier position: drops the running chunk and the last finished frames.

        What follows is what would have followed then, bit for bit, if the position is a chunk's
        border. Inside a chunk the frames before the position stay as context.

        Args:
            num_frames: finished frames to drop, 0 to `lead`; 0 drops the running chunk alone.

        Raises:
            ConfigError: the position lies before the primed frames' end, or more than `lead`
                frames behind the furthest one reached.
        """
        state = self._state
        target = state.position - num_frames
        if num_frames < 0 or target < state.floor:
            raise ConfigError(
                f"can drop 0 to {state.position - state.floor} frames at frame {state.position} "
                f"(lead {self.cache_config.lead}, {state.primed} primed), got {num_frames}"
            )
        self.cache.rollback(max(0, self.cache.committed - target))
        self._state = state.rolled_back(target)

    def snapshot(self) -> StreamSnapshot:
        """A copy of the whole state; the stream may go on, the snapshot stays."""
        with ordinary_tensors():
            cache = self.cache.snapshot()
        return StreamSnapshot(
            self.cache_config, self.latent_shape, self.sampling_config, self._state, cache
        )

    def restore(self, snapshot: StreamSnapshot) -> None:
        """Takes over a snapshot of this stream or of another one of the same form.

        Raises:
            ConfigError: cache configuration, latent shape or the ring's form differ.
        """
        ring, kept = self.cache.keys, snapshot.cache.keys
        for name, ours, theirs in (
            ("cache_config", self.cache_config, snapshot.cache_config),
            ("latent_shape", self.latent_shape, snapshot.latent_shape),
            ("keys", (ring.dtype, ring.shape), (kept.dtype, kept.shape)),
        ):
            if ours != theirs:
                raise ConfigError(f"snapshot was made with {name} {theirs}, the stream has {ours}")
        self.set_sampling(snapshot.sampling_config)
        with ordinary_tensors():
            self.cache.restore(snapshot.cache)
        self._state = snapshot.state

    def _prepare(self, conditioning: Conditioning, state: StreamState) -> Conditions:
        """Prepared conditioning; the text of a known prompt is taken over."""
        embeds, latest = conditioning.prompt_embeds, state.conditions
        known = latest is not None and embeds is not None and latest.prompt_embeds is embeds
        text = latest.prepared if latest is not None and known else None
        prepared = self.denoiser.prepare(conditioning.to(self.device), text=text)
        return Conditions(prepared, embeds)

    def _noise(self, state: StreamState, start: int, num_frames: int, step: int) -> Tensor:
        return chunk_noise(state.seed, start, num_frames, step, self.latent_shape, self.device)

    def _is_bad(self, output: Tensor) -> bool:
        return self.check_finite and not bool(output.isfinite().all())

    def _outcome(self, due: StreamPass, output: Tensor) -> Outcome:
        """What completing the pass would change; changes nothing itself."""
        if output.shape != due.latents.shape:
            raise ShapeError(
                f"output must be {list(due.latents.shape)}, got {list(output.shape)}; "
                f"give the output of the pass that is due"
            )
        state, commit, x0 = self._state, 0, None
        if due.kind != "noisy":
            border = state.owed[1].start if len(state.owed) > 1 else state.position
            commit = max(0, border - self.cache.committed)
            state = replace(state, owed=state.owed[1:])
        if state.running is not None and due.kind != "clean":
            with ordinary_tensors():
                state, x0 = self._denoised(state, state.running, output)
        return Outcome(state, commit, x0)

    def _denoised(
        self, state: StreamState, chunk: RunningChunk, output: Tensor
    ) -> tuple[StreamState, Tensor | None]:
        """The state after a noisy step, and x0 if it was the last."""
        schedule, frames, step = chunk.schedule, len(chunk.latents), chunk.step + 1
        sigma = schedule.sigmas[chunk.step]
        x0 = schedule.predict_x0(chunk.latents, output[-frames:], sigma)
        if step == schedule.num_steps:
            floor = max(state.floor, chunk.start + frames - self.cache_config.lead)
            state = self._finish(state, x0, chunk.conditions, schedule, floor)
            return replace(state, running=None), x0.clone()
        next_sigma = schedule.sigmas[step]
        if schedule.renoise == "fresh":
            noise = self._noise(state, chunk.start, frames, step)
            latents = schedule.add_noise(x0, noise, next_sigma)
        else:
            latents = schedule.follow_path(chunk.latents, x0, sigma, next_sigma)
        return replace(state, running=replace(chunk, step=step, latents=latents)), None

    def _finish(
        self,
        state: StreamState,
        x0: Tensor,
        conditions: Conditions,
        schedule: FlowMatchSchedule,
        floor: int,
    ) -> StreamState:
        """The state with a finished chunk at its end, whose clean pass is owed."""
        sigma = schedule.context_sigma
        if sigma:
            noise = self._noise(state, state.position, len(x0), CLEAN_STEP)
            x0 = schedule.add_noise(x0, noise, sigma)
        chunk = FinishedChunk(state.position, x0, schedule.context_timestep, conditions)
        recent: tuple[FinishedChunk, ...] = ()
        if self.cache_config.merge_clean_pass:
            recent = tuple(kept for kept in (*state.recent, chunk) if kept.end >= floor)
        owed = (*state.owed, chunk)
        return replace(state, position=chunk.end, floor=floor, owed=owed, recent=recent)

    def _apply(self, outcome: Outcome) -> Tensor | None:
        self.cache.commit(outcome.commit)
        self._state = outcome.state
        return outcome.x0


def run_passes(
    denoiser: CausalDenoiser,
    streams: Sequence[ChunkStream],
    allowed_sizes: Collection[int] | None = None,
) -> list[Tensor | None]:
    """Runs the pass that is due in each stream, in as few forwards as their shapes allow.

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
        raise ConfigError("a stream has one pass that is due; list every stream once")
    due = [(row, item) for row, stream in enumerate(streams) if (item := stream.next_pass())]
    outputs: dict[int, Tensor] = {}
    try:
        for batch in batches(due, allowed_sizes):
            output = forward_rows(denoiser, [item for _, item in batch])
            outputs.update((row, output[index]) for index, (row, _) in enumerate(batch))
        bad = tuple(row for row, _ in due if streams[row]._is_bad(outputs[row]))
        if bad:
            raise NonFiniteError(bad)
        outcomes = {row: streams[row]._outcome(item, outputs[row]) for row, item in due}
    except BaseException:
        for _, item in due:
            item.discard()
        raise
    return [
        stream._apply(outcomes[row]) if row in outcomes else None
        for row, stream in enumerate(streams)
    ]
