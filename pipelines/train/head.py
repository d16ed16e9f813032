"""The synthetic head as geometry: identities, and surfaces posed by 52 ARKit face units.

Units of length are decimetres in the frame of the MakeHuman base mesh: x to the head's left
(image right), y up, z out of the face. All surfaces derive from the base mesh through sparse
matrices (see mesh), so the face units of the base move skin, brows, lashes, teeth and tongue alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from pipelines.train.art import Art
from pipelines.train.mesh import (
    Doubles,
    Floats,
    Ints,
    ObjMesh,
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
from rtgen.errors import ConfigError

EYE_VERTICES = {"left": slice(14598, 14670), "right": slice(14670, 14742)}
"""The base mesh's helper eyeballs, from which the rendered spheres take place and size."""

NECKLINE = -1.26
"""Height of the shirt's neckline over the eyes, dm."""
NECK_SLOPE = 0.42
"""How much lower the neckline lies at the front: dm per dm of depth."""

_UNIT_EPSILON = 1e-4  # displacements below a micrometre do not count as motion
_BODY_DEPTH = 2.2  # how far below the eyes the body is kept, dm
_COLLAR_OFFSET = 0.05  # how far the shirt stands off the skin, dm
_MOUTH_INSET = 0.05  # how far teeth and tongue are set back, so that they never pierce the lips, dm
_BACK_DEPTH = 0.5  # skin this far behind the eyes that faces away is never seen, dm
_BACK_FACING = -0.35  # largest z of its normals
_LID_GAIN = 1.6  # eyelids follow the gaze: units of eyeLookUp/Down per radian


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """One fictitious person.

    Attributes:
        gender: `female` or `male`.
        ancestry: Weights of the base shape's `caucasian`, `asian` and `african` targets; sum 1.
        shape: Further shape targets, `<group>/<name>` -> weight.
        expression: Face units of the resting face, added to those of every pose.
        hair: Hair piece.
        brow: Eyebrow piece.
        lash: Eyelash piece.
        skin: Skin texture, `<folder>/<file>`.
        skin_tint: Linear colour factor of the skin.
        hair_tint: Linear colour factor of the hair.
        brow_tint: Linear colour factor of the brows.
        lash_density: Opacity of the lashes, 0 to 1.
        iris: Linear colour of the iris.
        shirt: Linear colour of the shirt.
        upper_teeth: How far the upper teeth are lowered, so that speech shows them, dm.
        gap: How far the lower teeth are lowered, dm.
    """

    gender: str
    ancestry: Mapping[str, float]
    shape: Mapping[str, float] = field(default_factory=dict)
    expression: Mapping[str, float] = field(default_factory=dict)
    hair: str
    brow: str
    lash: str = "eyelashes02"
    skin: str
    skin_tint: tuple[float, float, float] = (1.0, 1.0, 1.0)
    hair_tint: tuple[float, float, float]
    brow_tint: tuple[float, float, float]
    lash_density: float = 1.0
    iris: tuple[float, float, float]
    shirt: tuple[float, float, float]
    upper_teeth: float = 0.0
    gap: float = 0.0

    def __post_init__(self) -> None:
        if self.gender not in ("female", "male"):
            raise ConfigError(f"gender must be female or male, got {self.gender!r}")
        if abs(sum(self.ancestry.values()) - 1.0) > 1e-6:
            raise ConfigError(f"ancestry weights must sum to 1, got {dict(self.ancestry)}")


