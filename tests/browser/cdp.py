"""Headless Chromium, driven by its DevTools protocol over a pipe: the standard library suffices.

With `--remote-debugging-pipe` Chromium reads commands from descriptor 3 and writes answers and
events to descriptor 4, each a JSON text that ends in a zero byte.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--disable-component-update",
    "--disable-background-networking",
    "--no-first-run",
    "--allow-loopback-in-peer-connection",
    "--remote-debugging-pipe",
)
FAKE_MEDIA = ("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream")
AUTOPLAY = ("--autoplay-policy=no-user-gesture-required",)


class BrowserError(RuntimeError):
    """Chromium refused a command, threw in the page, did not answer in time, or went away."""


def chromium_path() -> str | None:
    """Where a Chromium is, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A running Chromium.

    Args:
        profile: an empty folder for its files.
        flags: added to `FLAGS`.

    Attributes:
        pid: of its main process, which leads a process group of its own.
    """

    def __init__(self, profile: Path, flags: Sequence[str]) -> None:
        path = chromium_path()
        if path is None:
            raise BrowserError("no Chromium found; on Debian: apt-get install chromium")
        child_in, self._out = os.pipe()
        self._in, child_out = os.pipe()
        # Clear of 3 and 4, so that neither overwrites the other.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (child_in, child_out)]
        null = os.open(os.devnull, os.O_RDWR)
        self.pid = os.posix_spawn(
            path,
            [path, *FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"],
            {**os.environ, "HOME": str(profile)},
            file_actions=[
                *((os.POSIX_SPAWN_DUP2, null, to) for to in (0, 1, 2)),
                (os.POSIX_SPAWN_DUP2, ends[0], 3),
                (os.POSIX_SPAWN_DUP2, ends[1], 4),
            ],
            setsid=True,
        )
        for end in (child_in, child_out, *ends, null):
            os.close(end)
        self._unread = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    def call(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        session: str | None = None,
        timeout_s: float = 40.0,
    ) -> dict[str, Any]:
        """Carries out one command; events that come meanwhile go to `events`.

        Raises:
            BrowserError: an error answer, or none in time.
        """
        self._last_id += 1
        command: dict[str, Any] = {"id": self._last_id, "method": method, "params": params or {}}
        if session is not None:
            command["sessionId"] = session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._read(deadline, method)
            if message.get("id") == self._last_id:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error']}")
                return dict(message["result"])
            if "method" in message:
                self.events.append(message)

    def _read(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise BrowserError(f"{method}: no answer from Chromium in time")
            block = os.read(self._in, 1 << 16)
            if not block:
                raise BrowserError(f"{method}: Chromium went away")
            self._unread += block
        text, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(text))

    def open(self, url: str, *, size: tuple[int, int] = (1280, 860)) -> Page:
        """A new page at `url`, seen in a window of `size` CSS pixels."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attach = {"targetId": target, "flatten": True}
        page = Page(self, self.call("Target.attachToTarget", attach)["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.resize(*size)
        page.call("Page.navigate", {"url": url})
        page.wait_for("document.readyState === 'complete'")
        return page

    def kill(self) -> None:
        """Ends Chromium at once, as a crash would, with all its processes."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # already gone
        for end in (self._in, self._out):
            os.close(end)


class Page:
    """One page of a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser = browser
        self.session = session

    def call(self, method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self.browser.call(method, params, session=self.session)

    def evaluate(self, expression: str, *, gesture: bool = False) -> Any:
        """The JSON value of a JavaScript expression; promises are awaited.

        Args:
            expression: JavaScript.
            gesture: count as a click of the user, which lets sound play.

        Raises:
            BrowserError: the page threw.
        """
        params = {
            "expression": expression,
            "returnByValue": True,
            "awaitPromise": True,
            "userGesture": gesture,
        }
        answer = self.call("Runtime.evaluate", params)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, *, timeout_s: float = 40.0) -> Any:
        """Waits until an expression is truthy, and returns its value.

        Raises:
            BrowserError: it was not within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            if time.monotonic() > deadline:
                raise BrowserError(f"not within {timeout_s:g} s: {expression}")
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        """A real click of the mouse on the middle of an element."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            press = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", press)

    def press(self, key: str, code: str = "", key_code: int = 0) -> None:
        """Presses and releases a key, e.g. "m", or "Escape" with its code 27."""
        text = "\r" if key == "Enter" else key if len(key) == 1 else ""
        names = {"key": key, "code": code or key, "windowsVirtualKeyCode": key_code, "text": text}
        self.call("Input.dispatchKeyEvent", {"type": "keyDown" if text else "rawKeyDown", **names})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **names, "text": ""})

    def type(self, text: str) -> None:
        """Enters a text where the focus is."""
        self.call("Input.insertText", {"text": text})

    def choose_file(self, selector: str, path: Path) -> None:
        """Gives a file to an `<input type=file>`."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        query = {"nodeId": root, "selector": selector}
        node = self.call("DOM.querySelector", query)["nodeId"]
        self.call("DOM.setFileInputFiles", {"nodeId": node, "files": [str(path)]})

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        """Sets the window's size in CSS pixels; a phone has touch and two pixels to one."""
        scale = 2 if phone else 1
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, *, scheme: str = "light", motion: str = "no-preference") -> None:
        """Sets `prefers-color-scheme` and `prefers-reduced-motion`."""
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.call("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Writes a PNG of the window, or of the whole page."""
        answer = self.call("Page.captureScreenshot", {"captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(answer["data"]))

    def complaints(self) -> list[str]:
        """What the page threw, and what it or the browser logged as an error, so far."""
        found = []
        for event in self.browser.events:
            params = event.get("params", {})
            if event.get("sessionId") != self.session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"])[:600])
            if event["method"] == "Runtime.consoleAPICalled" and params["type"] == "error":
                found.append(json.dumps(params["args"])[:600])
            if event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return found


@contextmanager
def browser(*flags: str) -> Iterator[Browser]:
    """A Chromium with an empty profile, ended and cleaned up after use."""
    with TemporaryDirectory(prefix="rtgen-browser-", ignore_cleanup_errors=True) as folder:
        running = Browser(Path(folder), flags)
        try:
            yield running
        finally:
            running.kill()
