"""The training stages at toy size: what they learn, and what the denoiser is shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pipelines.audio import MelConfig, MelFrontEnd
from pipelines.train.autoencoder import canvas_and_weight, picture_loss
from pipelines.train.dataset import save_npz
from pipelines.train.denoiser import (
    CACHE,
    DenoiserStage,
    avatar_denoiser_config,
    conditioning_of,
    importance_map,
)
from pipelines.train.draft import frame_steps, train_draft, unpatch
from pipelines.train.latent_renderer import LatentRenderer
from pipelines.train.loop import Precision
from pipelines.train.store import load_clips
from pipelines.train.unit_tracks import UnitTrack, UnitTracks, label_indices, load_unit_tracks
from pipelines.train.visemes import FACE_UNITS
from rtgen.errors import CheckpointError
from rtgen.models.denoiser import CausalDenoiser

LABELS = len(FACE_UNITS) + 6
FRAMES = 48


def arrays(seed: int, frames: int = FRAMES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "weights": rng.random((frames, len(FACE_UNITS))).astype(np.float32),
        "pose": 0.05 * rng.standard_normal((frames, 3)).astype(np.float32),
        "gaze": 0.05 * rng.standard_normal((frames, 2)).astype(np.float32),
        "breath": 0.01 * rng.standard_normal(frames).astype(np.float32),
        "controls": rng.standard_normal((frames, 10)).astype(np.float32),
        "state": np.repeat(rng.integers(0, 4, frames // 4), 4).astype(np.int8),
        "audio": (3000 * rng.standard_normal(640 * frames)).astype(np.int16),
    }


def renderer(seed: int = 0, components: int = 24) -> LatentRenderer:
    """A renderer of frames [4, 16, 16] that depends on all labels, fitted to nothing real."""
    torch.manual_seed(seed)
    model = LatentRenderer(LABELS, (4, 16, 16), components, width=32)
    labels = torch.rand(200, LABELS)
    latents = (labels @ torch.randn(LABELS, 1024)).view(200, 4, 16, 16)
    model.fit_basis(labels, latents)
    return model.requires_grad_(False).eval()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for index, name in enumerate(("train_0000", "train_0001", "test_0000")):
        save_npz(tmp_path / "tracks" / f"{name}.npz", arrays(index))
    return tmp_path


@pytest.fixture
def tracks(data: Path) -> UnitTracks:
    return load_unit_tracks(data, renderer(), variants=2, seed=0)


def test_a_basis_of_full_size_loses_nothing() -> None:
    torch.manual_seed(1)
    labels = torch.rand(300, 5)
    latents = (labels @ torch.randn(5, 1024)).view(300, 4, 16, 16)
    model = LatentRenderer(5, (4, 16, 16), components=5)
    coefficients = model.fit_basis(labels, latents)
    again = (coefficients * model.scale) @ model.basis + model.latent_mean
    torch.testing.assert_close(again, latents.flatten(1), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(coefficients.std(0), torch.ones(5))


def test_a_basis_cut_short_loses_something() -> None:
    torch.manual_seed(1)
    labels = torch.rand(300, 5)
    latents = (labels @ torch.randn(5, 1024)).view(300, 4, 16, 16)
    model = LatentRenderer(5, (4, 16, 16), components=4)
    coefficients = model.fit_basis(labels, latents)
    again = (coefficients * model.scale) @ model.basis + model.latent_mean
    assert (again - latents.flatten(1)).abs().max() > 0.05


def test_clips_are_split_by_name(tmp_path: Path) -> None:
    frames = {"frames": np.zeros((8, 16, 16, 3), np.uint8)}
    for name in ("clips/train_000_00", "clips/test_000_00", "wide/0000"):
        save_npz(tmp_path / f"{name}.npz", {**arrays(0, 8), **frames})
    clips = load_clips(tmp_path)
    assert [(clip.is_sequence, clip.held_out) for clip in clips] == [
        (True, True), (True, False), (False, False),
    ]  # fmt: skip
    assert clips[0].labels.shape == (8, LABELS)
    with pytest.raises(CheckpointError, match="no rendered clips"):
        load_clips(tmp_path / "none")


def test_tracks_are_normalised_and_cut_by_units(tracks: UnitTracks) -> None:
    assert (len(tracks.train), len(tracks.test)) == (2, 1)
    latents = torch.cat([track.latents.float() for track in tracks.train])
    per_channel = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    assert per_channel[0].abs().max() < 0.5
    assert (per_channel[1] - 1).abs().max() < 0.5
    track = tracks.train[0]
    assert track.audio.shape == (2, FRAMES // 4, 10, 256)
    assert not torch.equal(track.audio[0], track.audio[1])
    part = track.cut(3, 5, 1)
    torch.testing.assert_close(part[0], track.latents[3:8])
    torch.testing.assert_close(part[1], track.audio[1, 3:8])


def test_training_hears_what_the_live_front_end_hears(data: Path, tracks: UnitTracks) -> None:
    """Unit by unit, with the sound of a file: the first variant is the recording itself."""
    config = MelConfig()
    with np.load(data / "tracks" / "train_0000.npz") as file:
        sound = file["audio"].astype(np.float32) / 32768
    front = MelFrontEnd(config)
    padded = np.concatenate([sound, np.zeros(config.lookahead, np.float32)])
    for unit in range(FRAMES // 4):
        live = front.step(padded[unit * 2560 : unit * 2560 + 3200])
        heard = tracks.train[0].audio[0, unit].float().numpy()
        np.testing.assert_allclose(live, heard, atol=4e-3)


def test_control_scale_undoes_the_units_of_controls(tracks: UnitTracks) -> None:
    controls = torch.cat([track.control for track in tracks.train]) / tracks.control_std
    assert controls.shape[1] == 40
    per_name = controls.view(-1, 10).std(0)
    torch.testing.assert_close(per_name, torch.ones(10), atol=0.02, rtol=0)


def test_the_mouth_weighs_most_where_mouth_labels_move_latents() -> None:
    model = renderer()
    model.basis.zero_()
    last = model.net[-1]
    assert isinstance(last, torch.nn.Linear)
    last.weight.zero_()
    model.skip.weight.zero_()
    mouth, eyes = label_indices(("jaw", "mouth")), label_indices(("eye",))
    model.skip.weight[0, mouth] = 1.0
    model.skip.weight[1, eyes] = 1.0
    place = model.basis.view(-1, 4, 16, 16)
    place[0, :, 10:12, 6:10] = 1
    place[1, :, 5:6, 4:12] = 1
    weight = importance_map(model, torch.rand(100, LABELS), mouth, eyes)
    assert weight.mean() == pytest.approx(1, abs=1e-5)
    assert weight[11, 8] > weight[5, 8] > weight[0, 0]


def stage(tracks: UnitTracks, seed: int = 0) -> DenoiserStage:
    torch.manual_seed(seed)
    shipped = avatar_denoiser_config(tracks.control_dim, tracks.num_states)
    small = dataclasses.replace(
        shipped, num_attention_heads=1, attention_head_dim=32, ffn_dim=64, num_layers=2
    )
    model = CausalDenoiser(small)
    model.attention_backend = "naive"
    precision = Precision("fp32", torch.device("cpu"))
    return DenoiserStage(
        model, tracks.train, tracks.test, tracks.reference, torch.ones(16, 16), seed, 10, precision
    )


def test_the_sink_is_conditioned_on_nothing(tracks: UnitTracks) -> None:
    audio = torch.ones(2, 3, 10, 256)
    made = conditioning_of(audio, torch.ones(2, 3).long(), torch.ones(2, 3, 40))
    assert made.audio is not None
    assert made.audio.shape == (2, 3 + CACHE.sink, 10, 256)
    assert made.audio[:, 0].abs().max() == 0
    assert made.audio[:, 1:].min() == 1


def test_batches_start_with_the_reference_and_depend_on_the_step_alone(tracks: UnitTracks) -> None:
    made = stage(tracks)
    rng = [np.random.default_rng(3) for _ in range(2)]
    first, second = (made.batch(r, tracks.train, 2).latents for r in rng)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first[:, 0], tracks.reference.expand(2, -1, -1, -1))


def test_a_few_steps_lower_the_loss_and_move_every_weight(tracks: UnitTracks) -> None:
    made = stage(tracks)
    before = {name: value.detach().clone() for name, value in made.model.named_parameters()}
    optimizer = torch.optim.AdamW(made.model.parameters(), 1e-2, weight_decay=0)
    losses: list[float] = []
    for _ in range(20):
        torch.manual_seed(0)
        loss: Tensor = made.loss(0)["loss"]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0], losses
    still = [n for n, value in made.model.named_parameters() if torch.equal(value, before[n])]
    assert not still


def test_the_last_unit_never_sees_the_future(tracks: UnitTracks) -> None:
    """What the training mask hides: a later unit's latents change nothing before them."""
    made = stage(tracks)
    torch.nn.init.normal_(made.model.proj_out.weight, std=0.02)
    batch = made.batch(np.random.default_rng(0), tracks.train, 1)
    sigma = torch.full(batch.latents.shape[:2], 0.5)
    changed = batch.latents.clone()
    changed[:, -1] += 1
    with torch.no_grad():
        one = made.predict(batch.latents, sigma, batch.conditioning)
        two = made.predict(changed, sigma, batch.conditioning)
    torch.testing.assert_close(one[:, :-1], two[:, :-1])
    assert (one[:, -1] - two[:, -1]).abs().max() > 1e-3


