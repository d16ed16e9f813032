"""The renderer on the real art: set RTGEN_ART_DIR to a folder that fetch_art has filled."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("moderngl", reason="needs the train extra")
pytest.importorskip("scipy", reason="needs the train extra")
pytest.importorskip("PIL", reason="needs the train extra")

from pipelines.train.art import Art, find_art
from pipelines.train.gl import head_rotation, look_at, make_context, perspective
from pipelines.train.head import HEADS, HeadSpec
from pipelines.train.renderer import HeadRenderer
from rtgen.errors import BackendUnavailable, ConfigError, StreamClosed

SIZE = 128
Mask = NDArray[np.bool_]


@pytest.fixture(scope="module")
def art() -> Art:
    folder = os.environ.get("RTGEN_ART_DIR")
    if not folder:
        pytest.skip("RTGEN_ART_DIR names no folder with the MakeHuman art")
    try:
        make_context().release()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return find_art(Path(folder))


@pytest.fixture(scope="module")
def renderer(art: Art) -> Iterator[HeadRenderer]:
    with HeadRenderer(HEADS["male1"], art, size=SIZE) as made:
        yield made


def change(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> Mask:
    """Returns [H, W]: where two frames differ visibly."""
    distance = np.abs(a.astype(np.int16) - b.astype(np.int16)).max(axis=2)
    mask: Mask = distance > 8
    return mask


def rows_and_columns(mask: Mask) -> tuple[float, float, float, float]:
    """Returns top, bottom, left, right of the marked pixels as shares of the frame."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    height, width = mask.shape
    return rows[0] / height, rows[-1] / height, columns[0] / width, columns[-1] / width


