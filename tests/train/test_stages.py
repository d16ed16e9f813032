"""The training stages at toy size: what they learn, and what the denoiser is shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from decoders.unit_conv import UnitConvConfig, UnitDecoder
from pipelines.train.autoencoder import canvas_and_weight, picture_loss
from pipelines.train.dataset import save_npz
from pipelines.train.decoder import DecoderStage
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
from pipelines.train.unit_tracks import (
    UnitRun,
    UnitTracks,
    label_indices,
    load_unit_tracks,
    vary_mouth,
)
from pipelines.train.visemes import FACE_UNITS, FaceTrack, weights_of_mouth
from rtgen.errors import CheckpointError
from rtgen.models.conditioning import Conditioning
from rtgen.models.denoiser import CausalDenoiser

LABELS = len(FACE_UNITS) + 6
FRAMES = 48


def arrays(seed: int, frames: int = FRAMES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    mouth = 0.5 * rng.random((frames, 13)).astype(np.float32)
    controls = 0.2 * rng.random((frames, 10)).astype(np.float32)
    state = np.repeat(rng.integers(0, 4, frames // 4), 4)
    face = FaceTrack.from_parts(weights_of_mouth(mouth), controls, state)
    names = ("weights", "pose", "gaze", "breath", "controls", "state")
    return {name: getattr(face, name) for name in names}


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
    return load_unit_tracks(data, renderer())


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


def test_tracks_are_normalised(tracks: UnitTracks) -> None:
    assert (len(tracks.train), len(tracks.test)) == (2, 1)
    latents = tracks.sample(np.random.default_rng(0), 40, 2).latents.flatten(0, 1)
    per_channel = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    assert per_channel[0].abs().max() < 0.5
    assert (per_channel[1] - 1).abs().max() < 0.5


def test_latents_are_those_of_the_labels_that_the_controls_mean(tracks: UnitTracks) -> None:
    """Held-out runs are not varied: their latents are those of the track's own labels."""
    run = tracks.sample(np.random.default_rng(0), 3, 4, held_out=True)
    control = run.control.reshape(3, 4, 4, -1)
    for row in range(3):
        frames = control[row].flatten(0, 1).numpy()
        motion, mouth = frames[:, :10], frames[:, 10:]
        state = np.repeat(run.state[row].numpy(), 4)
        face = FaceTrack.from_parts(weights_of_mouth(mouth), motion, state)
        raw = tracks.renderer(torch.from_numpy(face.labels()))
        wanted = raw.reshape(4, 16, 16, 16).sub(tracks.latent_mean).div(tracks.latent_std)
        torch.testing.assert_close(run.latents[row], wanted, atol=1e-4, rtol=1e-4)
        mouth[:, 0] += 0.3  # planted: another jaw than the latents show
        face = FaceTrack.from_parts(weights_of_mouth(mouth), motion, state)
        raw = tracks.renderer(torch.from_numpy(face.labels()))
        other = raw.reshape(4, 16, 16, 16).sub(tracks.latent_mean).div(tracks.latent_std)
        assert (run.latents[row] - other).abs().max() > 1e-2


def test_a_varied_mouth_stays_near_and_in_range() -> None:
    rng = np.random.default_rng(0)
    mouth = rng.random((400, 13)).astype(np.float32)
    varied = vary_mouth(mouth, rng)
    assert varied.dtype == np.float32
    assert 0 <= varied.min() <= varied.max() <= 1
    assert not np.array_equal(varied, mouth)
    assert np.corrcoef(varied.ravel(), mouth.ravel())[0, 1] > 0.8


def test_control_scale_undoes_the_units_of_controls(tracks: UnitTracks) -> None:
    columns = [np.concatenate([t.controls, t.mouth], 1) for t in tracks.train]
    controls = torch.from_numpy(np.concatenate(columns)) / tracks.control_std[:23]
    torch.testing.assert_close(controls.std(0), torch.ones(23), atol=0.02, rtol=0)
    assert tracks.control_dim == 4 * 23


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
    return DenoiserStage(model, tracks, torch.ones(16, 16), seed, 10, precision)


def test_the_sink_is_conditioned_on_nothing() -> None:
    made = conditioning_of(torch.ones(2, 3).long(), torch.ones(2, 3, 92))
    assert made.control is not None
    assert made.control.shape == (2, 3 + CACHE.sink, 92)
    assert made.control[:, 0].abs().max() == 0
    assert made.control[:, 1:].min() == 1