def test_patches_of_the_draft_lie_where_the_network_puts_its_own(tracks: UnitTracks) -> None:
    model = stage(tracks).model
    condition_map = model.condition_embedder.condition_map
    torch.nn.init.normal_(condition_map.to_draft.weight)
    batch = stage(tracks).batch(np.random.default_rng(0), tracks.train, 1)
    prepared = model.prepare(batch.conditioning)
    assert prepared.picture is not None
    with torch.no_grad():
        out = model(batch.latents, torch.zeros(batch.latents.shape[:2]), prepared)
        patches = condition_map.draft(prepared.picture)[0]
    torch.testing.assert_close(unpatch(patches, (8, 8), (2, 2)), out[0], atol=1e-5, rtol=1e-5)


def test_the_draft_learns_what_the_conditioning_says(tracks: UnitTracks) -> None:
    """Latents that follow one control: the draft finds them; shuffled controls teach nothing."""
    errors = []
    for shuffle in (False, True):
        learnt = []
        for track in tracks.train:
            pattern = torch.linspace(-1, 1, 16)[:, None, None].expand(16, 16, 16)
            latents = (track.control[:, 3, None, None, None] * pattern).half()
            rows = torch.randperm(len(latents)) if shuffle else torch.arange(len(latents))
            control = track.control[rows]
            learnt.append(UnitTrack(latents, track.audio, track.state * 0, control))
        model = stage(tracks).model
        errors.append(train_draft(model, learnt, torch.ones(16, 16), 150, seed=0))
    variance = float(torch.cat([track.control[:, 3] for track in tracks.train]).var())
    assert errors[0] < 0.5 * variance
    torch.testing.assert_close(model.proj_out.weight, torch.zeros_like(model.proj_out.weight))


