"""Mesh building blocks of the synthetic head: files in, sparse matrices out.

Every step that turns the base mesh into a rendered surface (selecting faces, Catmull-Clark
subdivision, fitting clothes to the body) is linear in the base vertices. Each is therefore kept
as a sparse matrix, and matrices compose: a surface is `matrix @ base + offsets`, and a blendshape
of the base becomes a blendshape of the surface through the same matrix.

Faces are quads `[F, 4]`; a triangle repeats its last corner.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from rtgen.errors import MediaError, ShapeError

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]

_THREEJS_QUAD = 11  # bit 0 quad, bit 1 material, bit 3 one uv per corner
_THREEJS_STRIDE = 10  # the type, 4 corners, the material, 4 uv indices


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjMesh:
    """A Wavefront mesh whose faces are quads.

    Attributes:
        vertices: [V, 3] float64.
        faces: [F, 4] vertex indices.
        face_uvs: [F, 4, 2] float64, texture coordinates of each corner.
        groups: [F] the name of each face's group.
    """

    vertices: Doubles
    faces: Ints
    face_uvs: Doubles
    groups: NDArray[np.str_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """A quad surface that is a linear map of the base vertices.

    Attributes:
        matrix: [P, V] sparse, from base vertices to surface points.
        offsets: [P, 3] float64, added after the map.
        faces: [F, 4] point indices.
        face_uvs: [F, 4, 2] float64.
    """

    matrix: sp.csr_matrix
    offsets: Doubles
    faces: Ints
    face_uvs: Doubles

    def positions(self, vertices: Doubles) -> Doubles:
        """Returns the surface points `[P, 3]` for base vertices `[V, 3]`."""
        return np.asarray(self.matrix @ vertices) + self.offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class TriangleMesh:
    """Triangles whose vertices are split where texture coordinates differ.

    Attributes:
        source: [N] index of the surface point behind each split vertex.
        uvs: [N, 2] float32.
        triangles: [M, 3] int32 indices of split vertices.
    """

    source: Ints
    uvs: Floats
    triangles: NDArray[np.int32]


def load_obj(path: Path) -> ObjMesh:
    """Reads the vertices, texture coordinates, quads and group names of an .obj file.

    Raises:
        MediaError: If the file holds no faces or a face is not a triangle or quad.
    """
    vertices: list[list[float]] = []
    uvs: list[list[float]] = []
    corners: list[list[tuple[int, int]]] = []
    groups: list[str] = []
    group = ""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        kind, *fields = line.split() or [""]
        if kind == "v":
            vertices.append([float(field) for field in fields[:3]])
        elif kind == "vt":
            uvs.append([float(field) for field in fields[:2]])
        elif kind == "g":
            group = fields[0] if fields else ""
        elif kind == "f":
            if len(fields) not in (3, 4):
                raise MediaError(f"{path}: expected triangles or quads, got {len(fields)} corners")
            parts = [field.split("/") for field in fields]
            face = [(int(p[0]) - 1, int(p[1]) - 1 if len(p) > 1 and p[1] else 0) for p in parts]
            corners.append(face if len(face) == 4 else [*face, face[-1]])
            groups.append(group)
    if not corners:
        raise MediaError(f"{path}: expected a mesh with faces, got none; fetch the art again")
    table = np.array(corners, np.int64)
    texture = np.array(uvs or [[0.0, 0.0]], np.float64)
    return ObjMesh(
        vertices=np.array(vertices, np.float64),
        faces=table[..., 0],
        face_uvs=texture[table[..., 1]],
        groups=np.array(groups),
    )


def load_target(path: Path, num_vertices: int) -> Doubles:
    """Reads a MakeHuman morph target as dense displacements `[num_vertices, 3]`.

    Args:
        path: A .target or .target.gz file: lines of `index dx dy dz`, `#` for comments.
        num_vertices: Vertices of the base mesh.

    Raises:
        ShapeError: If the file names a vertex that the base mesh does not have.
    """
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8", "replace")
    rows = [
        fields
        for line in text.splitlines()
        if len(fields := line.split()) == 4 and not fields[0].startswith("#")
    ]
    displacement = np.zeros((num_vertices, 3))
    if not rows:
        return displacement
    indices = np.array([int(row[0]) for row in rows])
    if indices.max() >= num_vertices:
        raise ShapeError(f"{path}: vertex {indices.max()} of a mesh of {num_vertices} vertices")
    displacement[indices] = np.array([[float(field) for field in row[1:]] for row in rows])
    return displacement


def load_clothes(path: Path, num_vertices: int) -> Surface:
    """Reads clothes (hair, brows, teeth ...) fitted to the base mesh from a three.js JSON file.

    Each point is a weighted sum of three base vertices plus an offset; the weights need not lie
    in [0, 1] but sum to one, so that clothes follow a translation of the body.

    Args:
        path: A three.js format-3 file with `ref_vIdxs`, `weights` and `offsets` beside it.
        num_vertices: Vertices of the base mesh.

    Raises:
        MediaError: If a face is not a textured quad or a point's weights do not sum to one.
    """
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    table = np.array(document["faces"], np.int64)
    if table.size % _THREEJS_STRIDE or np.any(table[::_THREEJS_STRIDE] != _THREEJS_QUAD):
        raise MediaError(f"{path}: expected textured quads (type {_THREEJS_QUAD}) only")
    table = table.reshape(-1, _THREEJS_STRIDE)
    uvs = np.array(document["uvs"][0], np.float64).reshape(-1, 2)
    references = np.array(document["ref_vIdxs"], np.int64)
    weights = np.array(document["weights"], np.float64)
    if np.abs(weights.sum(axis=1) - 1.0).max() > 1e-3:
        raise MediaError(f"{path}: expected fitting weights that sum to one in each point")
    return Surface(
        matrix=fitting_matrix(references, weights, num_vertices),
        offsets=np.array(document["offsets"], np.float64),
        faces=table[:, 1:5],
        face_uvs=uvs[table[:, 6:10]],
    )


def fitting_matrix(references: Ints, weights: Doubles, num_vertices: int) -> sp.csr_matrix:
    """Returns the sparse map `[P, num_vertices]` of points tied to three base vertices each.

    Args:
        references: [P, 3] base vertex indices.
        weights: [P, 3] their weights.
        num_vertices: Vertices of the base mesh.

    Raises:
        ShapeError: If a reference lies outside the base mesh.
    """
    if references.min() < 0 or references.max() >= num_vertices:
        raise ShapeError(f"references must lie in [0, {num_vertices}), got {references.max()}")
    rows = np.repeat(np.arange(len(references)), references.shape[1])
    shape = (len(references), num_vertices)
    return sp.csr_matrix((weights.ravel(), (rows, references.ravel())), shape=shape)


def select_faces(mesh: ObjMesh, keep: NDArray[np.bool_]) -> Surface:
    """Returns the part of a mesh that the kept faces use, as a surface without stray points."""
    faces = mesh.faces[keep]
    used, inverse = np.unique(faces, return_inverse=True)
    ones = np.ones(len(used))
    shape = (len(used), len(mesh.vertices))
    return Surface(
        matrix=sp.csr_matrix((ones, (np.arange(len(used)), used)), shape=shape),
        offsets=np.zeros((len(used), 3)),
        faces=inverse.reshape(faces.shape),
        face_uvs=mesh.face_uvs[keep],
    )


def catmull_clark(surface: Surface) -> Surface:
    """Returns the surface after one Catmull-Clark step (Catmull and Clark, 1978).

    With n faces around an inner vertex v, face points F and edge midpoints R, the vertex moves to
    `(mean(F) + 2 mean(R) + (n - 3) v) / n`; a border vertex moves to `3/4 v + 1/8 (a + b)` of its
    two border neighbours. Texture coordinates are subdivided linearly.
    """
    faces, num_points = surface.faces, surface.matrix.shape[0]
    num_faces = len(faces)
    starts, ends = faces, np.roll(faces, -1, axis=1)
    real = starts != ends  # the closing corner of a triangle makes an edge of length zero
    low, high = np.minimum(starts, ends), np.maximum(starts, ends)
    edges, edge_index = np.unique(low.ravel() * num_points + high.ravel(), return_inverse=True)
    edge_index = edge_index.reshape(faces.shape)
    ends_of_edge = np.stack([edges // num_points, edges % num_points], axis=1)
    num_edges = len(edges)
    uses = np.bincount(edge_index[real], minlength=num_edges)

    face_rows = np.broadcast_to(np.arange(num_faces)[:, None], faces.shape)[real]
    corner = sp.csr_matrix(
        (np.ones(len(face_rows)), (face_rows, starts[real])), shape=(num_faces, num_points)
    )
    face_points = _mean_rows(corner)
    edge_rows = np.repeat(np.arange(num_edges), 2)
    endpoint = sp.csr_matrix(
        (np.full(2 * num_edges, 0.5), (edge_rows, ends_of_edge.ravel())),
        shape=(num_edges, num_points),
    )
    edge_faces = _mean_rows(
        sp.csr_matrix(
            (np.ones(len(face_rows)), (edge_index[real], face_rows)), shape=(num_edges, num_faces)
        )
    )
    inner = uses == 2
    edge_points = sp.diags(np.where(inner, 0.5, 1.0)) @ endpoint + sp.diags(
        np.where(inner, 0.5, 0.0)
    ) @ (edge_faces @ face_points)
    vertex_points = _vertex_rule(corner, face_points, endpoint, ends_of_edge, uses)

    step = sp.vstack([vertex_points, edge_points, face_points]).tocsr()
    edge_ids = num_points + edge_index
    centre_ids = num_points + num_edges + np.arange(num_faces)
    corner_uvs = surface.face_uvs
    next_uvs = (corner_uvs + np.roll(corner_uvs, -1, axis=1)) / 2
    centre_uvs = corner_uvs.mean(axis=1)
    new_faces, new_uvs = [], []
    for k in range(4):
        new_faces.append(
            np.stack([faces[:, k], edge_ids[:, k], centre_ids, edge_ids[:, (k - 1) % 4]], axis=1)
        )
        new_uvs.append(
            np.stack(
                [corner_uvs[:, k], next_uvs[:, k], centre_uvs, next_uvs[:, (k - 1) % 4]], axis=1
            )
        )
    return Surface(
        matrix=(step @ surface.matrix).tocsr(),
        offsets=np.asarray(step @ surface.offsets),
        faces=np.concatenate(new_faces),
        face_uvs=np.concatenate(new_uvs),
    )


def _mean_rows(incidence: sp.csr_matrix) -> sp.csr_matrix:
    """Scales each row of a non-negative matrix to sum to one; empty rows stay empty."""
    sums = np.asarray(incidence.sum(axis=1)).ravel()
    return sp.diags(1.0 / np.maximum(sums, 1e-12)) @ incidence


def _vertex_rule(
    corner: sp.csr_matrix,
    face_points: sp.csr_matrix,
    endpoint: sp.csr_matrix,
    ends_of_edge: Ints,
    uses: Ints,
) -> sp.csr_matrix:
    """Returns the [P, P] map of old vertices to their moved places (see catmull_clark)."""
    num_points = corner.shape[1]
    valence = np.asarray(corner.sum(axis=0)).ravel()
    real = ends_of_edge[:, 0] != ends_of_edge[:, 1]
    mean_faces = _mean_rows(corner.T.tocsr()) @ face_points
    touching = (endpoint > 0).astype(np.float64).T.tocsr() @ sp.diags(real.astype(np.float64))
    mean_midpoints = _mean_rows(touching) @ endpoint
    border_edges = ends_of_edge[real & (uses == 1)]
    rows = np.concatenate([border_edges[:, 0], border_edges[:, 1]])
    columns = np.concatenate([border_edges[:, 1], border_edges[:, 0]])
    neighbours = _mean_rows(
        sp.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(num_points, num_points))
    )
    is_border = np.bincount(rows, minlength=num_points) > 0
    is_loose = valence == 0
    is_inner = ~is_border & ~is_loose
    n = np.maximum(valence, 1.0)
    inner = sp.diags(is_inner / n) @ (mean_faces + 2.0 * mean_midpoints) + sp.diags(
        is_inner * (n - 3.0) / n
    )
    border = sp.diags(is_border * 0.75) + sp.diags(is_border * 0.25) @ neighbours
    return inner + border + sp.diags(is_loose.astype(np.float64))


def split_uvs(surface: Surface) -> TriangleMesh:
    """Returns triangles over vertices that are unique in (point, texture coordinate)."""
    corners = surface.faces.reshape(-1)
    uvs = np.round(surface.face_uvs.reshape(-1, 2), 5)
    keys = np.column_stack([corners.astype(np.float64), uvs])
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    quads = inverse.reshape(-1, 4)
    source = unique[:, 0].astype(np.int64)
    triangles = np.concatenate([quads[:, [0, 1, 2]], quads[:, [0, 2, 3]]])
    a, b, c = source[triangles].T
    triangles = triangles[(a != b) & (b != c) & (a != c)]
    return TriangleMesh(
        source=source, uvs=unique[:, 1:].astype(np.float32), triangles=triangles.astype(np.int32)
    )


def corner_incidence(source: Ints, triangles: NDArray[np.int32]) -> sp.csr_matrix:
    """Returns the [N, M] float32 map that sums triangle vectors at each split vertex.

    Vertices that were split from one point share its triangles, so that no seam shows.
    """
    num_points, num_triangles = int(source.max()) + 1, len(triangles)
    points = source[triangles]
    columns = np.repeat(np.arange(num_triangles), 3)
    sums = sp.csr_matrix(
        (np.ones(3 * num_triangles, np.float32), (points.ravel(), columns)),
        shape=(num_points, num_triangles),
    )
    return sums[source]


def vertex_normals(
    positions: Floats, triangles: NDArray[np.int32], incidence: sp.csr_matrix
) -> Floats:
    """Returns unit normals `[N, 3]`: the area-weighted mean over the triangles at each vertex.

    Args:
        positions: [N, 3] float32.
        triangles: [M, 3] indices.
        incidence: [N, M] from corner_incidence.
    """
    a, b, c = (positions[triangles[:, k]] for k in range(3))
    u, v = b - a, c - a
    area = np.empty_like(u)  # the cross product, written out: np.cross copies several times
    area[:, 0] = u[:, 1] * v[:, 2] - u[:, 2] * v[:, 1]
    area[:, 1] = u[:, 2] * v[:, 0] - u[:, 0] * v[:, 2]
    area[:, 2] = u[:, 0] * v[:, 1] - u[:, 1] * v[:, 0]
    normals = np.asarray(incidence @ area)
    normals /= np.sqrt(np.einsum("ij,ij->i", normals, normals))[:, None] + 1e-12
    return normals