def test_batches_start_with_the_reference_and_depend_on_the_step_alone(tracks: UnitTracks) -> None:
    made = stage(tracks)
    rng = [np.random.default_rng(3) for _ in range(2)]
    first, second = (made.batch(r, 2).latents for r in rng)
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
    batch = made.batch(np.random.default_rng(0), 1)
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
    batch = stage(tracks).batch(np.random.default_rng(0), 1)
    prepared = model.prepare(batch.conditioning)
    assert prepared.picture is not None
    with torch.no_grad():
        out = model(batch.latents, torch.zeros(batch.latents.shape[:2]), prepared)
        patches = condition_map.draft(prepared.picture)[0]
    torch.testing.assert_close(unpatch(patches, (8, 8), (2, 2)), out[0], atol=1e-5, rtol=1e-5)


def test_the_draft_learns_what_the_conditioning_says(tracks: UnitTracks) -> None:
    """Controls tell the latents; controls of another moment tell nothing."""
    errors = []
    for shuffle in (False, True):
        rng = np.random.default_rng(1)
        train = [
            dataclasses.replace(
                track, controls=np.full_like(track.controls, 0.1), mouth=_one_column(track.mouth)
            )
            for track in tracks.train
        ]
        learnt = dataclasses.replace(tracks, train=train)
        if shuffle:
            learnt = _Shuffled(learnt, rng)
        model = stage(tracks).model
        train_draft(model, learnt, torch.ones(16, 16), 150, seed=0)
        errors.append(_draft_error(model, learnt))
    assert errors[0] < 0.5 * errors[1], errors


@torch.no_grad()
def _draft_error(model: CausalDenoiser, tracks: UnitTracks) -> float:
    run = tracks.sample(np.random.default_rng(9), 32, 1)
    condition_map = model.condition_embedder.condition_map
    patches = condition_map.draft(
        condition_map(Conditioning(state=run.state, control=run.control))
    )[:, 0]
    return float((unpatch(patches, (8, 8), (2, 2)) - run.latents[:, 0]).square().mean())


def _one_column(mouth: np.ndarray) -> np.ndarray:
    """The jaw of a mouth [F, M], the rest at zero."""
    return np.where(np.arange(mouth.shape[1]) == 0, mouth, 0).astype(np.float32)


class _Shuffled(UnitTracks):
    """Tracks whose controls belong to other units than their latents."""

    def __init__(self, tracks: UnitTracks, rng: np.random.Generator) -> None:
        for field in dataclasses.fields(UnitTracks):
            object.__setattr__(self, field.name, getattr(tracks, field.name))
        object.__setattr__(self, "_rng", rng)

    def sample(
        self, rng: np.random.Generator, size: int, units: int, *, held_out: bool = False
    ) -> UnitRun:
        run = super().sample(rng, size, units, held_out=held_out)
        return dataclasses.replace(run, control=run.control[torch.randperm(size)])


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
        assert len(track.mouth) == len(track.controls) == 4 * len(track)


def test_a_decoder_learns_the_pictures_of_its_latents() -> None:
    """Frames that are one grey level per latent: the decoder finds the level."""
    torch.manual_seed(0)
    config = UnitConvConfig(
        size=32, widths=(8, 8, 8), encoder_blocks=(1, 1, 1), decoder_blocks=(1, 1, 1)
    )
    rng = np.random.default_rng(0)
    level = rng.uniform(-1, 1, 64).astype(np.float32)
    grey = np.round((level + 1) * 127.5).astype(np.uint8)
    frames = np.broadcast_to(grey[:, None, None, None], (64, 32, 32, 3))
    latents = torch.from_numpy(level)[:, None, None, None].expand(64, 4, 2, 2).contiguous()
    made = DecoderStage(
        model=UnitDecoder(config),
        frames=frames,
        latents=latents,
        weight=torch.ones(1, 1, 1, 32, 32),
        test_frames=frames[:16],
        test_latents=latents[:16],
        seed=0,
        precision=Precision("fp32", torch.device("cpu")),
    )
    optimizer = torch.optim.AdamW(made.model.parameters(), 1e-2)
    losses = []
    for step in range(60):
        loss = made.loss(step)["loss"]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-5:]) < 0.4 * np.mean(losses[:5]), losses
