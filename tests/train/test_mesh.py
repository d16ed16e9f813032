import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs the train extra")

import scipy.sparse as sp

from pipelines.train.mesh import (
    Surface,
    catmull_clark,
    corner_incidence,
    load_clothes,
    load_obj,
    load_target,
    select_faces,
    split_uvs,
    vertex_normals,
)
from rtgen.errors import MediaError, ShapeError

CUBE = """\
v -1 -1 -1
v 1 -1 -1
v 1 1 -1
v -1 1 -1
v -1 -1 1
v 1 -1 1
v 1 1 1
v -1 1 1
vt 0 0
vt 1 0
vt 1 1
vt 0 1
g cube
f 4/1 3/2 2/3 1/4
f 5/1 6/2 7/3 8/4
f 1/1 2/2 6/3 5/4
f 3/1 4/2 8/3 7/4
f 1/1 5/2 8/3 4/4
f 2/1 3/2 7/3 6/4
"""
GRID = """\
v 0 0 0
v 1 0 0
v 2 0 0
v 0 1 0
v 1 1 0
v 2 1 0
g left
f 1 2 5 4
g right
f 2 3 6 5
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def cube(folder: Path) -> tuple[Surface, np.ndarray]:
    mesh = load_obj(write(folder, "cube.obj", CUBE))
    return select_faces(mesh, mesh.groups == "cube"), mesh.vertices


def slow_catmull_clark(vertices: np.ndarray, faces: np.ndarray) -> dict[str, np.ndarray]:
    """The rules of a closed quad mesh, one vertex, edge and face at a time."""
    centres = np.array([vertices[face].mean(axis=0) for face in faces])
    touching: dict[tuple[int, int], list[int]] = {}
    for index, face in enumerate(faces):
        for k in range(4):
            edge = tuple(sorted((int(face[k]), int(face[(k + 1) % 4]))))
            touching.setdefault((edge[0], edge[1]), []).append(index)
    edges = [
        (vertices[a] + vertices[b] + centres[pair].sum(axis=0)) / 4
        for (a, b), pair in sorted(touching.items())
    ]
    moved = []
    for index, vertex in enumerate(vertices):
        around = centres[[index in face for face in faces]]
        middles = np.array(
            [(vertices[a] + vertices[b]) / 2 for a, b in touching if index in (a, b)]
        )
        n = len(around)
        moved.append((around.mean(axis=0) + 2 * middles.mean(axis=0) + (n - 3) * vertex) / n)
    return {"vertices": np.array(moved), "edges": np.array(edges), "faces": centres}


def test_subdivided_cube_has_the_points_worked_out_by_hand(tmp_path: Path) -> None:
    surface, vertices = cube(tmp_path)
    points = catmull_clark(surface).positions(vertices)
    # A corner of valence 3: (F + 2 R) / 3 with F = (1/3, 1/3, 1/3) and R = (2/3, 2/3, 2/3).
    corner = (1 / 3 + 2 * 2 / 3) / 3
    np.testing.assert_allclose(points[:8], np.sign(vertices) * corner)
    # An edge point: the mean of two ends and two face centres, (1, 1, 0) -> (3/4, 3/4, 0).
    edges = np.sort(np.abs(points[8:20]), axis=1)
    np.testing.assert_allclose(edges, np.broadcast_to([0.0, 0.75, 0.75], (12, 3)), atol=1e-12)
    np.testing.assert_allclose(np.sort(np.abs(points[20:]), axis=1)[:, 2], 1.0)


def test_subdivision_equals_the_slow_rules_on_a_bent_cube(tmp_path: Path) -> None:
    surface, vertices = cube(tmp_path)
    bent = vertices + np.random.default_rng(3).normal(size=vertices.shape) * 0.3
    points = catmull_clark(surface).positions(bent)
    expected = slow_catmull_clark(bent, surface.faces)
    np.testing.assert_allclose(points, np.concatenate(list(expected.values())))


def test_slow_rules_reject_a_planted_wrong_weight(tmp_path: Path) -> None:
    surface, vertices = cube(tmp_path)
    fine = catmull_clark(surface)
    wrong = fine.matrix.tolil()
    wrong[0, 1] += 0.01
    planted = dataclasses.replace(fine, matrix=wrong.tocsr())
    expected = np.concatenate(list(slow_catmull_clark(vertices, surface.faces).values()))
    assert np.abs(fine.positions(vertices) - expected).max() < 1e-9
    assert np.abs(planted.positions(vertices) - expected).max() > 1e-3


def test_subdivision_weights_sum_to_one_on_closed_and_open_meshes(tmp_path: Path) -> None:
    grid = load_obj(write(tmp_path, "grid.obj", GRID))
    for surface in (cube(tmp_path)[0], select_faces(grid, np.ones(2, bool))):
        twice = catmull_clark(catmull_clark(surface))
        np.testing.assert_allclose(np.asarray(twice.matrix.sum(axis=1)).ravel(), 1.0)
        assert len(twice.faces) == 16 * len(surface.faces)


def test_subdivided_border_follows_the_border_alone(tmp_path: Path) -> None:
    mesh = load_obj(write(tmp_path, "grid.obj", GRID))
    points = catmull_clark(select_faces(mesh, np.ones(2, bool))).positions(mesh.vertices)
    # Vertex 1 lies on the lower border between 0 and 2; vertex 0 between 1 and 3.
    np.testing.assert_allclose(points[1], [1.0, 0.0, 0.0])
    np.testing.assert_allclose(points[0], 0.75 * mesh.vertices[0] + [0.125, 0.125, 0.0])


def test_subdivided_triangle_has_three_quads_of_full_area(tmp_path: Path) -> None:
    text = "v 0 0 0\nv 3 0 0\nv 0 3 0\ng t\nf 1 2 3\n"
    mesh = load_obj(write(tmp_path, "triangle.obj", text))
    fine = catmull_clark(select_faces(mesh, np.ones(1, bool)))
    points = fine.positions(mesh.vertices)
    centre = points[-1]
    np.testing.assert_allclose(centre, [1.0, 1.0, 0.0])
    np.testing.assert_allclose(np.asarray(fine.matrix.sum(axis=1)).ravel(), 1.0)


def test_split_vertices_are_unique_in_point_and_uv(tmp_path: Path) -> None:
    surface, vertices = cube(tmp_path)
    mesh = split_uvs(surface)
    rows = np.column_stack([mesh.source, mesh.uvs])
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert len(mesh.triangles) == 12
    corners = {
        (point, *uv)
        for face, uvs in zip(surface.faces, surface.face_uvs, strict=True)
        for point, uv in zip(face.tolist(), uvs.tolist(), strict=True)
    }
    assert {tuple(row) for row in rows.tolist()} == corners


def test_normals_equal_the_area_weighted_sum_and_ignore_uv_seams(tmp_path: Path) -> None:
    surface, vertices = cube(tmp_path)
    mesh = split_uvs(surface)
    bent = (vertices + np.random.default_rng(5).normal(size=vertices.shape) * 0.2)[mesh.source]
    positions = bent.astype(np.float32)
    incidence = corner_incidence(mesh.source, mesh.triangles)
    normals = vertex_normals(positions, mesh.triangles, incidence)
    for index, normal in enumerate(normals):
        total = np.zeros(3)
        for triangle in mesh.triangles:
            if mesh.source[index] in mesh.source[triangle]:
                a, b, c = bent[triangle]
                total += np.cross(b - a, c - a)
        np.testing.assert_allclose(normal, total / np.linalg.norm(total), atol=1e-5)


def test_normals_of_a_cube_point_outwards(tmp_path: Path) -> None:
    surface, vertices = cube(tmp_path)
    mesh = split_uvs(catmull_clark(surface))
    fine = catmull_clark(surface).positions(vertices)[mesh.source].astype(np.float32)
    normals = vertex_normals(fine, mesh.triangles, corner_incidence(mesh.source, mesh.triangles))
    assert (np.einsum("ij,ij->i", normals, fine) > 0).all()


def test_target_reads_plain_and_compressed_files_alike(tmp_path: Path) -> None:
    text = "# comment\n1 0.5 0 0\n3 0 -1 2\n"
    plain = load_target(write(tmp_path, "a.target", text), 4)
    packed = tmp_path / "a.target.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    np.testing.assert_array_equal(plain, load_target(packed, 4))
    np.testing.assert_array_equal(plain, [[0, 0, 0], [0.5, 0, 0], [0, 0, 0], [0, -1, 2]])


def test_target_of_another_mesh_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="vertex 7 of a mesh of 4"):
        load_target(write(tmp_path, "a.target", "7 1 1 1\n"), 4)


def clothes(folder: Path, **changes: object) -> Path:
    document: dict[str, object] = {
        "faces": [11, 0, 1, 2, 3, 0, 0, 1, 2, 3],
        "uvs": [[0, 0, 1, 0, 1, 1, 0, 1]],
        "ref_vIdxs": [[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]],
        "weights": [[0.2, 0.3, 0.5], [1.2, -0.1, -0.1], [0.4, 0.3, 0.3], [1, 0, 0]],
        "offsets": [[0, 0, 0.1], [0, 0, 0], [0, 0.2, 0], [0, 0, 0]],
    }
    return write(folder, "clothes.json", json.dumps(document | changes))


def test_clothes_equal_the_weighted_sum_of_three_points_and_move_along(tmp_path: Path) -> None:
    base = np.random.default_rng(1).normal(size=(4, 3))
    surface = load_clothes(clothes(tmp_path), 4)
    points = surface.positions(base)
    np.testing.assert_allclose(
        points[1], 1.2 * base[1] - 0.1 * base[2] - 0.1 * base[3] + [0.0, 0.0, 0.0]
    )
    np.testing.assert_allclose(points[0], base[:3].T @ [0.2, 0.3, 0.5] + [0.0, 0.0, 0.1])
    shift = np.array([1.0, -2.0, 3.0])
    np.testing.assert_allclose(surface.positions(base + shift), points + shift)


def test_clothes_with_a_planted_wrong_weight_are_refused(tmp_path: Path) -> None:
    wrong = [[0.2, 0.3, 0.6], [1, 0, 0], [1, 0, 0], [1, 0, 0]]
    with pytest.raises(MediaError, match="sum to one"):
        load_clothes(clothes(tmp_path, weights=wrong), 4)


def test_clothes_of_another_body_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"\[0, 3\)"):
        load_clothes(clothes(tmp_path), 3)


def test_select_faces_keeps_only_the_points_in_use(tmp_path: Path) -> None:
    mesh = load_obj(write(tmp_path, "grid.obj", GRID))
    right = select_faces(mesh, mesh.groups == "right")
    np.testing.assert_array_equal(right.positions(mesh.vertices)[:, 0].min(), 1.0)
    assert right.matrix.shape == (4, 6)
    assert sp.issparse(right.matrix)


def test_mesh_without_faces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="expected a mesh with faces"):
        load_obj(write(tmp_path, "empty.obj", "v 0 0 0\n"))
