"""The parts without I/O: rate, liveness, microphone, turns, joins, metrics, WAV, SDP."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from rtgen.errors import ConfigError, MediaError
from rtgen.types import ErrorEvent, Finished, Pcm16, QualityChanged, ServerEvent, Started
from webrtc.config import IceServer, ServerConfig
from webrtc.liveness import Life, State, TimeLimits
from webrtc.metrics import Metrics
from webrtc.microphone import GateConfig, MicrophoneGate, level_db
from webrtc.rate_control import RateConfig, RateControl
from webrtc.signalling import Problem, check_sdp, sent_video_codec
from webrtc.turns import MAX_HELD, TurnRelay
from webrtc.uploads import container_of
from webrtc.voice import parse_wav

# -- rate


def test_the_rate_grows_without_loss_and_shrinks_with_it() -> None:
    control = RateControl(RateConfig(start=1_000_000), 0.0)
    assert control.report(0.0, 1.0) == pytest.approx(1_080_000, rel=1e-6)
    assert control.report(0.05, 2.0) == pytest.approx(1_080_000, rel=1e-6)
    assert control.report(0.5, 3.0) == pytest.approx(810_000, rel=1e-6)
    for second in range(4, 60):
        low = control.report(1.0, float(second))
    assert low == RateConfig().least
    for second in range(60, 200):
        high = control.report(0.0, float(second))
    assert high == RateConfig().most
    with pytest.raises(ConfigError):
        RateConfig(start=1, least=2, most=3)


# -- liveness

LIMITS = TimeLimits(silence_s=6, lost_s=3, resume_s=8, heartbeat_s=2)


def live(now_s: float = 0.0) -> Life:
    life = Life(LIMITS, now_s)
    life.go(State.CONNECTING, now_s)
    life.go(State.LIVE, now_s)
    return life


def test_a_silent_peer_is_gone_within_ten_seconds() -> None:
    life = live()
    life.heard(1.0)
    assert not life.is_silent(6.9)
    assert life.is_silent(7.1)
    life.detach(7.1, "peer vanished", vanished=True)
    assert life.expired(10.0) is None
    assert life.expired(10.2) == "peer vanished"
    assert 1.0 + LIMITS.silence_s + LIMITS.lost_s <= 10.0


def test_a_peer_that_said_good_bye_may_come_back_longer() -> None:
    life = live()
    life.detach(1.0, "peer gone", vanished=False)
    assert life.expired(8.9) is None
    assert life.expired(9.1) == "peer gone"


@pytest.mark.parametrize(
    ("states", "limit_s"),
    [
        ([], LIMITS.negotiating_s),
        ([State.CONNECTING], LIMITS.connecting_s),
        ([State.CONNECTING, State.LIVE, State.DRAINING], LIMITS.draining_s),
    ],
)
def test_each_state_ends_by_itself(states: list[State], limit_s: float) -> None:
    life = Life(LIMITS, 0.0)
    for state in states:
        life.go(state, 0.0)
    assert life.expired(limit_s - 0.01) is None
    assert life.expired(limit_s + 0.01)


def test_a_session_ends_even_if_it_is_always_heard() -> None:
    life = live()
    life.heard(LIMITS.session_s)
    assert life.expired(LIMITS.session_s + 1) == "time is up"


def test_a_closed_session_stays_closed() -> None:
    life = live()
    life.go(State.CLOSED, 1.0)
    for state in State:
        with pytest.raises(ConfigError):
            life.go(state, 2.0)
    assert life.expired(1e9) is None


def test_wrong_limits_are_refused() -> None:
    with pytest.raises(ConfigError):
        TimeLimits(silence_s=1.0, heartbeat_s=2.0)
    with pytest.raises(ConfigError):
        TimeLimits(lost_s=0)


# -- microphone

RATE = 48_000


def block(level: float) -> Pcm16:
    sine = np.sin(np.arange(960) * 0.1) * level * 32768 * np.sqrt(2)
    return np.rint(np.clip(sine, -32768, 32767)).astype(np.int16)


def story(gate: MicrophoneGate, levels: list[float]) -> tuple[list[int], list[int]]:
    """Samples passed on per block, and the blocks that end an utterance."""
    out = [gate.push(block(level), RATE) for level in levels]
    return [len(o.pcm) for o in out], [n for n, o in enumerate(out) if o.is_end]


def test_silence_is_never_passed_on() -> None:
    passed, ends = story(MicrophoneGate(), [0.001] * 100)
    assert sum(passed) == 0
    assert ends == []


def test_speech_is_passed_on_with_what_came_before_and_ends_after_a_pause() -> None:
    gate = MicrophoneGate()
    passed, ends = story(gate, [0.0] * 20 + [0.1] * 30 + [0.0] * 40)
    first = next(n for n, count in enumerate(passed) if count)
    assert passed[first] == pytest.approx(0.2 * RATE, abs=960)
    assert first * 960 - 20 * 960 < 0.12 * RATE  # a unit is collected, not more
    assert ends == [20 + 30 + 24]
    assert sum(passed) == pytest.approx((0.1 + 0.6 + 0.5) * RATE, abs=2 * 960)
    assert not gate.is_open
    again, _ = story(gate, [0.1] * 20)
    assert sum(again) > 0


def test_a_pause_within_speech_is_passed_on() -> None:
    passed, ends = story(MicrophoneGate(), [0.1] * 30 + [0.0] * 15 + [0.1] * 30)
    assert ends == []
    assert sum(passed) == 75 * 960


def test_levels() -> None:
    assert level_db(block(0.1)) == pytest.approx(-20, abs=0.1)
    assert level_db(block(0.0)) == -96
    assert level_db(np.zeros(0, np.int16)) == -96
    with pytest.raises(ConfigError):
        GateConfig(open_db=-50, close_db=-40)


# -- turns


def started(at: float) -> Started:
    return Started(generation=0, position_s=at)


def finished(at: float, *, interrupted: bool = False) -> Finished:
    return Finished(generation=0, position_s=at, interrupted=interrupted)


def test_turns_are_told_when_they_are_played() -> None:
    relay = TurnRelay()
    assert relay.take(started(1.0), Fraction(0)) == []
    assert relay.take(finished(1.4), Fraction(0)) == []
    assert relay.due(Fraction(9, 10)) == []
    assert relay.due(Fraction(1)) == [started(1.0)]
    assert relay.due(Fraction(2)) == [finished(1.4)]
    assert relay.due(Fraction(3)) == []


def test_an_interrupt_is_told_at_once_with_what_it_ends() -> None:
    relay = TurnRelay()
    relay.take(started(5.0), Fraction(0))
    end = finished(5.0, interrupted=True)
    assert relay.take(end, Fraction(0)) == [started(5.0), end]


def test_other_events_do_not_wait() -> None:
    relay = TurnRelay()
    relay.take(started(5.0), Fraction(0))
    change = QualityChanged(num_inference_steps=1, degraded=True)
    mild = ErrorEvent(message="m", fatal=False)
    assert relay.take(change, Fraction(0)) == [change]
    assert relay.take(mild, Fraction(0)) == [mild]
    fatal = ErrorEvent(message="m", fatal=True)
    assert relay.take(fatal, Fraction(0)) == [started(5.0), fatal]


def test_turns_that_wait_are_bounded() -> None:
    relay = TurnRelay()
    told: list[ServerEvent] = []
    for number in range(3 * MAX_HELD):
        told += relay.take(started(100.0 + number), Fraction(0))
    assert len(told) == 2 * MAX_HELD


# -- the rest


def test_metrics_are_prometheus_text() -> None:
    metrics = Metrics()
    metrics.counter("a_total", "A.")
    metrics.gauge("b", "B.", lambda: 2.5)
    metrics.histogram("c_seconds", "C.", (0.1, 1.0))
    metrics.add("a_total", reason='x"\n')
    for value in (0.05, 0.5, 5.0):
        metrics.observe("c_seconds", value)
    lines = metrics.text().splitlines()
    assert 'a_total{reason="x\\"\\n"} 1' in lines
    assert "b 2.5" in lines
    assert 'c_seconds_bucket{le="0.1"} 1' in lines
    assert 'c_seconds_bucket{le="1"} 2' in lines
    assert 'c_seconds_bucket{le="+Inf"} 3' in lines
    assert "c_seconds_count 3" in lines
    assert "# TYPE c_seconds histogram" in lines


def test_actpass_becomes_active_and_nothing_else_changes() -> None:
    sdp = "v=0\r\nm=audio 9 X 0\r\na=setup:actpass\r\na=setup:actpassive\r\na=setup:passive\r\n"
    assert check_sdp(sdp).text == sdp.replace("actpass\r", "active\r")
    assert check_sdp(sdp).kinds == ("audio",)
    with pytest.raises(Problem):
        check_sdp("\ud800")


def test_the_codec_of_an_answer() -> None:
    audio = "m=audio 1 X 96\r\na=rtpmap:96 opus/48000/2\r\n"
    video = "m=video 1 X 99 97\r\na=rtpmap:97 VP8/90000\r\na=rtpmap:99 H264/90000\r\n"
    assert sent_video_codec(audio + video) == "H264"
    assert sent_video_codec(audio) is None
    assert sent_video_codec(audio + video.replace("video 1", "video 0")) is None


def test_containers_are_told_by_their_first_bytes() -> None:
    heads = {
        b"RIFF0000WAVEfmt ": "wav",
        b"\x00\x00\x00\x20ftypM4A ": "mov",
        b"ID3\x04": "mp3",
        b"\xff\xfb\x90\x00": "mp3",
        b"\xff\xf1\x50\x80": "aac",
        b"fLaC\x00": "flac",
        b"OggS\x00": "ogg",
        b"\x1a\x45\xdf\xa3\x9f": "matroska",
        b"FORM0000AIFF": "aiff",
        b"#EXTM3U\n": None,
        b"RIFF0000AVI ": None,
        b"": None,
    }
    for head, name in heads.items():
        assert container_of(head) == name, head


def test_a_streamed_wav_is_read_whatever_its_sizes_say() -> None:
    header = bytes.fromhex(
        "52494646ffffff7f57415645666d742010000000010001002256000044ac0000020010006461746100f0ff7f"
    )
    pcm, rate = parse_wav(header + b"\x01\x00\x02\x00\x03")
    assert pcm.tolist() == [1, 2]
    assert rate == 22_050
    for wrong in (b"", header, b"RIFX" + header[4:], header[:22] + b"\x02" + header[23:] + b"ab"):
        with pytest.raises(MediaError):
            parse_wav(wrong)


def test_wrong_configurations_are_refused() -> None:
    for wrong in (
        {"port": 70_000},
        {"max_sessions": 0},
        {"token": "short"},
        {"cors_origins": ("*",)},
        {"tls_cert": "x"},
    ):
        with pytest.raises(ConfigError):
            ServerConfig(**wrong)
    with pytest.raises(ConfigError):
        IceServer(urls=("http://x",))


def test_media_stay_on_the_address_that_is_listened_on() -> None:
    assert ServerConfig().gather == ("127.0.0.1",)
    assert ServerConfig(host="localhost").gather == ("127.0.0.1",)
    assert ServerConfig(host="0.0.0.0").gather == ()
    assert ServerConfig(host="0.0.0.0", media_addresses=("10.0.0.1",)).gather == ("10.0.0.1",)
