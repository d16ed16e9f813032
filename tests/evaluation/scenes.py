"""A scene whose answers are known: "pa pa pa", with labels drawn by hand, and tiny networks."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from pipelines.motion import CONTROL_NAMES, FPS
from pipelines.probe import PROBED, FaceProbe, ProbeNet, probed_labels
from pipelines.train.latent_renderer import LatentRenderer
from pipelines.train.tracks import Track
from pipelines.train.visemes import FACE_UNITS, FaceTrack, mouth_weights
from rtgen.types import SpeechState

Floats = npt.NDArray[np.float32]

FRAMES = 400
# Lips meet every 400 ms, between open vowels, from second 4 to 12.
SEGMENTS = [
    segment
    for i in range(20)
    for segment in (
        (4 + 0.4 * i, 4.1 + 0.4 * i, "PP"),
        (4.1 + 0.4 * i, 4.4 + 0.4 * i, "aa"),
    )
]


def speech_track() -> Track:
    """Four seconds of silence, eight of speech, four of silence; two blinks; a barge-in."""
    state = np.full(FRAMES, SpeechState.IDLE, np.int8)
    state[100:300] = SpeechState.SPEAKING
    controls = np.zeros((FRAMES, len(CONTROL_NAMES)), np.float32)
    blink = controls[:, CONTROL_NAMES.index("blink")]
    for start in (50, 200):
        blink[start : start + 4] = 1
    time = np.arange(FRAMES) / FPS
    controls[:, CONTROL_NAMES.index("yaw")] = 0.1 * np.sin(2 * np.pi * 0.3 * time)
    controls[:, CONTROL_NAMES.index("pitch")] = 0.05 * np.sin(2 * np.pi * 0.5 * time)
    controls[:, CONTROL_NAMES.index("roll")] = 0.03 * np.sin(2 * np.pi * 0.4 * time)
    rng = np.random.default_rng(0)
    return Track(
        audio=(0.1 * rng.standard_normal(640 * FRAMES)).astype(np.float32),
        face=FaceTrack.from_parts(mouth_weights(SEGMENTS, FRAMES), controls, state),
        event=np.zeros(FRAMES, np.int8),
        segments=SEGMENTS,
        cuts=[8.0],
        texts=["papa"],
        voices=["none"],
        seed=0,
    )


def labels(of: Track) -> dict[str, Floats]:
    """What a perfect probe reads on perfect pictures."""
    return probed_labels(of.face.weights, of.face.pose, of.face.gaze)


@cache
def toy_probe() -> FaceProbe:
    """A probe with random weights: deterministic, and meaningless."""
    torch.manual_seed(0)
    net = ProbeNet(len(PROBED), embedding=8).eval().requires_grad_(False)
    ones = np.ones(len(PROBED), np.float32)
    return FaceProbe(PROBED, net, 0 * ones, ones)


@cache
def toy_renderer() -> LatentRenderer:
    """Labels to latents of the toy avatar, random."""
    torch.manual_seed(1)
    net = LatentRenderer(len(FACE_UNITS) + 6, (4, 2, 2), components=8, width=16)
    net.basis.copy_(torch.randn(8, 16))
    return net.requires_grad_(False).eval()
