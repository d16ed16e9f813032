"""The work on the lanes: open, condition, run a forward of many sessions, decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from rtgen.engine.audio_buffer import decimate
from rtgen.engine.clock import Clock
from rtgen.engine.contract import Pipeline, PipelineSession, UnitInput
from rtgen.engine.cost_model import CONDITION, DECODE, CostModel
from rtgen.engine.intake import UnitPlan
from rtgen.engine.lanes import Lanes
from rtgen.engine.scheduler import DecodeJob, decide_decode
from rtgen.engine.session import SessionCore
from rtgen.engine.slots import FinishedLatents, Slot
from rtgen.sampling.passes import NonFiniteError
from rtgen.sampling.stream import ChunkStream, run_passes
from rtgen.timing import StageTimer
from rtgen.types import OUTPUT_RATE, SessionSpec

if TYPE_CHECKING:
    from torch import Tensor


class Stepper:
    """Runs an engine's jobs and tells the cost model what they took.

    Args:
        pipeline: weights and formats.
        lanes: where jobs run.
        clock: the engine's.
        timer: gets the stages "condition", "denoise", "clean" and "decode".
        cost: learns.
        sizes: batch sizes at which a row's bits do not depend on its company.
        wake: called when a chunk has left the decode lane.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        lanes: Lanes,
        clock: Clock,
        timer: StageTimer,
        cost: CostModel,
        sizes: Sequence[int],
        wake: Callable[[], None],
    ) -> None:
        self._pipeline, self._lanes = pipeline, lanes
        self._clock, self._timer, self._cost = clock, timer, cost
        self._sizes, self._wake = tuple(sizes), wake

    def open(self, slot: Slot) -> None:
        """Opens a pipeline session for `slot.spec`; waits for it."""
        slot.reopened(self._lanes.denoise.submit(self._pipeline.open, slot.spec).result())
        slot.since_ns = self._clock.now_ns()

    def respec(self, slot: Slot, spec: SessionSpec, steps: int | None) -> bool:
        """Follows a change of avatar or quality between two chunks.

        Args:
            slot: no chunk of it is running.
            spec: what it is served with from now on.
            steps: its number of steps, None for the model's if that was never changed.

        Returns:
            False if it has to wait for the decode lane first.
        """
        assert slot.pipeline is not None
        if slot.spec.avatar != spec.avatar:
            if slot.is_decoding:
                return False
            self._reopen(slot, spec)
            return True
        slot.spec = spec
        if steps is not None:
            slot.pipeline.set_num_inference_steps(steps)
        return True

    def take_back(self, slot: Slot, units: int, spec: SessionSpec) -> None:
        """Returns to where the session stood `units` begun units ago; nothing of it is decoding."""
        assert slot.pipeline is not None
        if units <= slot.begun:
            slot.pipeline.rollback(units)
            slot.take_back(units)
        else:  # the avatar was changed after the unit on screen: start it anew
            self._reopen(slot, spec)
        slot.core.rolled_back(units)

    def _reopen(self, slot: Slot, spec: SessionSpec) -> None:
        assert slot.pipeline is not None
        slot.pipeline.close()
        slot.spec = spec
        self.open(slot)

    def begin(self, slot: Slot) -> None:
        """Takes the input of the next chunk and conditions it; waits for it."""
        pipeline = slot.pipeline
        assert pipeline is not None
        plans = slot.core.plan()
        slot.begun += len(plans)
        self._lanes.denoise.submit(self._begin, pipeline, plans).result()
        slot.begin(plans)

    def forward(self, slots: Sequence[Slot]) -> list[Tensor | Exception | None]:
        """Runs the pass that is due in each of some sessions, in one forward.

        A row that fails is found by halving the batch, and fails alone: no stream moves by a
        forward that raises, so the others run again without it.

        Returns:
            For each session x0 [T, C, h, w] if its chunk is finished, None if it is not, or what
            it failed of.
        """
        try:
            return list(self._forward_all(slots))
        except NonFiniteError as error:
            rest = [slot for row, slot in enumerate(slots) if row not in error.rows]
            others = iter(self.forward(rest) if rest else [])
            return [error if row in error.rows else next(others) for row in range(len(slots))]
        except Exception as error:  # noqa: BLE001 - it is a row's, and ends that session alone
            if len(slots) == 1:
                return [error]
            half = len(slots) // 2
            return self.forward(slots[:half]) + self.forward(slots[half:])

    def _forward_all(self, slots: Sequence[Slot]) -> list[Tensor | None]:
        shape = slots[0].shape
        stage = "clean" if all(slot.owes_clean for slot in slots) else "denoise"
        streams = [slot.pipeline.stream for slot in slots if slot.pipeline is not None]
        return self._lanes.denoise.submit(self._forward, stage, shape, streams).result()

    def feed_decoder(self, slots: Sequence[Slot]) -> None:
        """Gives waiting chunks to the decode lane as long as it has places."""
        lane, decode_ns = self._lanes.decode, self._cost.stage_ns(DECODE)
        while lane.free:
            jobs = [DecodeJob(slot.seq, slot.decode_due_ns) for slot in slots if slot.waiting]
            if not jobs:
                return
            due_ns = [
                slot.core.deadline_ns()
                for slot in slots
                if slot.core.is_live and (slot.is_decoding or slot.row(0, 0) is not None)
            ]
            in_flight = sum(len(slot.decodes) for slot in slots)
            seq = decide_decode(self._clock.now_ns(), jobs, due_ns, in_flight, decode_ns)
            if seq is None:
                return
            (slot,) = (slot for slot in slots if slot.seq == seq)
            assert slot.pipeline is not None
            latents = slot.waiting.popleft()
            future = lane.submit(self._decode, slot.core, slot.pipeline, latents)
            slot.decodes.append(future)
            future.add_done_callback(lambda _: self._wake())

    # -- on the lanes

    def _begin(self, pipeline: PipelineSession, plans: list[UnitPlan]) -> None:
        factor = OUTPUT_RATE // self._pipeline.format.model_rate
        start_ns = self._clock.now_ns()
        with self._timer.stage("condition"):
            pipeline.begin(
                [
                    UnitInput(
                        audio=decimate(plan.taken.window, factor),
                        state=plan.state,
                        event=plan.event,
                        frame=plan.frame,
                    )
                    for plan in plans
                ]
            )
        self._cost.observe(CONDITION, 1, self._clock.now_ns() - start_ns)

    def _forward(
        self, stage: str, shape: str, streams: Sequence[ChunkStream]
    ) -> list[Tensor | None]:
        start_ns = self._clock.now_ns()
        with self._timer.stage(stage):
            outputs = run_passes(self._pipeline.denoiser, streams, self._sizes)
            device = streams[0].device
            if device.type == "cuda":
                # The next decision is due when the forward has run, not when it was launched.
                torch.cuda.current_stream(device).synchronize()
        self._cost.observe(shape, len(streams), self._clock.now_ns() - start_ns)
        return outputs

    def _decode(
        self, core: SessionCore, pipeline: PipelineSession, latents: FinishedLatents
    ) -> None:
        start_ns = self._clock.now_ns()
        with self._timer.stage("decode"):
            frames = pipeline.decode(latents.x0)
        self._cost.observe(DECODE, 1, self._clock.now_ns() - start_ns)
        core.deliver(latents.plans, frames)
