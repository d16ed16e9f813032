"""What is shown to the measures: scripted scenes, made by the model and by the exact labels.

The truth of a scene is its labels turned to latents by the latent renderer and painted by the
model's own decoder: what a denoiser without any error would show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipelines.avatar import AvatarPipeline
from pipelines.base import to_uint8
from pipelines.motion import EVENTS as GESTURES
from pipelines.motion import FPS, FRAMES_PER_UNIT, MotionController
from pipelines.speech_energy import SpeechEnergy
from pipelines.train.speech import SAMPLE_RATE
from pipelines.train.tracks import Track
from pipelines.train.visemes import FACE_UNITS, FaceTrack
from rtgen.engine.contract import UnitInput
from rtgen.sampling.stream import run_passes
from rtgen.types import EVENTS, SessionSpec, SpeechState

__all__ = ["UNIT_SAMPLES", "Shown", "dense", "generate", "quiet_track", "truth", "watch_plan"]

Frames = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]
Marks = npt.NDArray[np.bool_]
Shown = Iterator[tuple[int, Frames]]
"""Pairs of a unit's index and its frames uint8 [4, H, W, 3]."""

UNIT_SAMPLES = SAMPLE_RATE * FRAMES_PER_UNIT // FPS


def dense(track: Track) -> Marks:
    """Every unit of a track is looked at."""
    return np.ones(len(track.face) // FRAMES_PER_UNIT, bool)


def watch_plan(units: int, head: int, tail: int, step: int) -> Marks:
    """Units looked at in a long stream: the first and last ones, and every `step`-th between."""
    marks = np.zeros(units, bool)
    marks[::step] = True
    marks[:head] = True
    marks[max(0, units - tail) :] = True
    return marks


def quiet_track(
    audio: FloatArray, seed: int, state: SpeechState, events: dict[int, str] | None = None
) -> Track:
    """A scene without speech: the mouth rests, the controller moves the rest.

    Args:
        audio: [F * 640] float32 at 16 kHz; whole units are used.
        seed: of the motion.
        state: throughout.
        events: name of the gesture that starts with a unit, by its index.
    """
    units = len(audio) // UNIT_SAMPLES
    audio = audio[: units * UNIT_SAMPLES].astype(np.float32)
    energy = SpeechEnergy().push(audio).reshape(units, FRAMES_PER_UNIT)
    controller, events = MotionController(seed), events or {}
    rows = [controller.step(int(state), events.get(i), energy[i]) for i in range(units)]
    frames = units * FRAMES_PER_UNIT
    event = np.array([1 + GESTURES.index(events[i]) if i in events else 0 for i in range(units)])
    return Track(
        audio=audio,
        face=FaceTrack.from_parts(
            np.zeros((frames, len(FACE_UNITS)), np.float32),
            np.concatenate(rows),
            np.full(frames, int(state), np.int8),
        ),
        event=np.repeat(event, FRAMES_PER_UNIT).astype(np.int8),
        segments=[],
        cuts=[],
        texts=[],
        voices=[],
        seed=seed,
    )


def generate(
    pipeline: AvatarPipeline,
    track: Track,
    *,
    steps: int | None = None,
    avatar: str | None = None,
    watch: Marks | None = None,
) -> Shown:
    """The model's frames for a track.

    The session's seed is the track's, so that its motion controller repeats the track's controls.
    The avatar's decoder keeps no memory, so units that are not watched are not decoded.

    Args:
        pipeline: the model.
        track: sound, states and events.
        steps: denoising steps, None for the model's default.
        avatar: identity, None for the first.
        watch: bool [U], units to show; None for all.
    """
    session = pipeline.open(SessionSpec(seed=track.seed, num_inference_steps=steps, avatar=avatar))
    config = pipeline.config.mel
    audio = np.concatenate([track.audio, np.zeros(config.lookahead, np.float32)])
    for unit in range(len(track.face) // FRAMES_PER_UNIT):
        start = unit * config.unit
        frame = unit * FRAMES_PER_UNIT
        given = UnitInput(
            audio=audio[start : start + config.unit + config.lookahead],
            state=SpeechState(int(track.face.state[frame])),
            event=EVENTS[int(track.event[frame])],
        )
        session.begin([given])
        latents = None
        while latents is None:
            (latents,) = run_passes(pipeline.denoiser, [session.stream])
        if watch is None or watch[unit]:
            yield unit, session.decode(latents)
    session.close()


@torch.no_grad()
def truth(
    pipeline: AvatarPipeline,
    labels: FloatArray,
    renderer: Callable[[Tensor], Tensor],
    watch: Marks | None = None,
    avatar: str | None = None,
) -> Shown:
    """Frames of exact labels through the model's decoder.

    Args:
        pipeline: whose decoder paints.
        labels: [F, L] of `FaceTrack.labels`.
        renderer: labels [F, L] to raw latents [F, c, h, w] of single frames.
        watch: bool [U], units to show; None for all.
        avatar: identity, None for the first.
    """
    _, height, width = pipeline.config.latent_shape
    decoder = pipeline.decoder(avatar)
    state = decoder.new_state(height, width, decoder.dtype, pipeline.device)
    for unit in range(len(labels) // FRAMES_PER_UNIT):
        if watch is not None and not watch[unit]:
            continue
        rows = labels[unit * FRAMES_PER_UNIT : (unit + 1) * FRAMES_PER_UNIT]
        latents = renderer(torch.from_numpy(rows)).flatten(0, 1)[None, None]
        pixels = decoder.step([state], latents.to(pipeline.device))[0]
        yield unit, to_uint8(pixels)