def test_steps_between_frames_of_a_unit_are_those_of_its_channel_groups() -> None:
    frames = torch.arange(4.0).repeat_interleave(4)[:, None, None].expand(16, 2, 2) ** 2
    steps = frame_steps(frames[None, None])
    assert steps.shape == (1, 1, 3, 4, 2, 2)
    torch.testing.assert_close(steps[0, 0, :, 0, 0, 0], torch.tensor([1.0, 3.0, 5.0]))


def test_canvas_is_the_mean_and_motion_weighs_more() -> None:
    rng = np.random.default_rng(0)
    frames = np.full((50, 32, 32, 3), 100, np.uint8)
    frames[:, 4:20, 4:20] = rng.integers(0, 255, (50, 16, 16, 3))
    canvas, weight = canvas_and_weight(frames)
    assert canvas[0, 0, 0] == pytest.approx(100 / 127.5 - 1, abs=1e-5)
    assert weight[..., 12, 12] == pytest.approx(2.0, abs=0.1)
    assert weight[..., 30, 30] == pytest.approx(0.5)


def test_picture_loss_of_a_known_error() -> None:
    out = torch.zeros(1, 1, 3, 4, 4)
    loss, l1 = picture_loss(out + 0.1, out, torch.ones(1, 1, 1, 4, 4))
    assert float(l1) == pytest.approx(0.1)
    assert float(loss) == pytest.approx(0.1 + 2 * 0.01)


def test_unit_track_fields_are_aligned(tracks: UnitTracks) -> None:
    for track in [*tracks.train, *tracks.test]:
        assert isinstance(track, UnitTrack)
        assert len(track.latents) == track.audio.shape[1] == len(track.state) == len(track.control)
