"""`rtgen serve` as a whole: a real generation process, its start, its errors and its end."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from rtgen.cli import main
from rtgen.engine.host import HostConfig, RemoteService
from tests.sound import tone
from tests.toy_pipeline import write_toy_model
from tests.webrtc.live import Address, Client, LocalService, is_loud, run
from webrtc.config import ServerConfig
from webrtc.serve import serve

ROOT = Path(__file__).resolve().parent.parent.parent


def test_serve_says_where_it_is_answers_and_ends_on_sigterm(tmp_path: Path) -> None:
    model = write_toy_model(tmp_path / "toy")
    words = ["serve", "--port", "0", "--model", f"{model}/", "--dtype", "float32"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rtgen", *words, "--device", "cpu"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("rtgen: ready at http://127.0.0.1:"), line
        url = line.split()[-1]
        with urllib.request.urlopen(url + "readyz", timeout=10) as answer:
            assert json.load(answer) == {"status": "ready"}
        with urllib.request.urlopen(url + "config", timeout=10) as answer:
            config = json.load(answer)
        assert config["avatars"] == ["ada", "bo"]
        assert (config["width"], config["height"], config["fps"]) == (32, 32, 25)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert out == ""
    finally:
        process.kill()
        process.wait()
    assert "draining" in err


def test_a_port_in_use_is_one_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_toy_model(tmp_path / "toy")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port, "--model", f"{model}/"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "nobody"], "unknown model 'nobody'"),
        (["--token", "short"], "at least 8"),
        (["--tls-cert", "x.pem"], "certificate and its key"),
        (["--cors-origin", "*"], "name the origins"),
        (["--ice-server", "http://x"], "stun:host"),
        (["--max-sessions", "0"], "max_sessions"),
        (["--port", "x"], "invalid int"),
    ],
)
def test_wrong_flags_are_one_line(
    capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["serve", *words]) == 2
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_generation_process_speaks_is_interrupted_and_is_told_of_its_end(tmp_path: Path) -> None:
    host = HostConfig(
        factory="pipelines.serving:avatar_pipeline",
        arguments={
            "folder": str(write_toy_model(tmp_path / "toy")),
            "device": "cpu",
            "dtype": "float32",
        },
    )

    async def talk(url: str) -> None:
        address = Address(url.rstrip("/"))
        client = Client(address)
        assert await client.connect(spec={"avatar": "bo"}) == 201
        await client.live()
        body = tone(5.0).astype("<i2").tobytes()
        pushed = await address.json("POST", client.path + "/pcm", data=io.BytesIO(body))
        assert pushed == (200, {"samples": len(tone(5.0))})
        await client.until(lambda: sum(map(is_loud, client.sound)) > 8)
        client.send("stop")
        await client.until(lambda: client.told("finished"))
        assert client.told("finished")[0]["interrupted"]
        client.send("set_avatar", avatar="nobody")
        await client.until(lambda: client.told("error"))
        assert not client.told("error")[0]["fatal"]
        count = len(client.pictures)
        await client.until(lambda: len(client.pictures) > count + 5)
        assert (await address.json("DELETE", client.path))[0] == 204
        await client.close()
        await address.http.close()

    async def work() -> None:
        stop = asyncio.Event()
        urls: asyncio.Queue[str] = asyncio.Queue()
        serving = asyncio.create_task(
            serve(lambda: RemoteService(host), ServerConfig(port=0), urls.put_nowait, stop)
        )
        try:
            await talk(await asyncio.wait_for(urls.get(), 50))
        finally:
            stop.set()
            await serving

    run(work(), 110)


def test_the_url_carries_the_token_and_the_service_is_closed() -> None:
    async def work() -> None:
        made: list[LocalService] = []
        urls: list[str] = []
        stop = asyncio.Event()

        def make() -> LocalService:
            made.append(LocalService())
            return made[0]

        def ready(url: str) -> None:
            urls.append(url)
            stop.set()

        before = time.monotonic()
        await serve(make, ServerConfig(port=0, token="correct-horse"), ready, stop)
        assert time.monotonic() - before < 30
        assert urls[0].endswith("/#token=correct-horse")
        assert made[0].is_closed

    run(work())


def test_a_service_that_does_not_start_is_the_error() -> None:
    class Broken(LocalService):
        async def until_ready(self) -> None:
            raise ArithmeticError("planted")

    async def work() -> None:
        broken: list[Broken] = []

        def make() -> Broken:
            broken.append(Broken())
            return broken[0]

        with pytest.raises(ArithmeticError, match="planted"):
            await serve(make, ServerConfig(port=0), lambda url: None, asyncio.Event())
        assert broken[0].is_closed

    run(work())


def test_the_media_side_loads_no_torch_and_no_pipeline() -> None:
    source = (
        "import sys, webrtc.serve\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'pipelines', 'decoders')))"
    )
    assert subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=False).returncode == 0
