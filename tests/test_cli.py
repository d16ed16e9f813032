"""The command line: what each command prints, and one line and status 2 for each error."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rtgen import cli, progress
from rtgen.cli import main
from rtgen.progress import Progress, ProgressLine
from tests.media import decode, disk_of, wav_bytes
from tests.test_audio_reader import bad_files
from tests.toy_pipeline import write_toy_model

RATE = 48000
UNIT = 7680
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"{write_toy_model(tmp_path_factory.mktemp('toy') / 'model')}{os.sep}"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RTGEN_MODEL", "RTGEN_DEVICE", "RTGEN_DTYPE", "RTGEN_LOG"):
        monkeypatch.delenv(name, raising=False)


def words(folder: Path, model: str, /, **flags: object) -> list[str]:
    """A render command; a flag given as None is left out, True stands alone."""
    values: dict[str, object] = {
        "audio": folder / "speech.wav", "out": folder / "talk.mp4", "model": model,
        "device": "cpu", "dtype": "float32",
    }  # fmt: skip
    found = ["render"]
    for name, value in (values | flags).items():
        if value is not None:
            found += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return found


def speech(folder: Path, units: int) -> None:
    noise = np.random.default_rng(0).uniform(-0.3, 0.3, units * UNIT)
    (folder / "speech.wav").write_bytes(wav_bytes(noise, RATE))


def error_of(capfd: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """Runs a command that must fail; returns its message."""
    assert main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("rtgen: error: ")
    assert err.count("\n") == 1, err
    assert err.endswith("\n")
    return err.removeprefix("rtgen: error: ").rstrip("\n")


def test_render_writes_the_video_and_says_so(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    speech(tmp_path, 3)
    monkeypatch.setattr(progress, "LOG_PERIOD_S", 3600.0)
    flags = {"avatar": "bo", "seed": 7, "steps": 1, "state": "listening"}
    assert main(words(tmp_path, model, **flags)) == 0
    out, err = capfd.readouterr()
    assert out.startswith(f"{tmp_path / 'talk.mp4'}: 0.48 s of 32x32 at 25 fps, made in ")
    assert err == ""
    assert len(decode(tmp_path / "talk.mp4")[0]) == 12


def test_force_replaces_an_existing_file(tmp_path: Path, model: str) -> None:
    speech(tmp_path, 1)
    (tmp_path / "talk.mp4").write_bytes(b"older")
    assert main(words(tmp_path, model, force=True)) == 0
    assert len(decode(tmp_path / "talk.mp4")[0]) == 4


def test_the_environment_gives_defaults(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    speech(tmp_path, 1)
    monkeypatch.setenv("RTGEN_MODEL", model)
    monkeypatch.setenv("RTGEN_DEVICE", "cuda:99")
    monkeypatch.setenv("RTGEN_DTYPE", "float32")
    unset = {"device": None, "dtype": None}
    assert "cuda:99" in error_of(capfd, words(tmp_path, model, **unset))
    monkeypatch.setenv("RTGEN_DEVICE", "cpu")
    assert main(words(tmp_path, "", **unset)[:-2]) == 0
    capfd.readouterr()
    monkeypatch.setenv("RTGEN_LOG", "loud")
    assert "RTGEN_LOG must be one of" in error_of(capfd, words(tmp_path, model))


WRONG_WORDS = [
    ([], "arguments are required: command"),
    (["paint"], "invalid choice: 'paint'"),
    (["render"], "--audio, --out"),
    (["render", "--audio", "a.wav", "--out", "b.mp4", "--seed", "x"], "--seed: invalid int"),
    (["render", "--audio", "a.wav", "--out", "b.mp4", "--fast"], "unrecognized arguments: --fast"),
    (["info", "--xml"], "unrecognized arguments: --xml"),
    (["train"], "arguments are required: what"),
    (["train", "nobody"], "invalid choice: 'nobody'"),
    (["bench"], "arguments are required: what"),
    (["eval"], "arguments are required: what"),
]


@pytest.mark.parametrize(("argv", "said"), WRONG_WORDS)
def test_a_wrong_command_line_is_one_line(
    capfd: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    message = error_of(capfd, argv)
    assert said in message
    assert message.endswith("--help`")


WRONG_FLAGS = [
    ({"avatar": "zoe"}, "avatar must be one of ['ada', 'bo'], got 'zoe'"),
    ({"model": "nobody"}, "unknown model 'nobody'; there is:"),
    ({"model": "./nowhere"}, "model './nowhere': no such folder"),
    ({"device": "cuda:99"}, "device cuda:99 is not there"),
    ({"device": "abacus"}, "device must be"),
    ({"dtype": "int3"}, "dtype must be one of"),
    ({"steps": 0}, "num_inference_steps must be at least 1"),
    ({"steps": 9}, "runs with [1, 2] steps, got 9"),
    ({"seed": -1}, "seed must be in"),
    ({"state": "asleep"}, "state must be one of idle, listening, speaking, thinking"),
]


@pytest.mark.parametrize(("flags", "said"), WRONG_FLAGS)
def test_a_wrong_value_is_one_line_and_no_file(
    tmp_path: Path,
    model: str,
    capfd: pytest.CaptureFixture[str],
    flags: dict[str, object],
    said: str,
) -> None:
    speech(tmp_path, 1)
    assert said in error_of(capfd, words(tmp_path, model, **flags))
    assert [path.name for path in tmp_path.iterdir()] == ["speech.wav"]


def test_each_unusable_recording_is_one_line_and_no_file(
    tmp_path: Path, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sounds, videos = tmp_path / "sounds", tmp_path / "videos"
    sounds.mkdir()
    videos.mkdir()
    for name, said in bad_files(sounds).items():
        message = error_of(capfd, words(videos, model, audio=sounds / name))
        assert said in message, (name, message)
    assert list(videos.iterdir()) == []


def test_each_unusable_output_is_one_line_and_leaves_what_was_there(
    tmp_path: Path, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    speech(tmp_path, 1)
    (tmp_path / "old.mp4").write_bytes(b"older")
    for name, said in {
        "old.mp4": "the file exists; choose another name or pass --force",
        "talk.webm": "ends in .mp4",
        "nowhere/talk.mp4": "does not exist; create it",
        ".": "this is a folder",
        "two\nlines.avi": "ends in .mp4",
    }.items():
        assert said in error_of(capfd, words(tmp_path, model, out=tmp_path / name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.mp4", "speech.wav"]
    assert (tmp_path / "old.mp4").read_bytes() == b"older"


def test_output_over_the_input_is_refused(
    tmp_path: Path, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    speech(tmp_path, 1)
    assert main(words(tmp_path, model)) == 0
    before = (tmp_path / "talk.mp4").read_bytes()
    capfd.readouterr()
    again = words(tmp_path, model, audio=tmp_path / "talk.mp4", force=True)
    assert "same file" in error_of(capfd, again)
    assert (tmp_path / "talk.mp4").read_bytes() == before


def test_a_full_disk_is_one_line_and_no_file(
    tmp_path: Path, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    speech(tmp_path, 6)
    with disk_of(4000):
        message = error_of(capfd, words(tmp_path, model))
    assert "cannot be written on (File too large)" in message
    assert [path.name for path in tmp_path.iterdir()] == ["speech.wav"]


def send_signals_at(monkeypatch: pytest.MonkeyPatch, at_s: float, *numbers: int) -> None:
    """Signals this process once, when a render has come that far."""
    left = list(numbers)

    def show(_: ProgressLine, state: Progress) -> None:
        while left and state.done_s >= at_s:
            signal.raise_signal(left.pop(0))

    monkeypatch.setattr(ProgressLine, "show", show)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_keeps_a_playable_file_of_what_was_made(
    tmp_path: Path,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: int,
    status: int,
) -> None:
    speech(tmp_path, 12)
    handler = signal.getsignal(number)
    send_signals_at(monkeypatch, 0.4, number)
    assert main(words(tmp_path, model)) == status
    kept = tmp_path / "talk.partial.mp4"
    assert capfd.readouterr().err == (
        "rtgen: finishing the file; once more stops at once\n"
        f"rtgen: interrupted; the first 0.48 s are in {kept}\n"
    )
    assert len(decode(kept)[0]) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["speech.wav", "talk.partial.mp4"]
    assert signal.getsignal(number) == handler


def test_a_second_ctrl_c_stops_at_once_and_keeps_nothing(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    speech(tmp_path, 12)
    send_signals_at(monkeypatch, 0.4, signal.SIGINT, signal.SIGINT)
    assert main(words(tmp_path, model)) == 130
    assert capfd.readouterr().err.endswith("rtgen: interrupted; nothing was kept\n")
    assert [path.name for path in tmp_path.iterdir()] == ["speech.wav"]


@pytest.mark.slow
def test_ctrl_c_reaches_a_real_process(tmp_path: Path, model: str) -> None:
    speech(tmp_path, 400)
    command = [sys.executable, "-m", "rtgen", *words(tmp_path, model), "--verbose"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = list(itertools.takewhile(lambda line: "rendering" not in line, process.stderr))
        process.send_signal(signal.SIGINT)
        log += process.stderr.readlines()
    assert process.returncode == 130, log
    assert "Traceback" not in "".join(log)
    assert "interrupted; the first" in log[-1]
    assert 4 <= len(decode(tmp_path / "talk.partial.mp4")[0]) < 1600
    assert not list(tmp_path.glob(".rtgen-*"))


def test_info_lists_what_is_here(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capfd.readouterr().out
    for word in ("torch", "cpu", "sdpa", "assets", "model"):
        assert word in text


def test_info_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["devices"][0]["name"] == "cpu"
    assert facts["attention"]["cpu"]["sdpa"] == "yes"
    assert facts["attention"]["cpu"]["varlen"].startswith("no: ")
    assert set(facts) >= {"versions", "assets", "models", "audio"}


def test_help_is_quick_because_it_loads_no_heavy_module() -> None:
    code = (
        "import sys\nfrom rtgen.cli import main\n"
        "for words in (['--help'], ['render', '--help'], ['train', '--help'], ['--version']):\n"
        "    assert main(words) == 0\n"
        "print(sorted({'torch', 'numpy', 'av', 'pipelines'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.endswith("[]\n")
    assert "usage: rtgen render" in out


COMMAND = """
def add_arguments(parser):
    parser.add_argument("--size", type=int, default=3)

def run(arguments):
    print("size", arguments.size)
    return 7
"""


def test_a_mounted_command_gets_its_flags_and_returns_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mounted_command.py").write_text(COMMAND)
    (tmp_path / "command_without_extra.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    group = {"one": ("first", "mounted_command"), "two": ("second", "command_without_extra")}
    monkeypatch.setattr(cli, "GROUPS", {"train": ("make", group)})
    assert main(["train", "one", "--size", "5"]) == 7
    assert capfd.readouterr().out == "size 5\n"
    assert "--size: invalid int" in error_of(capfd, ["train", "one", "--size", "x"])
    assert "needs the module 'no_such_module'" in error_of(capfd, ["train", "two"])


@pytest.mark.parametrize(
    "module", [module for _, members in cli.GROUPS.values() for _, module in members.values()]
)
def test_every_mounted_command_names_a_module_that_is_there(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


def test_a_reader_that_goes_away_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "rtgen", "--help"]
    buffered = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    result = subprocess.run(
        command, cwd=ROOT, env=buffered, stdout=write_end, stderr=subprocess.PIPE, check=False
    )
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, b"")
