"""The transformer decoder: streaming, whole clips and the slow oracle are one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from decoders import flash_layers
from decoders.flash import FlashConfig, FlashNetwork
from decoders.flash_layers import FlashBlock, segments
from decoders.flash_presets import (
    AVATAR_FLASH,
    flash_config,
    flash_flops,
    load_flash_decoder,
    save_flash,
)
from rtgen.errors import CheckpointError, ConfigError, ShapeError
from tests.decoders.cases import FLASH, flash_network
from tests.decoders.slow_flash import SlowFlash

ROWS, COLUMNS = 3, 5


def noise(config: FlashConfig, frames: int, batch: int = 1, seed: int = 3) -> Tensor:
    """[B, T, C, h, w]."""
    random = torch.Generator().manual_seed(seed)
    size = ROWS * config.fold, COLUMNS * config.fold
    return torch.randn(batch, frames, config.latent_channels, *size, generator=random)


def streamed(network: FlashNetwork, latents: Tensor) -> Tensor:
    """All frames of latents [T, C, h, w], one at a time."""
    size = latents.shape[2:]
    memory, outs = network.new_memory(*size), []
    for index, frame in enumerate(latents):
        pixels, memory = network.stream(frame, memory, index == 0)
        outs.append(pixels)
    return torch.cat(outs)


def check(out: Tensor, expected: Tensor) -> None:
    assert out.shape == expected.shape
    assert 0.1 < expected.std() < 3, "the comparison says nothing"
    assert (out - expected).abs().max() <= 2e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", FLASH)
def test_a_stream_equals_the_slow_oracle(name: str) -> None:
    network, latents = flash_network(FLASH[name]), noise(FLASH[name], 4)
    expected = SlowFlash(network, ROWS, COLUMNS).decode(latents[0])
    check(streamed(network, latents[0]), expected)


@pytest.mark.parametrize("name", FLASH)
def test_a_whole_clip_at_once_equals_the_stream(name: str) -> None:
    """The form for training: all frames of all clips in one pass."""
    network, latents = flash_network(FLASH[name]), noise(FLASH[name], 4, batch=2)
    out, _ = network(latents)
    check(out, torch.stack([streamed(network, clip) for clip in latents]))


@pytest.mark.parametrize("name", ["paper", "windowed"])
def test_a_clip_may_be_cut_where_its_memory_is_carried_on(name: str) -> None:
    network, latents = flash_network(FLASH[name]), noise(FLASH[name], 5)
    whole, left = network(latents)
    first, memory = network(latents[:, :2])
    second, kept = network(latents[:, 2:], memory)
    check(torch.cat((first, second), 1), whole)
    for a, b in zip(left, kept, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_cut_without_its_memory_is_noticed() -> None:
    network, latents = flash_network(FLASH["avatar"]), noise(FLASH["avatar"], 4)
    parts = [network(latents[:, part])[0] for part in (slice(0, 2), slice(2, 4))]
    with pytest.raises(AssertionError):
        check(torch.cat(parts, 1), network(latents)[0])


def test_what_comes_later_changes_no_bit() -> None:
    network, latents = flash_network(FLASH["paper"]), noise(FLASH["paper"], 4)
    changed = latents.clone()
    changed[:, 3] += 1
    before, after = network(latents)[0], network(changed)[0]
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_each_block_looks_back_one_latent_frame() -> None:
    """Two blocks and two refinements: a latent frame is forgotten after four."""
    network, latents = flash_network(FLASH["paper"]), noise(FLASH["paper"], 7)
    changed = latents.clone()
    changed[:, 0] += 1
    apart = (streamed(network, latents[0]) - streamed(network, changed[0])).flatten(1).abs().amax(1)
    assert (apart[: 1 + 4 * 4] > 0).all()
    assert apart[1 + 4 * 4 :].max() == 0


def test_a_still_latent_becomes_a_still_picture_for_ever() -> None:
    config = FLASH["windowed"]
    network, latents = flash_network(config), noise(config, 1)[0]
    memory, last = network.new_memory(ROWS, COLUMNS), torch.empty(0)
    for index in range(40):
        pixels, memory = network.stream(latents[0], memory, index == 0)
        if index > config.num_layers + config.refine_layers:
            assert torch.equal(pixels, last)
        last = pixels


def test_the_first_unit_is_the_end_of_a_whole_one() -> None:
    config = FLASH["paper"]
    whole = flash_network(dataclasses.replace(config, first_frames=4))
    latents = noise(config, 2)
    full, (one, _) = whole(latents)[0], flash_network(config)(latents)
    assert torch.equal(one, full[:, 3:])


def test_a_gradient_reaches_the_frame_before() -> None:
    config = FLASH["paper"]
    network = flash_network(config).requires_grad_(True)
    latents = noise(config, 2).requires_grad_(True)
    _, memory = network(latents[:, :1])
    network(latents[:, 1:], memory)[0].square().mean().backward()
    assert latents.grad is not None
    assert latents.grad[:, 0].abs().max() > 0
    assert all(parameter.grad is not None for parameter in network.parameters())


# ---- planted bugs


def planted(name: str, frames: int = 3) -> None:
    network, latents = flash_network(FLASH[name]), noise(FLASH[name], frames)
    with pytest.raises(AssertionError):
        check(streamed(network, latents[0]), SlowFlash(network, ROWS, COLUMNS).decode(latents[0]))


def test_planted_keys_without_their_time_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    make = flash_layers.make_grid

    def timeless(*arguments: Any) -> Any:
        grid = make(*arguments)
        return dataclasses.replace(grid, slots=grid.slots[:, :1].expand_as(grid.slots))

    monkeypatch.setattr("decoders.flash.make_grid", timeless)
    planted("paper")


def test_planted_memory_of_the_first_pixel_frames_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = FlashBlock.forward

    def early(self: FlashBlock, x: Tensor, *arguments: Any) -> Any:
        if x.shape[2] == 1:
            return forward(self, x, *arguments)
        _, kept = forward(self, x.flip(2), *arguments)
        return forward(self, x, *arguments)[0], kept

    monkeypatch.setattr(FlashBlock, "forward", early)
    planted("windowed")


def test_planted_windows_without_shift_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoders.flash._shift", lambda config, layer: 0)
    planted("avatar")


def test_planted_heads_dealt_to_other_keys_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = FlashBlock._heads

    def dealt(self: FlashBlock, x: Tensor, count: int) -> Tensor:
        out = heads(self, x, count)
        return out.flip(-2) if count == self.groups else out

    monkeypatch.setattr(FlashBlock, "_heads", dealt)
    planted("paper")


# ---- parts


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_windows_tile_a_side(length: int, shift: int) -> None:
    runs = segments(length, 4, shift)
    assert [runs[0][0], runs[-1][1]] == [0, length]
    for (_, stop, _), (start, _, _) in zip(runs, runs[1:], strict=False):
        assert stop == start
    for start, stop, window in runs:
        assert 0 < window <= max(4, length)
        assert (stop - start) % window == 0


def test_pixels_at_a_seam_know_both_tokens() -> None:
    """A token reaches four pixels into its neighbours with the convolution, none without."""
    config = FLASH["paper"]
    for seam_conv, reach in ((True, 4), (False, 0)):
        network = flash_network(dataclasses.replace(config, seam_conv=seam_conv))
        grid = network.grid(ROWS, COLUMNS)
        y = torch.randn(1, 1, ROWS * COLUMNS, 768, generator=torch.Generator().manual_seed(0))
        changed = y.clone()
        changed[:, :, COLUMNS + 2] += 1  # token of row 1, column 2
        apart = (network._paint(changed, grid) - network._paint(y, grid)).abs().amax((0, 1, 2))
        rows, columns = (apart.amax(dim).nonzero().flatten().tolist() for dim in (1, 0))
        assert [rows[0], rows[-1]] == [16 - reach, 31 + reach]
        assert [columns[0], columns[-1]] == [32 - reach, 47 + reach]


def test_an_untrained_seam_convolution_does_nothing() -> None:
    config = FLASH["paper"]
    torch.manual_seed(0)
    network = FlashNetwork(config).eval()
    plain = FlashNetwork(dataclasses.replace(config, seam_conv=False)).eval()
    plain.load_state_dict(network.state_dict(), strict=False)
    latents = noise(config, 2)
    assert torch.equal(network(latents)[0], plain(latents)[0])


@pytest.mark.parametrize(
    ("size", "latent_space", "millions"),
    [
        ("S", "wan2.2", 56.8),
        ("B", "wan2.2", 161.7),
        ("L", "wan2.2", 348.0),
        ("XL", "wan2.2", 769.3),
        ("XL", "wan2.1", 750.4),
    ],
)
def test_parameter_counts_are_the_papers(size: Any, latent_space: str, millions: float) -> None:
    for windowed in (False, True):
        with torch.device("meta"):
            network = FlashNetwork(flash_config(size, latent_space, windowed=windowed))
        count = sum(parameter.numel() for parameter in network.parameters())
        assert count / 1e6 == pytest.approx(millions, abs=0.1)


def test_the_avatars_is_small() -> None:
    with torch.device("meta"):
        network = FlashNetwork(AVATAR_FLASH)
        memory = network.new_memory(16, 16)
    assert sum(parameter.numel() for parameter in network.parameters()) < 8e6
    assert sum(tensor.numel() for tensor in memory) * 4 < 4e6


@pytest.mark.parametrize(("size", "mib"), [("S", 15), ("XL", 32)])
def test_the_memory_is_the_papers(size: Any, mib: int) -> None:
    """At 480x832 in bfloat16, where the stock decoder needs 1801 MiB."""
    with torch.device("meta"):
        network = FlashNetwork(flash_config(size, "wan2.1")).to(torch.bfloat16)
        memory = network.new_memory(60, 104)
    assert sum(tensor.nbytes for tensor in memory) / 2**20 == pytest.approx(mib, abs=1)


@pytest.mark.parametrize("name", FLASH)
def test_analytic_flops_are_what_torch_counts(name: str) -> None:
    config = FLASH[name]
    network, latents = flash_network(config), noise(config, 2)
    network.attention_backend = "naive"  # whose products are counted
    _, memory = network(latents[:, :1])
    with FlopCounterMode(display=False) as counter:
        network(latents[:, 1:], memory)
    assert flash_flops(config, *latents.shape[3:]) == counter.get_total_flops()


def test_windows_cut_the_largest_at_1080p_to_a_third() -> None:
    full, cut = (flash_config("XL", "wan2.1", windowed=windowed) for windowed in (False, True))
    assert flash_flops(cut, 136, 240) < flash_flops(full, 136, 240) / 3


def test_the_steady_step_is_one_graph() -> None:
    config = FLASH["windowed"]
    network, latents = flash_network(config), noise(config, 4)
    grid = network.grid(ROWS, COLUMNS)
    _, memory = network(latents[:, :1])
    run = torch.compile(network.run, backend="eager", fullgraph=True, dynamic=False)
    with torch.compiler.set_stance("default"):
        for index in range(1, 4):
            expected, left = network.run(latents[:, index : index + 1], memory, grid)
            found, memory = run(latents[:, index : index + 1], memory, grid)
            torch.testing.assert_close(found, expected)
    torch.testing.assert_close(memory, left)


def test_bfloat16_is_near_float32() -> None:
    config = FLASH["windowed"]
    network, latents = flash_network(config), noise(config, 3)
    expected = network(latents)[0]
    out = network.bfloat16()(latents.bfloat16())[0]
    assert (out - expected).square().mean().sqrt() < 0.03 * expected.std()


# ---- files and refusals


def test_a_folder_gives_back_the_decoder(tmp_path: Path) -> None:
    network = flash_network(FLASH["avatar"])
    save_flash(network, tmp_path / "flash", "toy")
    decoder = load_flash_decoder(tmp_path / "flash")
    assert decoder.latent_space == "toy"
    latents = noise(FLASH["avatar"], 2)
    state = decoder.new_state(ROWS, COLUMNS, torch.float32, "cpu")
    outs = [decoder.step([state], latents[:, i : i + 1])[0] for i in range(2)]
    assert torch.equal(torch.cat(outs), streamed(network, latents[0]))


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        load_flash_decoder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="not that of a FlashNetwork"):
        load_flash_decoder(tmp_path)
    save_flash(flash_network(FLASH["paper"]), tmp_path, "toy")
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"dim": 24', '"dim": 48'))
    with pytest.raises(CheckpointError, match="weights are wrong"):
        load_flash_decoder(tmp_path)
    (tmp_path / "config.json").write_text(text.replace('"dim"', '"width"'))
    with pytest.raises(ConfigError, match="width"):
        load_flash_decoder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 26}, "multiple of num_heads"),
        ({"num_heads": 8}, "at least 6"),
        ({"refine_dim": 16}, "multiple of the head's width"),
        ({"num_kv_heads": 3}, "must divide"),
        ({"refine_memory": 5}, "refine_memory"),
        ({"first_frames": 0}, "first_frames"),
        ({"window": 1}, "window"),
        ({"global_layers": (2,)}, "global_layers"),
        ({"is_factored": True, "fold": 2}, "without fold"),
    ],
)
def test_configurations_that_break_a_rule_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(FLASH["paper"], **changes)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 2"):
        flash_network(FLASH["folded"]).new_memory(3, 4)
    with pytest.raises(ConfigError, match="paints"):
        flash_network(FLASH["avatar"]).new_memory(3, 4)
    with pytest.raises(ShapeError, match="latents must be"):
        flash_network(FLASH["paper"])(torch.zeros(1, 1, 5, 2, 2))
    with pytest.raises(ConfigError, match="sizes are S, B"):
        flash_config("S", "wan3")
