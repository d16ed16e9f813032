"""Measures the avatar against exact labels (`rtgen eval avatar`).

A held-out dialogue (voices and sentences never trained on) is animated once as labels and once by
the model; the probe reads the model's pixels back. What is asked for and what is seen can then be
compared frame by frame: lips, closures, lag, blinks, head, stillness in silence, drift.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipelines.avatar import AvatarPipeline
from pipelines.motion import FPS, FRAMES_PER_UNIT, STATES
from pipelines.probe import FaceProbe, correlation, lag_ms
from pipelines.train.sheets import contact_sheet, save_clip
from pipelines.train.store import Clip, load_clips
from pipelines.train.tracks import Track, make_track
from pipelines.train.visemes import FACE_UNITS, LEAD_S
from rtgen.engine.contract import UnitInput
from rtgen.sampling.stream import run_passes
from rtgen.types import EVENTS, SessionSpec, SpeechState

Frames = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]

PROBED = ("jaw", "pucker", "press", "blink", "smile", "yaw", "pitch", "roll")
_UNITS = {
    "jaw": "jawOpen",
    "pucker": "mouthPucker",
    "press": "mouthPressLeft",
    "blink": "eyeBlinkLeft",
    "smile": "mouthSmileLeft",
}
BLINK = 0.5  # lid closure that counts as shut
CLOSED = 0.2  # share of the utterance's wide opening below which lips count as closed


def probed_labels(weights: FloatArray, pose: FloatArray) -> dict[str, FloatArray]:
    """What the probe should see, by name, from labels [F, U] and [F, 3]."""
    labels = {name: weights[:, FACE_UNITS.index(unit)] for name, unit in _UNITS.items()}
    return {**labels, "yaw": pose[:, 0], "pitch": pose[:, 1], "roll": pose[:, 2]}


def fit_probe(clips: list[Clip]) -> tuple[FaceProbe, dict[str, float]]:
    """Fits the probe on rendered frames, and correlates it with the labels of held-out ones."""
    train = [clip for clip in clips if not clip.held_out]
    frames = np.concatenate([clip.frames[::2] for clip in train])

    def table(clip: Clip, step: int) -> FloatArray:
        columns = probed_labels(clip.weights[::step], clip.pose[::step])
        return np.stack([columns[name] for name in PROBED], 1)

    probe = FaceProbe.fit(frames, np.concatenate([table(clip, 2) for clip in train]), PROBED)
    test = [clip for clip in clips if clip.held_out]
    truth = np.concatenate([table(clip, 1) for clip in test])
    seen = probe.measure(np.concatenate([clip.frames for clip in test]))
    return probe, {
        name: round(correlation(seen[name], truth[:, i]), 4) for i, name in enumerate(PROBED)
    }


def generate(
    pipeline: AvatarPipeline, track: Track, seed: int, steps: int | None
) -> Iterator[Frames]:
    """The model's frames for a track, one unit [4, H, W, 3] at a time.

    The session's seed is the track's, so that its motion controller repeats the track's controls.
    """
    session = pipeline.open(SessionSpec(seed=seed, num_inference_steps=steps))
    config = pipeline.config.mel
    audio = np.concatenate([track.audio, np.zeros(config.lookahead, np.float32)])
    for unit in range(len(track.face) // FRAMES_PER_UNIT):
        start = unit * config.unit
        event = int(track.event[unit * FRAMES_PER_UNIT])
        session.begin(
            [
                UnitInput(
                    audio=audio[start : start + config.unit + config.lookahead],
                    state=SpeechState(int(track.face.state[unit * FRAMES_PER_UNIT])),
                    event=EVENTS[event],
                )
            ]
        )
        latents = None
        while latents is None:
            (latents,) = run_passes(pipeline.denoiser, [session.stream])
        yield session.decode(latents)
    session.close()


def mouth_measures(
    seen: dict[str, FloatArray], asked: dict[str, FloatArray], track: Track
) -> dict[str, float]:
    """How the lips follow the sound."""
    jaw, true_jaw = seen["jaw"], asked["jaw"]
    speaking = track.face.state == SpeechState.SPEAKING
    silent = np.convolve(true_jaw > 0.04, np.ones(9), "same") == 0
    moves, true_moves = np.abs(np.diff(jaw)), np.abs(np.diff(true_jaw))
    closures = closure_rate(jaw, track), closure_rate(true_jaw, track)
    return {
        "jaw_r": correlation(jaw, true_jaw),
        "pucker_r": correlation(seen["pucker"], asked["pucker"]),
        "press_r": correlation(seen["press"], asked["press"]),
        "lag_ms": lag_ms(jaw, true_jaw, FPS),
        "jaw_std_ratio": float(jaw[speaking].std() / true_jaw[speaking].std()),
        "closures": closures[0],
        "closures_truth": closures[1],
        "silence_motion": float(moves[silent[1:]].mean()),
        "silence_motion_truth": float(true_moves[silent[1:]].mean()),
        "speech_motion": float(moves[speaking[1:]].mean()),
        "speech_motion_truth": float(true_moves[speaking[1:]].mean()),
        "jaw_in_silence": float(jaw[silent].mean()),
    }


def closure_rate(jaw: FloatArray, track: Track) -> float:
    """Share of p, b and m during which the jaw closes, within 40 ms of their middle."""
    wide = float(np.percentile(jaw[track.face.state == SpeechState.SPEAKING], 90))
    hits = []
    for start, end, viseme in track.segments:
        if viseme != "PP":
            continue
        middle = ((start + end) / 2 - LEAD_S) * FPS - 0.5
        first, last = max(0, round(middle) - 1), min(len(jaw), round(middle) + 2)
        if first < last:
            hits.append(jaw[first:last].min() < CLOSED * wide)
    return float(np.mean(hits)) if hits else float("nan")


def blink_measures(blink: FloatArray) -> dict[str, float]:
    """Blinks per minute, and the longest in ms."""
    shut = np.concatenate([[False], blink > BLINK, [False]])
    edges = np.flatnonzero(np.diff(shut.astype(np.int8)))
    lengths = edges[1::2] - edges[::2]
    return {
        "blinks_per_minute": len(lengths) * 60 * FPS / len(blink),
        "longest_blink_ms": float(lengths.max() * 1000 / FPS) if len(lengths) else 0.0,
    }


def stability_measures(frames: Frames) -> dict[str, float]:
    """Whether the picture holds: backdrop, brightness and sharpness, last third against first."""
    corner = frames[:, :40, :40].astype(np.float32)
    start = corner[: 2 * FPS].mean(0)
    thirds = np.array_split(np.arange(len(frames)), 3)
    noise = [float(((corner[part] - start) ** 2).mean()) for part in thirds]
    luma = [float(frames[part].mean()) for part in thirds]
    detail = [float(np.abs(np.diff(frames[part, 64:224, 48:208].astype(np.float32), axis=2)).mean())
              for part in thirds]  # fmt: skip
    steps = np.abs(np.diff(frames.astype(np.int16), axis=0)).mean((1, 2, 3))
    joins = np.arange(1, len(frames)) % FRAMES_PER_UNIT == 0
    return {
        "backdrop_psnr_first": 10 * np.log10(65025 / max(noise[0], 1e-6)),
        "backdrop_psnr_last": 10 * np.log10(65025 / max(noise[-1], 1e-6)),
        "luma_change": luma[-1] - luma[0],
        "detail_ratio": detail[-1] / detail[0],
        "join_ratio": float(steps[joins].mean() / steps[~joins].mean()),
    }


def measure(frames: Frames, track: Track, probe: FaceProbe) -> dict[str, float]:
    """All measures of a generated clip against the track it was made for."""
    seen = probe.measure(frames)
    asked = probed_labels(track.face.weights[: len(frames)], track.face.pose[: len(frames)])
    out = mouth_measures(seen, asked, track)
    out |= {f"{k}_r": correlation(seen[k], asked[k]) for k in ("blink", "smile", "yaw", "pitch")}
    truth = blink_measures(asked["blink"])
    out |= blink_measures(seen["blink"])
    out |= {f"{name}_truth": value for name, value in truth.items()}
    for state, name in enumerate(STATES):
        part = track.face.state[: len(frames)] == state
        if part.sum() > 2 * FPS:
            out[f"yaw_std_ratio_{name}"] = float(seen["yaw"][part].std() / asked["yaw"][part].std())
    out |= stability_measures(frames)
    return {name: round(value, 4) for name, value in out.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `rtgen eval avatar`."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="model folder")
    add("--data", type=Path, help="fit the probe anew on the frames of this folder, and save it")
    add("--autoencoder", type=Path, help="its training folder, whose metrics are reported too")
    add("--out", type=Path, required=True, help="folder for pictures and measures")
    add("--seconds", type=float, default=60.0, help="length of the held-out dialogue")
    add("--steps", type=int, help="denoising steps, default the model's")
    add("--seed", type=int, default=7, help="of the dialogue")
    add("--device", default="cpu")
    add("--dtype", default="auto")


def run(args: argparse.Namespace) -> int:
    """Generates, measures, and writes measures.json, a contact sheet and a clip."""
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, object] = {"seconds": args.seconds, "seed": args.seed, "steps": args.steps}
    if args.autoencoder is not None:
        result["autoencoder"] = json.loads((args.autoencoder / "metrics.json").read_text())
    probe_path = args.model / "probe.safetensors"
    if args.data is not None:
        probe, result["probe_r_on_renders"] = fit_probe(load_clips(args.data))
        probe.save(probe_path)
    probe = FaceProbe.load(probe_path)
    pipeline = AvatarPipeline.from_directory(args.model, device=args.device, dtype=args.dtype)
    result["steps"] = args.steps or pipeline.config.default_steps
    track = make_track("test", args.seconds, args.seed)
    frames = np.concatenate(list(generate(pipeline, track, track.seed, args.steps)))
    result["measures"] = measure(frames, track, probe)
    (args.out / "measures.json").write_text(json.dumps(result, indent=1) + "\n")
    contact_sheet(frames, track, args.out / "sheet.png")
    save_clip(frames, track, args.out / "clip.mp4")
    return 0