HEADS: dict[str, HeadSpec] = {
    "male1": HeadSpec(
        gender="male",
        ancestry={"caucasian": 0.6, "asian": 0.25, "african": 0.15},
        shape={
            "head/head-oval": 0.4,
            "forehead/forehead-scale-vert-decr": 0.5,
            "eyes/l-eye-scale-incr": 0.6,
            "eyes/r-eye-scale-incr": 0.6,
            "eyes/l-eye-height2-incr": 0.35,
            "eyes/r-eye-height2-incr": 0.35,
            "eyebrows/eyebrows-angle-up": 0.5,
            "eyebrows/eyebrows-trans-up": 0.4,
            "nose/nose-scale-horiz-decr": 0.35,
            "mouth/mouth-angles-up": 0.25,
        },
        expression={"jawOpen": -0.03, "mouthSmileLeft": 0.13, "mouthSmileRight": 0.13},
        hair="short01",
        brow="eyebrow001",
        skin="young_caucasian_male/young_lightskinned_male_diffuse",
        hair_tint=(0.072, 0.036, 0.020),
        brow_tint=(0.55, 0.42, 0.34),
        lash_density=0.4,
        iris=(0.15, 0.085, 0.04),
        shirt=(0.028, 0.055, 0.12),
        upper_teeth=0.042,
        gap=0.09,
    ),
    "female1": HeadSpec(
        gender="female",
        ancestry={"caucasian": 0.55, "asian": 0.25, "african": 0.2},
        shape={
            "head/head-oval": 0.5,
            "eyes/l-eye-scale-incr": 0.4,
            "eyes/r-eye-scale-incr": 0.4,
            "eyebrows/eyebrows-angle-up": 0.5,
            "eyebrows/eyebrows-trans-up": 0.4,
            "nose/nose-scale-horiz-decr": 0.3,
            "mouth/mouth-angles-up": 0.25,
        },
        expression={"jawOpen": -0.03, "mouthSmileLeft": 0.15, "mouthSmileRight": 0.15},
        hair="long01",
        brow="eyebrow001",
        skin="young_caucasian_female/young_lightskinned_female_diffuse",
        skin_tint=(0.84, 0.75, 0.69),
        hair_tint=(0.068, 0.031, 0.016),
        brow_tint=(0.60, 0.42, 0.32),
        lash_density=0.7,
        iris=(0.13, 0.08, 0.04),
        shirt=(0.20, 0.035, 0.05),
        upper_teeth=0.035,
        gap=0.09,
    ),
}


