"""The command line: `rtgen render | serve | info | bench | train | eval`.

The one module that joins the packages, and only by name: a command is a "module:function" string
that is looked up when it runs, so that `--help` imports no torch. `bench`, `train` and `eval` name
modules that offer `add_arguments(parser)` and `run(arguments) -> int`.

Exit status: 0 done; 2 an error of the input, told in one line on stderr; 130 interrupted by
Ctrl-C (143 by SIGTERM); 1 with a traceback is a fault of the program.

Environment: RTGEN_DEVICE, RTGEN_DTYPE, RTGEN_MODEL and RTGEN_TOKEN are defaults of the flags of
that name, RTGEN_LOG is the log level (debug, info, warning, error).
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rtgen import __version__
from rtgen.errors import BackendUnavailable, ConfigError, RtgenError

__all__ = ["main"]

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
LOG_LEVELS = ("debug", "info", "warning", "error")

# group -> (help, {command: (help, module)})
GROUPS: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "bench": (
        "measure speed and memory",
        {
            "avatar": ("stages of the talking face on this machine", "pipelines.bench_avatar"),
            "decoders": ("frame decoders on random latents", "pipelines.bench_decoders"),
            "engine": ("sessions that one denoiser serves on time", "pipelines.bench_engine"),
        },
    ),
    "train": (
        "make the avatar's data and train its networks",
        {
            "art": ("fetch the art of the synthetic head", "pipelines.train.art"),
            "data": ("render the synthetic training clips", "pipelines.train.dataset"),
            "autoencoder": ("train the frame autoencoder", "pipelines.train.autoencoder"),
            "renderer": ("train the latent renderer", "pipelines.train.latent_renderer"),
            "lips": ("train the lips that follow the sound", "pipelines.train.lips"),
            "denoiser": ("train the causal denoiser", "pipelines.train.denoiser"),
            "decoder": ("train the decoder of one identity", "pipelines.train.decoder"),
            "export": ("put the parts together as a model folder", "pipelines.train.export"),
        },
    ),
    "eval": (
        "measure the quality of a trained model",
        {"avatar": ("does the mouth follow the voice", "pipelines.evaluate")},
    ),
}


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line like every other error: one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status of the process.

    Args:
        argv: the words after the program's name, or None for those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Waiting OpenMP threads that spin take the core from the other lanes.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of our output has gone; keep the interpreter from flushing into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _run(words: Sequence[str]) -> int:
    try:
        arguments = _build_parser(words).parse_args(words)
        _configure_logging(arguments.verbose)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except RtgenError as error:
        print(f"rtgen: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("rtgen: interrupted; nothing was kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as request:  # --help and --version
        return request.code if isinstance(request.code, int) else 0


def _build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Builds the parser; of the mounted modules only the one that `words` ask for is imported."""
    parser = _Parser(
        prog="rtgen",
        description="A face that talks, generated in real time.",
        epilog="Environment: RTGEN_DEVICE, RTGEN_DTYPE, RTGEN_MODEL (defaults of the flags), "
        "RTGEN_LOG (debug, info, warning or error).",
    )
    parser.add_argument("--version", action="version", version=f"rtgen {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True, parser_class=_Parser)
    _add_render(commands)
    _add_serve(commands)
    _add_info(commands)
    for group, (text, members) in GROUPS.items():
        inner = commands.add_parser(group, help=text, description=text).add_subparsers(
            metavar="what", required=True, parser_class=_Parser
        )
        for name, (summary, module) in members.items():
            leaf = inner.add_parser(name, help=summary, description=summary)
            _add_verbose(leaf)
            if list(words[:2]) == [group, name]:
                _look_up(f"{module}:add_arguments")(leaf)
                leaf.set_defaults(run=_look_up(f"{module}:run"))
    return parser


def _look_up(name: str) -> Callable[..., Any]:
    """Returns what "module:function" names.

    Raises:
        BackendUnavailable: the module, or one that it needs, is not installed.
    """
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"this command needs the module {error.name!r}, which is not installed here; "
            "install rtgen with its extras (pip install 'rtgen[train]') or from a checkout"
        ) from error
    return found


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-v", "--verbose", action="count", default=0, help="log more to stderr; twice: everything"
    )


