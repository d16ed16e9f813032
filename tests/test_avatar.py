from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from decoders.base import MemorylessDecoder
from decoders.unit_conv import UnitDecoder
from pipelines import motion
from pipelines.audio import tokens_of_track
from pipelines.avatar import AvatarConditioner, AvatarPipeline, AvatarSession, save_avatar_model
from pipelines.avatar_model import AvatarConfig, load_config, load_decoder, load_references
from pipelines.base import require_device, require_dtype, to_uint8
from pipelines.speech_energy import SpeechEnergy
from rtgen.engine.contract import UnitInput
from rtgen.errors import BackendUnavailable, CheckpointError, ConfigError, ShapeError
from rtgen.models.denoiser import CausalDenoiser
from rtgen.sampling.stream import run_passes
from rtgen.types import EVENTS, Pixels, SessionSpec, SpeechState
from tests.sound import tone
from tests.toy_pipeline import OFFLINE, toy_config, toy_pipeline, write_toy_model

UNIT, LOOKAHEAD = 2560, 640


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_toy_model(tmp_path / "toy")


def unit_inputs(count: int) -> list[UnitInput]:
    """Units of a tone, with states and gestures that change."""
    audio = tone(1.0 + count * 0.16, 16_000).astype(np.float32) / np.float32(32768)
    return [
        UnitInput(
            audio=audio[UNIT * n : UNIT * n + UNIT + LOOKAHEAD],
            state=SpeechState(n // 2 % 4),
            event=EVENTS[n % len(EVENTS)],
        )
        for n in range(count)
    ]


def chunk(session: AvatarSession, units: list[UnitInput]) -> Pixels:
    """One chunk through all passes, decoded."""
    session.begin(units)
    while True:
        (x0,) = run_passes(session.stream.denoiser, [session.stream])
        if x0 is not None:
            return session.decode(x0)


def test_vocabularies_of_states_and_gestures_agree() -> None:
    assert EVENTS[1:] == motion.EVENTS
    assert tuple(state.name.lower() for state in SpeechState) == motion.STATES


def test_a_model_folder_gives_back_what_was_saved(tmp_path: Path) -> None:
    config = toy_config()
    denoiser, decoder = CausalDenoiser(config.denoiser), UnitDecoder(config.decoder)
    decoder.canvas.copy_(torch.rand_like(decoder.canvas) * 2 - 1)
    references = {name: torch.randn(1, *config.latent_shape) for name in config.avatars}
    save_avatar_model(tmp_path, config, denoiser, decoder, references)
    assert load_config(tmp_path) == config
    loaded = load_references(tmp_path, config)
    for name, value in references.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0)
    network = load_decoder(tmp_path, config)
    torch.testing.assert_close(network.canvas, decoder.canvas, rtol=0, atol=0)
    torch.testing.assert_close(
        network.conv_in.weight, decoder.conv_in.weight.bfloat16().float(), rtol=0, atol=0
    )
    stored = load_file(tmp_path / "denoiser.safetensors")
    assert stored["blocks.0.ffn.net.0.proj.weight"].dtype is torch.bfloat16
    assert stored["scale_shift_table"].dtype is torch.float32
    assert denoiser.scale_shift_table.dtype is torch.float32  # the network given is unchanged
    assert denoiser.proj_out.weight.dtype is torch.float32


