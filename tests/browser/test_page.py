"""The page in headless Chromium against a real server at toy size, on the loopback interface."""

from __future__ import annotations

import asyncio
import threading
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.browser.cdp import (
    AUTOPLAY,
    FAKE_MEDIA,
    Browser,
    BrowserError,
    Page,
    browser,
    chromium_path,
)
from tests.webrtc.live import Site, site
from webrtc.liveness import TimeLimits

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium_path() is None, reason="needs chromium (apt-get install chromium)"),
]
LIVE = "document.body?.dataset.phase === 'live'"
SPEAKING = "document.body.hasAttribute('data-speaking')"
# The row that a stop fills once the page heard silence.
HEARD_STOP = """[...document.querySelectorAll(".rows > div")].some((row) =>
  row.textContent.startsWith("Stop to silence") && /[0-9] ms$/.test(row.textContent))"""
# Whether five pictures are shown within some milliseconds.
PLAYS = """new Promise((resolve) => {{
  const video = document.getElementById("video");
  let left = 5;
  const count = () => (left -= 1) ? video.requestVideoFrameCallback(count) : resolve(true);
  video.requestVideoFrameCallback(count);
  setTimeout(() => resolve(false), {limit_ms});
}})"""

# A gesture's button lights up for less than a second: too short to be asked for again and again.
WATCH_GESTURES = """new MutationObserver(() => {
  window.sent = document.querySelector("#event-list .sent")?.textContent ?? window.sent;
}).observe(document.getElementById("event-list"), { subtree: true, attributes: true }), 1"""


@contextmanager
def running_site(**options: object) -> Iterator[Site]:
    """A server in a thread of its own."""
    found: list[Site] = []
    started, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with site(limits=TimeLimits(), steps=(1, 2), default_steps=2, **options) as running:  # type: ignore[arg-type]
            found.append(running)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(30), "the server did not start"
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser(*FAKE_MEDIA, *AUTOPLAY) as running:
        yield running


def open_page(chromium: Browser, server: Site) -> Page:
    page = chromium.open(server.url + "/")
    page.wait_for("document.body.dataset.phase === 'idle'")
    return page


def start(page: Page) -> None:
    page.click("#start")
    page.wait_for(LIVE)


def plays(page: Page, limit_ms: int = 20_000) -> bool:
    """Whether pictures follow one another."""
    return bool(page.evaluate(PLAYS.format(limit_ms=limit_ms)))


def figures(page: Page) -> dict[str, str]:
    """The panel's rows by their labels."""
    return dict(
        page.evaluate(
            "[...document.querySelectorAll('.rows > div')].map((row) =>"
            " [row.querySelector('dt span').textContent, row.querySelector('dd').textContent])"
        )
    )


def tone(path: Path, seconds: float) -> Path:
    time = np.arange(int(16_000 * seconds)) / 16_000
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((9_000 * np.sin(2 * np.pi * 220 * time)).astype("<i2").tobytes())
    return path


def test_a_session_from_start_to_end(chromium: Browser, tmp_path: Path) -> None:
    sound = tone(tmp_path / "tone.wav", 20)
    with running_site(samples=(sound,)) as server:
        page = open_page(chromium, server)
        start(page)
        assert plays(page)
        page.choose_file("#file-input", sound)
        page.wait_for(SPEAKING)
        assert page.evaluate("document.getElementById('status-word').textContent") == "Speaking"
        page.click("#stop")
        page.wait_for(f"!{SPEAKING}")
        page.wait_for(HEARD_STOP)
        page.click("#samples button")
        page.wait_for(SPEAKING)
        page.press("Escape", key_code=27)
        page.wait_for(f"!{SPEAKING}")
        page.evaluate(WATCH_GESTURES)
        page.press("2")
        page.wait_for("window.sent?.startsWith('Nod')")

        page.wait_for("document.getElementById('n-fps').textContent !== '–'")
        page.wait_for("document.querySelector('#stage-rows .bar') !== null")
        page.wait_for("document.getElementById('n-latency').textContent !== '–'")
        page.wait_for("document.getElementById('server-rows').textContent.includes('×')")
        rows = figures(page)
        assert rows["Received"].endswith("bit/s")
        assert rows["First picture"].endswith("ms")
        assert rows["Control round trip"].endswith("ms")
        assert rows["Generation speed"].endswith("×")
        assert server.server.hub.active == 1

        page.click("#end")
        page.wait_for("document.body.dataset.phase === 'idle'")
        page.wait_for("fetch('/metrics').then((r) => r.text()).then((t) => /active 0/.test(t))")
        assert page.complaints() == []
        page.call("Page.close")


def test_a_video_that_stands_still_is_found(chromium: Browser) -> None:
    with running_site() as server:
        page = open_page(chromium, server)
        start(page)
        page.evaluate("document.getElementById('video').pause()")
        page.evaluate("new Promise((done) => setTimeout(done, 200))")
        assert not plays(page, 1_500)
        page.call("Page.close")


def test_a_full_server_is_waited_for_and_a_reload_resumes(chromium: Browser) -> None:
    with running_site() as server:
        first = open_page(chromium, server)
        start(first)
        second = open_page(chromium, server)
        second.click("#start")
        second.wait_for("document.body.dataset.phase === 'waiting'")
        notice = "document.getElementById('connection-notice').innerText"
        assert "All places are taken" in second.evaluate(notice)
        second.wait_for(f"/Next try in \\d+ s/.test({notice})")

        first.call("Page.bringToFront")
        first.call("Page.reload")
        first.wait_for(LIVE)
        assert server.server.hub.active == 1
        text = first.evaluate("fetch('/metrics').then((r) => r.text())")
        assert "rtgen_sessions_total 1\n" in text

        first.click("#end")
        second.call("Page.bringToFront")
        second.click("#connection-notice button")
        second.wait_for(LIVE)
        for page in (first, second):
            page.call("Page.close")


def test_the_microphone_is_offered_over_the_negotiated_track(chromium: Browser) -> None:
    with running_site() as server:
        page = open_page(chromium, server)
        page.press("m")
        page.wait_for(LIVE)
        page.wait_for("document.getElementById('mic').getAttribute('aria-pressed') === 'true'")
        page.press("m")
        page.wait_for("document.getElementById('mic').getAttribute('aria-pressed') === 'false'")
        assert page.complaints() == []
        page.call("Page.close")


def test_a_wrong_token_is_told_and_the_right_one_opens(chromium: Browser) -> None:
    with running_site(token="correct-horse") as server:
        page = chromium.open(server.url + "/")
        page.wait_for("document.body.dataset.phase === 'locked'")
        page.click("#token")
        page.type("wrong-horse")
        page.press("Enter")
        notice = "document.getElementById('connection-notice').innerText"
        page.wait_for(f"{notice}.includes('not accepted')")
        page.call("Page.navigate", {"url": "about:blank"})
        page.call("Page.navigate", {"url": f"{server.url}/#token=correct-horse"})
        page.wait_for("document.body?.dataset.phase === 'idle'")
        assert "token" not in page.evaluate("location.href")
        start(page)
        page.call("Page.close")


def test_waiting_in_vain_is_an_error(chromium: Browser) -> None:
    page = chromium.open("about:blank")
    with pytest.raises(BrowserError, match=r"not within 0\.2 s"):
        page.wait_for("false", timeout_s=0.2)
    with pytest.raises(BrowserError, match="broken"):
        page.evaluate("(() => { throw new Error('broken') })()")
    page.call("Page.close")
