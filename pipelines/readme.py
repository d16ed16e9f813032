"""Fills README's tables from assets/bench/*.json: `python -m pipelines.readme` (`make readme`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pipelines.bench_avatar import table as bench_table
from rtgen.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent

# measure -> (what it is, digits)
_MEASURES = {
    "jaw_r": ("jaw: correlation of what is seen with what was spoken", 2),
    "lag_ms": ("lag of the lips behind the truth, ms", 0),
    "jaw_std_ratio": ("jaw: amplitude over the truth's", 2),
    "closures": ("lips closed at p, b, m (truth: {closures_truth:.2f})", 2),
    "silence_motion": (
        "jaw motion in silence, per frame (truth {silence_motion_truth:.4f})",
        4,
    ),
    "blinks_per_minute": ("blinks a minute (truth: {blinks_per_minute_truth:.1f})", 1),
    "longest_blink_ms": ("longest blink, ms", 0),
    "yaw_r": ("head yaw: correlation with what the motion controller asked for", 2),
    "join_ratio": ("picture change at unit joins over inside units", 2),
    "backdrop_psnr_last": ("backdrop against the first 2 s, last third of the clip, dB", 1),
    "luma_change": ("mean brightness, last third minus first, of 255", 2),
    "detail_ratio": ("detail of the face, last third over first", 2),
}


def bench_section(document: dict[str, Any]) -> str:
    """Conditions, then the table."""
    features = ", ".join(document["features"]) or "no vector extensions"
    return (
        f"One process per setting, {document['units']} units of 160 ms, {document['cores']} cores "
        f"of {document['cpu']} ({features}), torch {document['torch']}. CPU time of all threads; "
        f"25 frames a second leave 40 ms per frame and core.\n\n{bench_table(document)}"
    )


def eval_section(document: dict[str, Any]) -> str:
    """Measures of the shipped model on held-out voices and sentences."""
    measures = document["measures"]
    probe = document.get("probe_r_on_renders", {})
    rows = ["| measure | value |", "|---|---|"]
    for name, (text, digits) in _MEASURES.items():
        if name in measures:
            rows.append(f"| {text.format(**measures)} | {measures[name]:.{digits}f} |")
    head = (
        f"{document['seconds']:.0f} s of a dialogue in voices and sentences that were held out of "
        f"training, shipped weights, {document['steps']} steps. The pixels are read back by a "
        f"linear probe fitted on rendered frames"
    )
    if probe:
        head += f" (jaw r = {probe['jaw']:.3f} on held-out renders)"
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
        "eval:avatar": eval_section(json.loads((bench / "avatar_eval.json").read_text())),
    }


def main() -> None:
    """Rewrites README.md in place."""
    path = ROOT / "README.md"
    path.write_text(fill(path.read_text(), sections()))


if __name__ == "__main__":
    main()