def edit_json(change: dict[str, Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return edit


def edit_part(part: str, **change: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model.json"
        values = json.loads(path.read_text())
        path.write_text(json.dumps(values | {part: values[part] | change}))

    return edit


def edit_weights(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        weights = load_file(folder / name)
        change(weights)
        save_file(weights, folder / name)

    return edit


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "model.json").unlink(), "cannot read"),
    "no json": (lambda f: (f / "model.json").write_text("{"), "cannot read"),
    "no object": (lambda f: (f / "model.json").write_text("[]"), "must hold an object"),
    "version": (edit_json({"version": 2}), "must be rtgen-avatar 1"),
    "format": (edit_json({"format": "other"}), "must be rtgen-avatar 1"),
    "unknown field": (edit_json({"colour": "red"}), r"has no \['colour'\]"),
    "unknown part field": (edit_part("mel", colour="red"), r"MelConfig has no \['colour'\]"),
    "wrong type": (edit_part("cache", window="seven"), "CacheConfig"),
    "wrong list": (edit_json({"samplings": 3}), "model.json"),
    "wrong part": (edit_json({"cache": None}), "must be an object"),
    "mel": (edit_part("mel", num_mels=32), "audio_dim must be 128"),
    "hop": (edit_part("mel", unit=3200), "mel unit must be 2560"),
    "mean": (edit_json({"latent_mean": [0.0]}), "latent_mean must be 16"),
    "std": (edit_json({"latent_std": [0.0] * 16}), "latent_std must be positive"),
    "steps": (edit_json({"default_steps": 5}), "hold the default 5"),
    "controls": (edit_json({"controls": ["blink"]}), "controls must be"),
    "avatars": (edit_json({"avatars": []}), "avatars must be different names"),
    "avatar": (edit_json({"avatars": ["ada", "cy"]}), r"must hold \['ada', 'cy'\]"),
    "no weights": (lambda f: (f / "decoder.safetensors").unlink(), "cannot read weights"),
    "damaged": (lambda f: (f / "denoiser.safetensors").write_bytes(b"\0" * 64), "cannot read"),
    "missing": (
        edit_weights("denoiser.safetensors", lambda w: w.pop("proj_out.bias")),
        "missing proj_out.bias",
    ),
    "unexpected": (
        edit_weights("decoder.safetensors", lambda w: w.update(extra=torch.zeros(1))),
        "unexpected extra",
    ),
    "shape": (
        edit_weights("decoder.safetensors", lambda w: w.update(canvas=torch.zeros(3, 8, 8))),
        "canvas must be",
    ),
    "reference": (
        edit_weights("avatars.safetensors", lambda w: w.update(ada=torch.zeros(1, 16, 3, 3))),
        "ada must be finite",
    ),
    "reference is NaN": (
        edit_weights("avatars.safetensors", lambda w: w["ada"].fill_(torch.nan)),
        "ada must be finite",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_with_what_is_wrong(case: str, folder: Path) -> None:
    breaking, complaint = BROKEN[case]
    AvatarPipeline.from_directory(folder, dtype="float32")
    breaking(folder)
    with pytest.raises(CheckpointError, match=complaint):
        AvatarPipeline.from_directory(folder, dtype="float32")


def test_saving_refuses_parts_that_do_not_fit(tmp_path: Path) -> None:
    config = toy_config()
    denoiser, decoder = CausalDenoiser(config.denoiser), UnitDecoder(config.decoder)
    good = {name: torch.zeros(config.latent_shape) for name in config.avatars}
    other = replace(config, denoiser=replace(config.denoiser, num_layers=3))
    with pytest.raises(CheckpointError, match="config must be that of the networks"):
        save_avatar_model(tmp_path, other, denoiser, decoder, good)
    with pytest.raises(CheckpointError, match="must hold"):
        save_avatar_model(tmp_path, config, denoiser, decoder, {"ada": good["ada"]})
    long = good | {"bo": torch.zeros(2, *config.latent_shape)}  # the sink holds one frame
    with pytest.raises(CheckpointError, match="bo must be finite"):
        save_avatar_model(tmp_path, config, denoiser, decoder, long)


def test_conditioning_is_tokens_state_gesture_and_controls() -> None:
    config, units = toy_config(), unit_inputs(6)
    conditioner = AvatarConditioner(config, seed=4)
    rows = [conditioner.step(unit) for unit in units]
    track = np.concatenate([unit.audio[:UNIT] for unit in units] + [units[-1].audio[UNIT:]])
    tokens = torch.cat([row.audio for row in rows if row.audio is not None], 1)[0]
    torch.testing.assert_close(tokens, torch.from_numpy(tokens_of_track(track, config.mel)))
    energy = SpeechEnergy().push(track[: 6 * UNIT]).reshape(6, 4)
    controller = motion.MotionController(4)
    for row, unit, level in zip(rows, units, energy, strict=True):
        row.validate(config.denoiser)
        assert row.state is not None
        assert row.event is not None
        assert row.control is not None
        assert (row.state.item(), row.event.item()) == (unit.state, EVENTS.index(unit.event))
        event = None if unit.event == "none" else unit.event
        controls = controller.step(unit.state, event, level)
        torch.testing.assert_close(row.control[0, 0], torch.from_numpy(controls.flatten()))


def test_a_model_without_gesture_embedding_moves_by_its_controls() -> None:
    config = toy_config()
    plain = replace(config, denoiser=replace(config.denoiser, num_events=0))
    row = AvatarConditioner(plain, 1).step(unit_inputs(2)[1])
    row.validate(plain.denoiser)
    plain.neutral(1).validate(plain.denoiser)


def test_a_conditioner_goes_back_to_a_snapshot() -> None:
    conditioner, units = AvatarConditioner(toy_config(), 2), unit_inputs(8)
    for unit in units[:4]:
        conditioner.step(unit)
    before = conditioner.snapshot()
    first = [conditioner.step(unit) for unit in units[4:]]
    conditioner.restore(before)
    again = [conditioner.step(unit) for unit in units[4:]]
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close((a.audio, a.control), (b.audio, b.control), rtol=0, atol=0)


def test_unknown_gestures_and_wrong_lengths_are_refused() -> None:
    conditioner, (unit,) = AvatarConditioner(toy_config(), 2), unit_inputs(1)
    with pytest.raises(ConfigError, match="event must be one of"):
        conditioner.step(replace(unit, event="jump"))
    with pytest.raises(ShapeError):
        conditioner.step(replace(unit, audio=unit.audio[:-1]))


@pytest.mark.parametrize("merge_clean_pass", [False, True])
@pytest.mark.parametrize("units", [0, 1, 2])
@pytest.mark.parametrize("is_running", [False, True])
def test_taking_units_back_equals_never_having_begun_them(
    merge_clean_pass: bool, units: int, is_running: bool
) -> None:
    pipeline, inputs = toy_pipeline(merge_clean_pass=merge_clean_pass), unit_inputs(12)
    straight, session = pipeline.open(OFFLINE), pipeline.open(OFFLINE)
    expected = [chunk(straight, [unit]) for unit in inputs[:10]]
    for unit in inputs[:5]:
        chunk(session, [unit])
    finished = units - is_running
    for unit in inputs[10 : 10 + max(finished, 0)]:  # other units, so that they leave traces
        chunk(session, [unit])
    if is_running and units:
        session.begin([inputs[11]])
        run_passes(session.stream.denoiser, [session.stream])
    session.rollback(units)
    for index in range(5, 10):
        assert np.array_equal(chunk(session, [inputs[index]]), expected[index])


def test_the_roll_back_oracle_sees_motion_that_is_not_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline, inputs = toy_pipeline(), unit_inputs(6)
    straight, session = pipeline.open(OFFLINE), pipeline.open(OFFLINE)
    expected = [chunk(straight, [unit]) for unit in inputs[:4]]
    for unit in [*inputs[:3], inputs[5]]:
        chunk(session, [unit])
    monkeypatch.setattr(motion.MotionController, "restore", lambda self, state: None)
    session.rollback(1)
    assert not np.array_equal(chunk(session, [inputs[3]]), expected[3])


def test_more_than_lead_is_not_taken_back() -> None:
    session = toy_pipeline().open(OFFLINE)
    for unit in unit_inputs(6):
        chunk(session, [unit])
    with pytest.raises(ConfigError):
        session.rollback(3)
    with pytest.raises(ConfigError):
        session.rollback(-1)


def test_latents_are_denormalised_before_they_are_decoded() -> None:
    pipeline = toy_pipeline()
    config, x0 = pipeline.config, torch.randn(1, *pipeline.config.latent_shape)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (config.latent_mean, config.latent_std))
    with torch.inference_mode():
        pixels = pipeline.decoder.network((x0 * std + mean)[None])[0]
    made = pipeline.open(OFFLINE).decode(x0)
    assert np.array_equal(made, to_uint8(pixels))
    with torch.inference_mode():
        assert not np.array_equal(made, to_uint8(pipeline.decoder.network(x0[None])[0]))


def test_the_identity_is_the_reference_in_the_sink() -> None:
    pipeline, inputs = toy_pipeline(), unit_inputs(9)
    ada, bo = (pipeline.open(replace(OFFLINE, avatar=name)) for name in pipeline.avatars)
    first = pipeline.open(OFFLINE)
    for unit in inputs:  # longer than the window: the reference is seen by the sink alone
        a, b = chunk(ada, [unit]), chunk(bo, [unit])
        assert np.array_equal(chunk(first, [unit]), a)
        assert not np.array_equal(a, b)


def test_steps_and_avatars_that_the_model_has_not_are_refused() -> None:
    pipeline = toy_pipeline()
    for spec in (SessionSpec(avatar="nobody"), SessionSpec(num_inference_steps=3)):
        with pytest.raises(ConfigError):
            pipeline.check(spec)
        with pytest.raises(ConfigError):
            pipeline.open(spec)


def test_a_closed_session_is_of_no_use() -> None:
    session = toy_pipeline().open(OFFLINE)
    session.close()
    session.close()
    with pytest.raises(ConfigError, match="closed"):
        session.begin(unit_inputs(1))


def test_dtype_auto_is_measured_and_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pipelines.base"):
        pipeline = AvatarPipeline.from_directory(folder)
    choices = pipeline.describe()
    for part in ("denoiser", "decoder"):
        chosen = choices[f"{part}_dtype"]
        assert chosen in ("float32", "bfloat16")
        assert any(line.startswith(f"{part}: {chosen} (float32 takes") for line in caplog.messages)


def test_bfloat16_gives_nearly_the_same_face(folder: Path) -> None:
    faces = []
    for dtype in ("float32", "bfloat16"):
        pipeline = AvatarPipeline.from_directory(folder, dtype=dtype)
        assert pipeline.describe()["decoder_dtype"] == dtype
        session = pipeline.open(OFFLINE)
        faces.append([chunk(session, [unit]).astype(int) for unit in unit_inputs(4)])
    exact, rough = np.array(faces[0]), np.array(faces[1])
    assert 0 < np.abs(exact - rough).mean() < 0.05 * exact.std()


def test_a_decoder_of_another_latent_space_is_refused() -> None:
    pipeline = toy_pipeline()
    other = MemorylessDecoder(
        pipeline.decoder.network, latent_space="other", latent_shape=(16, 2, 2)
    )
    with pytest.raises(ConfigError, match="'other'"):
        AvatarPipeline(pipeline.config, pipeline.denoiser, other, {}, pipeline.device)


def test_a_decoder_checks_what_it_is_given() -> None:
    decoder = toy_pipeline().decoder
    state = decoder.new_state(2, 2, torch.float32, "cpu")
    with pytest.raises(ShapeError):
        decoder.step([state], torch.zeros(1, 2, 16, 2, 2))
    with pytest.raises(ShapeError):
        decoder.step([state], torch.zeros(1, 1, 16, 4, 4))
    with pytest.raises(ConfigError):
        decoder.new_state(4, 4, torch.float32, "cpu")


def test_sessions_that_are_decoded_together_get_what_each_gets_alone() -> None:
    decoder = toy_pipeline().decoder
    latents = torch.randn(3, 1, 16, 2, 2)
    states = [decoder.new_state(2, 2, torch.float32, "cpu") for _ in range(3)]
    together = decoder.step(states, latents)
    for row, state, frames in zip(latents, states, together, strict=True):
        assert torch.equal(decoder.step([state.clone()], row[None])[0], frames)
        assert frames.shape == (4, 3, 32, 32)


def test_pixels_are_rounded_to_the_nearest_level() -> None:
    values = torch.linspace(-1.2, 1.2, 3 * 7 * 5 * 2).reshape(2, 3, 7, 5)
    frames = to_uint8(values)
    assert frames.shape == (2, 7, 5, 3)
    truth = np.floor(np.clip(values.double().numpy(), -1, 1) * 127.5 + 127.5 + 0.5)
    assert np.abs(frames.transpose(0, 3, 1, 2) - truth).max() <= 1  # ties may go either way
    assert (frames.transpose(0, 3, 1, 2) == truth).mean() > 0.99
    assert (frames.min(), frames.max()) == (0, 255)
    half = to_uint8(torch.full((1, 3, 1, 1), 0.3, dtype=torch.bfloat16))
    assert half[0, 0, 0, 0] == round((float(torch.tensor(0.3).bfloat16()) + 1) * 127.5)


def test_devices_and_dtypes_are_named_or_refused() -> None:
    assert require_device("cpu") == torch.device("cpu")
    assert require_dtype("auto") is None
    assert require_dtype("bfloat16") is torch.bfloat16
    for name in ("gpu9", "mps", ""):
        with pytest.raises(ConfigError):
            require_device(name)
    with pytest.raises(ConfigError):
        require_dtype("int8")
    with pytest.raises(BackendUnavailable, match="use cpu"):
        require_device("cuda:99")


def test_a_config_whose_parts_disagree_is_refused() -> None:
    config = toy_config()
    for change in (
        {"avatars": ("a", "a")},
        {"samplings": config.samplings * 2},
        {"denoiser": replace(config.denoiser, num_states=3)},
        {"denoiser": replace(config.denoiser, control_dim=4)},
        {"denoiser": replace(config.denoiser, num_events=3)},
    ):
        values: dict[str, Any] = change
        with pytest.raises(ConfigError):
            replace(config, **values)
    assert isinstance(config, AvatarConfig)
    assert config.steps == (1, 2)