def _configure_logging(verbose: int) -> None:
    name = os.environ.get("RTGEN_LOG", "warning").lower()
    if name not in LOG_LEVELS:
        raise ConfigError(f"RTGEN_LOG must be one of {', '.join(LOG_LEVELS)}, got {name!r}")
    level = {0: getattr(logging, name.upper()), 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def _add_render(commands: Any) -> None:
    text = "make a video of a face that speaks a recording"
    parser: argparse.ArgumentParser = commands.add_parser(
        "render",
        help=text,
        description=text + ". Ctrl-C keeps what was made as NAME.partial.mp4, a second one stops "
        "at once and keeps nothing.",
    )
    add = parser.add_argument
    add("--audio", required=True, metavar="FILE", help="the speech: any sound or video file")
    add("--out", required=True, metavar="FILE.mp4", help="the video to write")
    add("--force", action="store_true", help="replace an existing file, once the new one is whole")
    add("--model", default=os.environ.get("RTGEN_MODEL"), help="name or folder; see `rtgen info`")
    add("--avatar", help="whose face; default: the model's first; see `rtgen info`")
    add("--seed", type=int, default=0, help="of noise and motion; default 0")
    add("--steps", type=int, help="denoising steps per unit; default: the model's")
    add("--state", default="idle", help="while nobody speaks: idle, listening or thinking")
    _add_device(parser)
    _add_verbose(parser)
    parser.set_defaults(run=_run_render)


def _add_device(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--device",
        default=os.environ.get("RTGEN_DEVICE", "auto"),
        help="auto, cpu, cuda or cuda:N; default auto: the first GPU, else the CPU",
    )
    add(
        "--dtype",
        default=os.environ.get("RTGEN_DTYPE", "auto"),
        help="auto, float32, bfloat16 or float16; default auto: the faster one here",
    )


def _run_render(arguments: argparse.Namespace) -> int:
    from rtgen.progress import ProgressLine, StopOnSignal

    config = _look_up("pipelines.render:RenderConfig")(
        audio=arguments.audio,
        out=arguments.out,
        overwrite=arguments.force,
        model=arguments.model,
        avatar=arguments.avatar,
        seed=arguments.seed,
        num_inference_steps=arguments.steps,
        state=arguments.state,
        device=arguments.device,
        dtype=arguments.dtype,
    )
    with _look_up("pipelines.render:RenderJob")(config) as job:
        line = ProgressLine(sys.stderr)
        # Until here there was nothing to keep, and Ctrl-C ended the program as ever.
        with StopOnSignal() as stop:
            report = job.run(on_progress=line.show, stop=stop)
    line.end()
    if report.is_partial:
        kept = f"the first {report.duration_s:.2f} s are in {report.path}"
        print(f"rtgen: interrupted; {kept if report.path else 'nothing was kept'}", file=sys.stderr)
        return 128 + stop.signal_number
    print(
        f"{report.path}: {report.duration_s:.2f} s of {report.width}x{report.height} "
        f"at {float(report.fps):g} fps, made in {report.wall_s:.1f} s "
        f"({report.real_time_factor:.2f}x real time)"
    )
    return 0


def _add_serve(commands: Any) -> None:
    text = "serve the live avatar to browsers, by WebRTC"
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help=text,
        description=text + ". Prints the address of its page when it is ready. Only this machine "
        "reaches it unless --host says otherwise. Ctrl-C or SIGTERM ends it.",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1")
    add("--port", type=int, default=8080, help="default 8080; 0: any free one")
    add("--model", default=os.environ.get("RTGEN_MODEL"), help="name or folder; see `rtgen info`")
    add("--max-sessions", type=int, default=1, help="people at a time; default 1")
    add("--token", default=os.environ.get("RTGEN_TOKEN"), help="that every request must carry")
    add("--tls-cert", metavar="PEM", help="certificate; browsers give the microphone of another")
    add("--tls-key", metavar="PEM", help="machine's visitors to HTTPS pages only")
    add("--cors-origin", action="append", default=[], help="whose pages may use it too; repeat")
    add("--ice-server", action="append", default=[], metavar="URL", help="stun: or turn:; repeat")
    add("--ice-username", help="of the turn: servers")
    add("--ice-credential", help="of the turn: servers")
    add(
        "--media-address",
        action="append",
        default=[],
        metavar="IP",
        help="address for media; repeat; default: that of --host",
    )
    _add_device(parser)
    _add_verbose(parser)
    parser.set_defaults(run=_run_serve)


def _run_serve(arguments: argparse.Namespace) -> int:
    import asyncio
    from pathlib import Path

    from rtgen.assets import default_model, find_asset, list_assets, model_facts
    from rtgen.engine.host import HostConfig, RemoteService

    serve, make_config = _look_up("webrtc.serve:serve"), _look_up("webrtc.config:ServerConfig")
    folder = find_asset("model", arguments.model or default_model())
    facts = model_facts(folder)
    ice_server = _look_up("webrtc.config:IceServer")
    servers = [
        ice_server(
            urls=(url,),
            username=arguments.ice_username if url.startswith("turn") else None,
            credential=arguments.ice_credential if url.startswith("turn") else None,
        )
        for url in arguments.ice_server
    ]
    config = make_config(
        host=arguments.host,
        port=arguments.port,
        token=arguments.token,
        tls_cert=Path(arguments.tls_cert) if arguments.tls_cert else None,
        tls_key=Path(arguments.tls_key) if arguments.tls_key else None,
        cors_origins=tuple(arguments.cors_origin),
        ice_servers=tuple(servers),
        media_addresses=tuple(arguments.media_address),
        max_sessions=arguments.max_sessions,
        model=facts["name"],
        avatars=tuple(facts.get("avatars", ())),
        steps=tuple(sorted(facts.get("steps", ()))),
        default_steps=facts.get("default_steps"),
        samples=tuple(find_asset("audio", name) for name in list_assets("audio")),
    )
    host = HostConfig(
        factory="pipelines.serving:avatar_pipeline",
        arguments={
            "folder": str(folder),
            "device": arguments.device,
            "dtype": arguments.dtype,
        },
        max_sessions=arguments.max_sessions,
    )
    _look_up("webrtc.logs:use_json_logs")()
    print("rtgen: the model is warming up ...", file=sys.stderr)
    asyncio.run(
        serve(
            lambda: RemoteService(host),
            config,
            lambda url: print(f"rtgen: ready at {url}", flush=True),
        )
    )
    return 0


def _add_info(commands: Any) -> None:
    text = "list devices, models, avatars, attention backends and versions"
    parser: argparse.ArgumentParser = commands.add_parser("info", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="as one JSON document")
    _add_verbose(parser)
    parser.set_defaults(run=_run_info)


def _run_info(arguments: argparse.Namespace) -> int:
    info = _look_up("rtgen.info:collect")()
    print(json.dumps(info, indent=2) if arguments.json else _look_up("rtgen.info:as_text")(info))
    return 0