class Part:
    """One renderable surface: its resting vertices and how the face units move them.

    Attributes:
        name: What it is.
        uvs: [N, 2] float32.
        triangles: [M, 3] int32.
        rest: [N, 3] float32, positions with no unit active.
        rest_normals: [N, 3] float32.
        is_static: True when no face unit moves it.
    """

    def __init__(
        self, name: str, surface: Surface, base: Doubles, units: Mapping[str, Doubles]
    ) -> None:
        mesh = split_uvs(surface)
        matrix = surface.matrix[mesh.source]
        self.name = name
        self.uvs = mesh.uvs
        self.triangles = mesh.triangles
        self.rest: Floats = surface.positions(base)[mesh.source].astype(np.float32)
        self._source = mesh.source
        self._moves: dict[str, tuple[Ints, Floats]] = {}
        for unit, displacement in units.items():
            moved = np.asarray(matrix @ displacement)
            rows = np.flatnonzero(np.abs(moved).max(axis=1) > _UNIT_EPSILON)
            if rows.size:
                self._moves[unit] = (rows, moved[rows].astype(np.float32))
        self._refresh()

    @property
    def is_static(self) -> bool:
        return not self._moves

    def freeze(self) -> None:
        """Makes the part static: no face unit moves it any more."""
        self._moves = {}

    def keep(self, triangles: NDArray[np.bool_]) -> None:
        """Drops all triangles but the marked ones; the vertices stay."""
        self.triangles = self.triangles[triangles]
        self._refresh()

    def reorder(self, order: Ints) -> None:
        """Puts the triangles in a new drawing order."""
        self.triangles = np.ascontiguousarray(self.triangles[order])
        self._refresh()

    def shift(self, displacement: Floats) -> None:
        """Moves the resting vertices by `[N, 3]` (or one `[3]` for all)."""
        self.rest = (self.rest + displacement).astype(np.float32)
        self._refresh()

    def reach(self, unit: str) -> Floats:
        """Returns [N] float32: how far a unit at weight 1 moves each vertex, dm."""
        distance = np.zeros(len(self.rest), np.float32)
        if unit in self._moves:
            rows, moved = self._moves[unit]
            distance[rows] = np.linalg.norm(moved, axis=1)
        return distance

    def pose(self, weights: Mapping[str, float]) -> tuple[Floats, Floats]:
        """Returns positions and unit normals, both `[N, 3]` float32, under face-unit weights."""
        active = [(unit, weight) for unit, weight in weights.items() if unit in self._moves]
        if not active:
            return self.rest, self.rest_normals
        positions = self.rest.copy()
        for unit, weight in active:
            rows, moved = self._moves[unit]
            positions[rows] += np.float32(weight) * moved
        return positions, vertex_normals(positions, self.triangles, self._incidence)

    def _refresh(self) -> None:
        self._incidence: sp.csr_matrix = corner_incidence(self._source, self.triangles)
        self.rest_normals = vertex_normals(self.rest, self.triangles, self._incidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eyeball:
    """A sphere: centre [3] float32 and radius, dm."""

    centre: Floats
    radius: float


class Head:
    """A person's surfaces at rest and posed.

    Attributes:
        spec: Who it is.
        parts: The surfaces by name: skin, shirt, upper_teeth, lower_teeth, tongue, brow, lash,
            hair.
        eyeballs: Left and right.
        eye_height: y of the eyes, dm: the renderer places camera, neck and light from it.
        units: Names of the 52 face units.
    """

    def __init__(self, spec: HeadSpec, art: Art) -> None:
        self.spec = spec
        mesh = load_obj(art.base_mesh)
        num_vertices = len(mesh.vertices)
        base = mesh.vertices + _shape(spec, art, num_vertices)
        units = {
            path.stem: load_target(path, num_vertices)
            for path in sorted(art.face_units.glob("*.target"))
        }
        self.units = tuple(units)
        unknown = sorted(set(spec.expression) - set(units))
        if unknown:
            raise ConfigError(f"expression names no such face units: {', '.join(unknown)}")
        self.eyeballs = tuple(_eyeball(base[part]) for part in EYE_VERTICES.values())
        self.eye_height = float(self.eyeballs[0].centre[1])
        surfaces = _surfaces(spec, art, mesh, base, self.eye_height)
        self.parts = {name: Part(name, surface, base, units) for name, surface in surfaces.items()}
        self._finish()

    def pose(
        self, weights: Mapping[str, float], gaze: tuple[float, float]
    ) -> dict[str, tuple[Floats, Floats]]:
        """Returns positions and normals, `[N, 3]` float32 each, of every moving part.

        Args:
            weights: Face units, usually in [0, 1]; those left out are 0.
            gaze: (right, up) in rad; the lids follow it.

        Raises:
            ConfigError: If a name is not one of the face units.
        """
        unknown = sorted(set(weights) - set(self.units))
        if unknown:
            raise ConfigError(f"no such face units: {', '.join(unknown)}; see Head.units")
        total = dict(self.spec.expression)
        for unit, weight in weights.items():
            total[unit] = total.get(unit, 0.0) + weight
        lid = "eyeLookUp" if gaze[1] > 0 else "eyeLookDown"
        for side in ("Left", "Right"):
            total[lid + side] = total.get(lid + side, 0.0) + abs(gaze[1]) * _LID_GAIN
        active = {unit: weight for unit, weight in total.items() if abs(weight) > _UNIT_EPSILON}
        return {name: part.pose(active) for name, part in self.parts.items() if not part.is_static}

    def _finish(self) -> None:
        """Freezes what does not move with the face and puts teeth and shirt in place."""
        for name in ("hair", "shirt", "upper_teeth"):
            self.parts[name].freeze()
        shirt = self.parts["shirt"]
        shirt.shift(shirt.rest_normals * np.float32(_COLLAR_OFFSET))
        for name, drop in (
            ("upper_teeth", self.spec.upper_teeth),
            ("lower_teeth", self.spec.gap),
            ("tongue", self.spec.gap),
        ):
            self.parts[name].shift(np.array([0.0, -drop, -_MOUTH_INSET], np.float32))
        self._crop()

    def _crop(self) -> None:
        """Drops shirt above the neckline, skin below it, and skin behind that faces away."""
        for name in ("skin", "shirt"):
            part = self.parts[name]
            corners = part.rest[part.triangles]
            drop = NECK_SLOPE * (corners[..., 2] - 0.2)
            below = self.eye_height + NECKLINE - drop - corners[..., 1]
            if name == "shirt":
                part.keep(below.max(axis=1) > 0.0)
                continue
            behind = self.eyeballs[0].centre[2] - _BACK_DEPTH
            facing = part.rest_normals[part.triangles][..., 2].max(axis=1)
            is_back = (corners[..., 2].max(axis=1) < behind) & (facing < _BACK_FACING)
            part.keep((below.min(axis=1) < 0.2) & ~is_back)


def _shape(spec: HeadSpec, art: Art, num_vertices: int) -> Doubles:
    """Returns the displacement `[num_vertices, 3]` that turns the base mesh into the person."""
    targets = {
        f"macrodetails/{ancestry}-{spec.gender}-young": weight
        for ancestry, weight in spec.ancestry.items()
    }
    targets[f"macrodetails/universal-{spec.gender}-young-averagemuscle-averageweight"] = 1.0
    targets.update(spec.shape)
    total = np.zeros((num_vertices, 3))
    for name, weight in targets.items():
        total += weight * load_target(art.target(name), num_vertices)
    return total


def _eyeball(vertices: Doubles) -> Eyeball:
    low, high = vertices.min(axis=0), vertices.max(axis=0)
    centre = ((low + high) / 2).astype(np.float32)
    return Eyeball(centre=centre, radius=float((high - low).mean() / 2))


def _surfaces(
    spec: HeadSpec, art: Art, mesh: ObjMesh, base: Doubles, eye_height: float
) -> dict[str, Surface]:
    """Returns the person's surfaces by part name, already subdivided."""
    num_vertices = len(base)
    heights = base[mesh.faces][..., 1]
    is_upper_body = heights.min(axis=1) > eye_height - _BODY_DEPTH
    below_chin = heights.max(axis=1) < eye_height - 0.5
    is_torso = (heights.min(axis=1) > eye_height - _BODY_DEPTH - 0.4) & below_chin
    teeth = load_clothes(art.clothes("teeth", "Teeth_Base"), num_vertices)
    upper, lower = _split_teeth(teeth, mesh)
    return {
        "skin": catmull_clark(select_faces(mesh, (mesh.groups == "body") & is_upper_body)),
        "shirt": catmull_clark(select_faces(mesh, (mesh.groups == "helper-tights") & is_torso)),
        "upper_teeth": upper,
        "lower_teeth": lower,
        "tongue": catmull_clark(load_clothes(art.clothes("tongue", "tongue01"), num_vertices)),
        "brow": catmull_clark(load_clothes(art.clothes("eyebrows", spec.brow), num_vertices)),
        "lash": catmull_clark(load_clothes(art.clothes("eyelashes", spec.lash), num_vertices)),
        "hair": load_clothes(art.clothes("hair", spec.hair), num_vertices),
    }


def _split_teeth(teeth: Surface, mesh: ObjMesh) -> tuple[Surface, Surface]:
    """Parts the teeth into upper and lower by the helper teeth that each point hangs on."""
    lower_helper = np.unique(mesh.faces[mesh.groups == "helper-lower-teeth"])
    weight = np.asarray(np.abs(teeth.matrix[:, lower_helper]).sum(axis=1)).ravel()
    is_lower = (weight > 0.5)[teeth.faces].any(axis=1)
    parts = []
    for keep in (~is_lower, is_lower):
        used, inverse = np.unique(teeth.faces[keep], return_inverse=True)
        parts.append(
            Surface(
                matrix=teeth.matrix[used],
                offsets=teeth.offsets[used],
                faces=inverse.reshape(-1, 4),
                face_uvs=teeth.face_uvs[keep],
            )
        )
    return parts[0], parts[1]