def test_same_call_gives_the_same_bytes(renderer: HeadRenderer) -> None:
    call = ({"jawOpen": 0.3}, (0.1, 0.05, 0.0), (0.1, 0.0), 0.01)
    first = renderer.render(*call)
    renderer.render({"eyeBlinkLeft": 1.0}, (-0.2, 0.0, 0.1))
    again = renderer.render(*call)
    assert first.shape == (SIZE, SIZE, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(first, again)


def test_two_renderers_side_by_side_do_not_disturb_each_other(
    renderer: HeadRenderer, art: Art
) -> None:
    alone = renderer.render({"jawOpen": 0.2})
    with HeadRenderer(HEADS["male1"], art, size=64, samples=1) as other:
        np.testing.assert_array_equal(renderer.render({"jawOpen": 0.2}), alone)
        assert other.render({}).shape == (64, 64, 3)
    np.testing.assert_array_equal(renderer.render({"jawOpen": 0.2}), alone)


def test_jaw_changes_the_lower_face_only_and_darkens_the_mouth(renderer: HeadRenderer) -> None:
    closed, opened = renderer.render({}), renderer.render({"jawOpen": 0.5})
    top, bottom, left, right = rows_and_columns(change(closed, opened))
    assert top > 0.45
    assert bottom < 0.97
    assert left > 0.15
    assert right < 0.85  # the chin shades the shoulder
    mouth = (slice(int(0.70 * SIZE), int(0.76 * SIZE)), slice(int(0.46 * SIZE), int(0.54 * SIZE)))
    assert opened[mouth].mean() < closed[mouth].mean() - 20


def test_open_mouth_shows_white_upper_teeth(renderer: HeadRenderer) -> None:
    frame = renderer.render({"jawOpen": 0.35, "mouthUpperUpLeft": 0.3, "mouthUpperUpRight": 0.3})
    mouth = frame[int(0.66 * SIZE) : int(0.78 * SIZE), int(0.40 * SIZE) : int(0.60 * SIZE)]
    saturation = mouth.max(axis=2).astype(int) - mouth.min(axis=2)
    assert ((mouth.min(axis=2) > 150) & (saturation < 40)).sum() >= 5


def test_blink_changes_the_eyes_only(renderer: HeadRenderer) -> None:
    mask = change(renderer.render({}), renderer.render({"eyeBlinkLeft": 1.0, "eyeBlinkRight": 1.0}))
    top, bottom, left, right = rows_and_columns(mask)
    assert top > 0.33
    assert bottom < 0.56
    assert left > 0.25
    assert right < 0.75
    assert mask.sum() > 30


def test_left_blink_changes_the_image_right_side_only(renderer: HeadRenderer) -> None:
    mask = change(renderer.render({}), renderer.render({"eyeBlinkLeft": 1.0}))
    assert rows_and_columns(mask)[2] > 0.5


def test_gaze_moves_the_iris_to_the_image_right(renderer: HeadRenderer) -> None:
    def iris_column(frame: NDArray[np.uint8]) -> float:
        eye = frame[int(0.42 * SIZE) : int(0.49 * SIZE), int(0.34 * SIZE) : int(0.43 * SIZE)]
        dark = 255.0 - eye.mean(axis=2)
        weight = np.clip(dark - 100.0, 0.0, None).sum(axis=0)
        return float((weight * np.arange(len(weight))).sum() / weight.sum())

    right = iris_column(renderer.render({}, gaze=(0.3, 0.0)))
    left = iris_column(renderer.render({}, gaze=(-0.3, 0.0)))
    assert right > left + 1.0


def test_yaw_moves_the_face_to_the_image_right(renderer: HeadRenderer) -> None:
    def nose_column(frame: NDArray[np.uint8]) -> float:
        lips = frame[int(0.66 * SIZE) : int(0.78 * SIZE)].astype(np.float64)
        redness = np.clip(lips[..., 0] - lips[..., 1] - 75.0, 0.0, None).sum(axis=0)
        return float((redness * np.arange(SIZE)).sum() / redness.sum())

    ahead = nose_column(renderer.render({}))
    right = nose_column(renderer.render({}, (0.25, 0.0, 0.0)))
    left = nose_column(renderer.render({}, (-0.25, 0.0, 0.0)))
    assert left + 5 < ahead < right - 5


def test_breath_moves_the_shirt_but_not_the_face(renderer: HeadRenderer) -> None:
    mask = change(renderer.render({}), renderer.render({}, breath=0.06))
    assert mask[int(0.85 * SIZE) :].any()
    assert not mask[: int(0.68 * SIZE)].any()


def test_backdrop_corners_never_change(renderer: HeadRenderer) -> None:
    corner = SIZE // 12
    frames = [
        renderer.render({"jawOpen": 0.4}, pose, breath=0.02)
        for pose in ((0.0, 0.0, 0.0), (0.4, 0.1, 0.1), (-0.4, -0.2, -0.1))
    ]
    for frame in frames[1:]:
        np.testing.assert_array_equal(frame[:corner, :corner], frames[0][:corner, :corner])
        np.testing.assert_array_equal(frame[:corner, -corner:], frames[0][:corner, -corner:])


def test_hair_leaves_a_margin_above_the_head(renderer: HeadRenderer) -> None:
    tilted = change(renderer.render({}), renderer.render({}, (0.0, 0.0, 0.25)))
    assert rows_and_columns(tilted)[0] > 0.02


def test_region_checks_catch_a_planted_wrong_unit(renderer: HeadRenderer) -> None:
    mask = change(renderer.render({}), renderer.render({"eyeBlinkLeft": 1.0, "jawOpen": 0.5}))
    assert rows_and_columns(mask)[1] > 0.56


def test_unknown_unit_is_refused(renderer: HeadRenderer) -> None:
    with pytest.raises(ConfigError, match="jawOpened"):
        renderer.render({"jawOpened": 0.5})


def test_closed_renderer_takes_no_calls(art: Art) -> None:
    made = HeadRenderer(HEADS["male1"], art, size=32, samples=1)
    made.close()
    made.close()
    with pytest.raises(StreamClosed):
        made.render({})


@pytest.mark.parametrize("wrong", [{"size": 15}, {"samples": 3}])
def test_unsupported_size_or_samples_are_refused(art: Art, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        HeadRenderer(HEADS["male1"], art, **wrong)


def test_missing_art_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="fetch_art"):
        find_art(tmp_path)


def test_ancestry_must_sum_to_one() -> None:
    with pytest.raises(ConfigError, match="sum to 1"):
        HeadSpec(
            gender="male",
            ancestry={"asian": 0.5},
            hair="short02",
            brow="eyebrow001",
            skin="x/y",
            hair_tint=(1.0, 1.0, 1.0),
            brow_tint=(1.0, 1.0, 1.0),
            iris=(1.0, 1.0, 1.0),
            shirt=(1.0, 1.0, 1.0),
        )


def test_rotation_is_orthonormal_and_turns_the_named_way() -> None:
    turn = head_rotation(0.3, -0.2, 0.1)
    np.testing.assert_allclose(turn @ turn.T, np.eye(3), atol=1e-12)
    forward, up = np.array([0.0, 0.0, 1.0]), np.array([0.0, 1.0, 0.0])
    assert (head_rotation(0.2, 0.0, 0.0) @ forward)[0] > 0  # to the image's right
    assert (head_rotation(0.0, 0.2, 0.0) @ forward)[1] < 0  # down
    assert (head_rotation(0.0, 0.0, 0.2) @ up)[0] < 0  # to the image's left


def test_camera_puts_its_target_in_the_middle_of_the_view() -> None:
    eye, target = np.array([0.5, 1.0, 9.0]), np.array([0.1, 0.2, 0.3])
    clip = perspective(0.4, 1.0, 30.0) @ look_at(eye, target) @ np.append(target, 1.0)
    np.testing.assert_allclose(clip[:2] / clip[3], 0.0, atol=1e-12)
    assert -1.0 < clip[2] / clip[3] < 1.0
