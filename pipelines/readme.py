"""Fills README's tables from assets/bench/*.json: `python -m pipelines.readme` (`make readme`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pipelines.bench_avatar import table as bench_table
from pipelines.bench_decoders import table as decoder_table
from pipelines.bench_engine import table as engine_table
from rtgen.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def bench_section(document: dict[str, Any]) -> str:
    """Conditions, then the table."""
    features = ", ".join(document["features"]) or "no vector extensions"
    return (
        f"One process per setting, {document['units']} units of 160 ms, {document['cores']} cores "
        f"of {document['cpu']} ({features}), torch {document['torch']}. CPU time of all threads; "
        f"25 frames a second leave 40 ms per frame and core.\n\n{bench_table(document)}"
    )


def eval_section(document: dict[str, Any]) -> str:
    """Measures of the shipped model on held-out voices and sentences, with their targets."""
    words = {True: "yes", False: "**no**", None: "not told by this run"}
    rows = ["| measure | value | target | met |", "|---|---|---|---|"]
    rows += [
        f"| {row['measure']} | {row['value']} | {row['target']} | {words[row['passed']]} |"
        for row in document["rows"]
    ]
    head = (
        f"{document['seeds']} x {document['seconds']:.0f} s of dialogue in voices and sentences "
        f"that were held out of training, shipped weights, avatar {document['avatar']}, "
        f"{document['steps']} steps. Every row compares the model with the exact labels of the "
        f"same scene painted by the same decoder, both read by a small convolutional probe fitted "
        f"on rendered and painted frames; its own errors are in the result file. The yardstick "
        f"for lips is a network that regresses the mouth from the same sound"
    )
    tail = ""
    quality = document.get("autoencoder", {})
    tail = ""
    if quality:
        tail = (
            f"\n\nAutoencoder on held-out renders: {quality['psnr']:.1f} dB, face crop "
            f"{quality['psnr_face']:.1f} dB, motion gain inside units "
            f"{quality['motion_gain']:.2f}, ratio at unit joins {quality['join_ratio']:.2f}."
        )
    return f"{head}.\n\n" + "\n".join(rows) + tail


def fill(text: str, sections: dict[str, str]) -> str:
    """README with every marked section replaced.

    Args:
        text: holds `<!-- name -->` ... `<!-- /name -->` for each section.
        sections: by name.

    Raises:
        ConfigError: a section has no place.
    """
    for name, content in sections.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ConfigError(f"README has no section marked <!-- {name} -->")
        text = pattern.sub(lambda found, c=content: f"{found[1]}{c}\n{found[2]}", text)  # type: ignore[misc]
    return text


def sections(root: Path = ROOT) -> dict[str, str]:
    """What the result files say, by section."""
    bench = root / "assets" / "bench"
    return {
        "bench:avatar": bench_section(json.loads((bench / "avatar.json").read_text())),
        "bench:decoders": decoder_table(json.loads((bench / "decoders.json").read_text())),
        "bench:engine": engine_table(json.loads((bench / "engine.json").read_text())),
        "eval:avatar": eval_section(json.loads((bench / "avatar_eval.json").read_text())),
    }


def main() -> None:
    """Rewrites README.md in place."""
    path = ROOT / "README.md"
    path.write_text(fill(path.read_text(), sections()))


if __name__ == "__main__":
    main()
