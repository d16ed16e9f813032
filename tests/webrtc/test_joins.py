from __future__ import annotations

import logging

import aioice.ice
import numpy as np
import pytest
from aiortc import RTCRtpSender

from webrtc import aiortc_compat
from webrtc.joins import FADE_SAMPLES, Joiner


def test_sound_without_gaps_is_not_touched() -> None:
    joiner = Joiner()
    samples = np.arange(1000, dtype=np.int16)
    out = np.concatenate([joiner.sound(samples[:300]), joiner.sound(samples[300:])])
    np.testing.assert_array_equal(out, samples)
    assert joiner.gaps == 0


def test_a_gap_fades_out_and_in_in_pieces_of_any_size() -> None:
    whole, parts = Joiner(), Joiner()
    loud = np.full(500, 10_000, np.int16)
    first = np.concatenate([whole.sound(loud), whole.silence(400), whole.sound(loud)])
    pieces = [parts.sound(loud[:77]), parts.sound(loud[77:])]
    pieces += [parts.silence(n) for n in (1, 99, 150, 150)]
    pieces += [parts.sound(loud[:n]) for n in (1, 100, 399)]
    np.testing.assert_array_equal(first, np.concatenate(pieces))
    steps = np.abs(np.diff(first.astype(int)))
    assert steps.max() < 10_000 * 2 / FADE_SAMPLES  # no click
    assert first[500 + FADE_SAMPLES : 900].tolist() == [0] * (400 - FADE_SAMPLES)
    assert (whole.gaps, whole.gap_samples) == (1, 400)


def test_expected_silence_is_no_gap() -> None:
    joiner = Joiner()
    joiner.silence(100)
    joiner.sound(np.ones(10, np.int16))
    joiner.expect_silence()
    joiner.silence(100)
    joiner.sound(np.ones(10, np.int16))
    assert joiner.gaps == joiner.gap_samples == 0
    joiner.silence(5)
    assert (joiner.gaps, joiner.gap_samples) == (1, 5)


def test_private_names_that_went_away_are_told_and_nothing_breaks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(RTCRtpSender, "_send_keyframe")
    monkeypatch.delattr(aioice.ice, "get_host_addresses")
    sender = RTCRtpSender.__new__(RTCRtpSender)
    with caplog.at_level(logging.WARNING):
        assert not aiortc_compat.on_key_frame_request(sender, lambda: None)
        assert not aiortc_compat.gather_addresses(("127.0.0.1",))
    assert len(caplog.records) == 2


def test_only_the_named_addresses_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aioice.ice, "get_host_addresses", aioice.ice.get_host_addresses)
    assert aiortc_compat.gather_addresses(("127.0.0.1", "::1"))
    assert aioice.ice.get_host_addresses(use_ipv4=True, use_ipv6=False) == ["127.0.0.1"]
    assert aioice.ice.get_host_addresses(use_ipv4=True, use_ipv6=True) == ["127.0.0.1", "::1"]
