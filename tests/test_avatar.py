from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decoders.base import MemorylessDecoder
from pipelines import motion
from pipelines.audio import rows_of_track
from pipelines.avatar import AvatarConditioner, AvatarPipeline, AvatarSession
from pipelines.base import require_device, require_dtype, to_uint8
from pipelines.speech_energy import SpeechEnergy
from rtgen.engine.contract import UnitInput
from rtgen.errors import BackendUnavailable, ConfigError, ShapeError
from rtgen.sampling.stream import run_passes
from rtgen.types import EVENTS, Pixels, SessionSpec, SpeechState
from tests.sound import tone
from tests.toy_pipeline import OFFLINE, toy_config, toy_pipeline, write_toy_model

UNIT, LOOKAHEAD = 2560, 1920


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


def test_conditioning_is_tokens_state_gesture_and_controls() -> None:
    config, units, lips = toy_config(), unit_inputs(6), toy_pipeline().lips
    conditioner = AvatarConditioner(config, lips, seed=4)
    rows = [conditioner.step(unit) for unit in units]
    track = np.concatenate([unit.audio[:UNIT] for unit in units] + [units[-1].audio[UNIT:]])
    heard = torch.from_numpy(rows_of_track(track, config.mel))
    tokens = torch.cat([row.audio for row in rows if row.audio is not None], 1)[0]
    torch.testing.assert_close(tokens[2].reshape(-1, 64), heard[32 : 32 + config.mel.num_rows])
    energy = SpeechEnergy().push(track[: 6 * UNIT]).reshape(6, 4)
    with torch.no_grad():
        mouths = lips(heard[None])[0, :24].reshape(6, 4, -1)
    controller = motion.MotionController(4)
    for row, unit, level, mouth in zip(rows, units, energy, mouths, strict=True):
        row.validate(config.denoiser)
        assert row.state is not None
        assert row.event is not None
        assert row.control is not None
        assert (row.state.item(), row.event.item()) == (unit.state, EVENTS.index(unit.event))
        event = None if unit.event == "none" else unit.event
        controls = controller.step(unit.state, event, level)
        frames = row.control[0, 0].reshape(4, -1)
        torch.testing.assert_close(frames[:, :10], torch.from_numpy(controls))
        torch.testing.assert_close(frames[:, 10:], mouth, atol=1e-3, rtol=1e-3)


def test_a_model_that_hears_through_its_lips_alone_takes_no_tokens() -> None:
    config = toy_config()
    deaf = replace(config, denoiser=replace(config.denoiser, audio_dim=None, audio_tokens=0))
    row = AvatarConditioner(deaf, toy_pipeline().lips, 1).step(unit_inputs(2)[1])
    assert row.audio is None
    row.validate(deaf.denoiser)
    deaf.neutral(1).validate(deaf.denoiser)


def test_identities_differ_by_their_decoder() -> None:
    pipeline, unit = toy_pipeline(), unit_inputs(1)[0]
    faces = {}
    for avatar in ("ada", "bo"):
        session = pipeline.open(replace(OFFLINE, avatar=avatar))
        faces[avatar] = chunk(session, [unit])
        assert pipeline.decoder(avatar) is not pipeline.decoder("bo" if avatar == "ada" else "ada")
    assert not np.array_equal(faces["ada"], faces["bo"])
    assert pipeline.decoder(None) is pipeline.decoder("ada")
    with pytest.raises(ConfigError, match="avatar must be one of"):
        pipeline.decoder("cy")


def test_a_model_without_gesture_embedding_moves_by_its_controls() -> None:
    config = toy_config()
    plain = replace(config, denoiser=replace(config.denoiser, num_events=0))
    row = AvatarConditioner(plain, toy_pipeline().lips, 1).step(unit_inputs(2)[1])
    row.validate(plain.denoiser)
    plain.neutral(1).validate(plain.denoiser)


def test_a_conditioner_goes_back_to_a_snapshot() -> None:
    conditioner, units = AvatarConditioner(toy_config(), toy_pipeline().lips, 2), unit_inputs(8)
    for unit in units[:4]:
        conditioner.step(unit)
    before = conditioner.snapshot()
    first = [conditioner.step(unit) for unit in units[4:]]
    conditioner.restore(before)
    again = [conditioner.step(unit) for unit in units[4:]]
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close((a.audio, a.control), (b.audio, b.control), rtol=0, atol=0)


def test_unknown_gestures_and_wrong_lengths_are_refused() -> None:
    conditioner, (unit,) = AvatarConditioner(toy_config(), toy_pipeline().lips, 2), unit_inputs(1)
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
        pixels = pipeline.decoder(None).network((x0 * std + mean)[None])[0]
    made = pipeline.open(OFFLINE).decode(x0)
    assert np.array_equal(made, to_uint8(pixels))
    with torch.inference_mode():
        assert not np.array_equal(made, to_uint8(pipeline.decoder(None).network(x0[None])[0]))


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
        pipeline.decoder(None).network, latent_space="other", latent_shape=(16, 2, 2)
    )
    with pytest.raises(ConfigError, match="'other'"):
        AvatarPipeline(
            pipeline.config, pipeline.lips, pipeline.denoiser, {"ada": other}, {}, pipeline.device
        )


def test_a_decoder_checks_what_it_is_given() -> None:
    decoder = toy_pipeline().decoder(None)
    state = decoder.new_state(2, 2, torch.float32, "cpu")
    with pytest.raises(ShapeError):
        decoder.step([state], torch.zeros(1, 2, 16, 2, 2))
    with pytest.raises(ShapeError):
        decoder.step([state], torch.zeros(1, 1, 16, 4, 4))
    with pytest.raises(ConfigError):
        decoder.new_state(4, 4, torch.float32, "cpu")


def test_sessions_that_are_decoded_together_get_what_each_gets_alone() -> None:
    decoder = toy_pipeline().decoder(None)
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
