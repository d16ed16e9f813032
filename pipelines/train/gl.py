"""OpenGL building blocks of the head renderer: context, programs, vertex buffers, matrices.

Matrices act on column vectors and are float64; their transposes, in float32, go to the device.
"""

import math
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import moderngl
import numpy as np
from PIL import Image

from pipelines.train.head import Eyeball, Part
from pipelines.train.mesh import Doubles, Floats
from rtgen.errors import BackendUnavailable

_VERTEX_FORMAT = "3f 3f 2f 2f 3f"
_VERTEX_NAMES = ("in_position", "in_normal", "in_uv", "in_occlusion", "in_tangent")
_POSITION, _NORMAL, _UV = slice(0, 3), slice(3, 6), slice(6, 8)
_OCCLUSION, _TANGENT = slice(8, 10), slice(10, 13)
_ROW = 13  # floats a vertex


class DeviceMesh:
    """A part on the device: one interleaved vertex buffer, drawn in colour and in depth.

    Args:
        context: Where the buffers live.
        part: The surface; it starts in its resting pose.
        colour_program: The program of its material.
        depth_program: The program of the shadow pass.
    """

    def __init__(
        self,
        context: moderngl.Context,
        part: Part,
        colour_program: moderngl.Program,
        depth_program: moderngl.Program,
    ) -> None:
        self._rows = np.zeros((len(part.rest), _ROW), np.float32)
        self._rows[:, _UV] = part.uvs
        self._rows[:, _OCCLUSION] = 1.0
        self._rows[:, _TANGENT] = card_tangents(part)
        self._buffer = context.buffer(reserve=self._rows.nbytes, dynamic=True)
        indices = context.buffer(np.ascontiguousarray(part.triangles, np.int32).tobytes())
        self.colour = vertex_array(context, colour_program, self._buffer, indices)
        self.depth = vertex_array(context, depth_program, self._buffer, indices)
        self.update(part.rest, part.rest_normals)

    def update(self, positions: Floats, normals: Floats) -> None:
        """Sends new positions and normals, both `[N, 3]` float32, to the device."""
        self._rows[:, _POSITION] = positions
        self._rows[:, _NORMAL] = normals
        self._buffer.write(self._rows)

    def set_occlusion(self, column: int, amount: Floats) -> None:
        """Stores the share of sky `[N]` seen with the mouth closed (0) or open (1).

        The device has it after the next update.
        """
        self._rows[:, _OCCLUSION.start + column] = amount


def make_context() -> moderngl.Context:
    """Returns a headless OpenGL context.

    Raises:
        BackendUnavailable: If the machine offers none.
    """
    settings: dict[str, Any] = {"backend": "egl"}
    try:
        return moderngl.create_context(standalone=True, **settings)
    except Exception as error:  # glcontext raises no narrower class
        raise BackendUnavailable(
            f"no headless OpenGL context ({error}); on Debian install libegl1 and libgl1-mesa-dri"
        ) from error


def read_shader(name: str) -> str:
    """Returns the text of a shader of this package."""
    return (resources.files("pipelines.train") / "shaders" / f"{name}.glsl").read_text("utf-8")


def make_program(context: moderngl.Context, vertex: str, fragment: str) -> moderngl.Program:
    """Compiles a vertex and a fragment shader, both without their version line."""
    header = "#version 330\n"
    return context.program(vertex_shader=header + vertex, fragment_shader=header + fragment)


def set_uniforms(program: moderngl.Program, values: Mapping[str, float | Doubles | Floats]) -> None:
    """Sets those uniforms that the program has; matrices are transposed on the way."""
    for name, value in values.items():
        member = program.get(name, None)
        if not isinstance(member, moderngl.Uniform):
            continue
        if isinstance(value, np.ndarray):
            member.write(np.ascontiguousarray(value.T, np.float32).tobytes())
        else:
            member.value = value


def load_texture(context: moderngl.Context, image: Image.Image) -> moderngl.Texture:
    """Returns a mipmapped RGBA texture with v pointing up."""
    flipped = image.convert("RGBA").transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    texture = context.texture(flipped.size, 4, flipped.tobytes())
    texture.build_mipmaps()
    return texture


def brightness_gain(path: Path) -> float:
    """Returns the factor that brings a texture's opaque part to a mean brightness of 0.8."""
    texels = np.asarray(Image.open(path).convert("RGBA"), np.float64) / 255.0
    opaque = texels[texels[..., 3] > 0.5]
    return float(0.8 / (opaque[:, :3] @ np.array([0.35, 0.45, 0.20])).mean())


def vertex_array(
    context: moderngl.Context,
    program: moderngl.Program,
    buffer: moderngl.Buffer,
    indices: moderngl.Buffer,
) -> moderngl.VertexArray:
    """Binds the interleaved buffer to those attributes that the program reads."""
    formats, names = [], []
    for item, name in zip(_VERTEX_FORMAT.split(), _VERTEX_NAMES, strict=True):
        if name in program:
            formats.append(item)
            names.append(name)
        else:
            formats.append(f"{4 * int(item[0])}x")
    return context.vertex_array(program, [(buffer, " ".join(formats), *names)], indices)


def eyeball_array(
    context: moderngl.Context, program: moderngl.Program, ball: Eyeball
) -> moderngl.VertexArray:
    """Returns the front of an eyeball as 16 rings of 24 vertices."""
    rings, steps = 16, 24
    polar = np.linspace(0.0, math.pi * 0.55, rings + 1)
    turn = np.arange(steps) * 2.0 * math.pi / steps
    circle = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    across = np.sin(polar)[:, None, None] * circle[None]
    along = np.broadcast_to(np.cos(polar)[:, None, None], (rings + 1, steps, 1))
    normals = np.concatenate([across, along], axis=2).reshape(-1, 3)
    rows = np.zeros((len(normals), _ROW), np.float32)
    rows[:, _POSITION] = normals * ball.radius + ball.centre
    rows[:, _NORMAL] = normals
    rows[:, _OCCLUSION] = 1.0
    index = np.arange((rings + 1) * steps).reshape(rings + 1, steps)
    a, b = index[:-1], index[1:]
    c, d = np.roll(b, -1, axis=1), np.roll(a, -1, axis=1)
    triangles = np.stack([a, b, c, a, c, d], axis=2).reshape(-1, 3)
    buffer = context.buffer(rows.tobytes())
    indices = context.buffer(triangles.astype(np.int32).tobytes())
    return vertex_array(context, program, buffer, indices)


def card_tangents(part: Part) -> Floats:
    """Returns unit vectors `[N, 3]` along growing v, the way hair cards run."""
    corners, uvs = part.rest[part.triangles], part.uvs[part.triangles]
    first, second = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    du, dv = np.moveaxis(uvs[:, 1:] - uvs[:, :1], 2, 0)  # [M, 2] each
    sign = np.sign(du[:, 0] * dv[:, 1] - du[:, 1] * dv[:, 0])[:, None]
    along = (second * du[:, :1] - first * du[:, 1:]) * sign
    total = np.zeros_like(part.rest)
    np.add.at(total, part.triangles.ravel(), np.repeat(along, 3, axis=0))
    unit: Floats = total / (np.linalg.norm(total, axis=1, keepdims=True) + 1e-12)
    return unit


def sphere_directions(count: int) -> Iterator[Doubles]:
    """Yields unit vectors spread evenly over the sphere along a golden spiral."""
    golden = math.pi * (3.0 - math.sqrt(5.0))
    for index in range(count):
        y = 1.0 - 2.0 * (index + 0.5) / count
        radius = math.sqrt(1.0 - y * y)
        angle = golden * index
        yield np.array([radius * math.cos(angle), y, radius * math.sin(angle)])


def head_rotation(yaw: float, pitch: float, roll: float) -> Doubles:
    """Returns the head's turn `[3, 3]`: roll first, then pitch, then yaw, in rad.

    Positive yaw turns the face to the image's right, pitch turns it down, roll tips the top of
    the head to the image's left.
    """
    cy, sy = math.cos(yaw), math.sin(yaw)
    cp, sp = math.cos(pitch), math.sin(pitch)
    cr, sr = math.cos(roll), math.sin(roll)
    about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    about_x = np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])
    about_z = np.array([[cr, -sr, 0], [sr, cr, 0], [0, 0, 1]])
    return about_y @ about_x @ about_z


def perspective(field_of_view: float, near: float, far: float) -> Doubles:
    """Returns OpenGL's perspective matrix of a square view; the angle of view in rad."""
    scale = 1.0 / math.tan(field_of_view / 2.0)
    depth, shift = (far + near) / (near - far), 2.0 * far * near / (near - far)
    return np.array([[scale, 0, 0, 0], [0, scale, 0, 0], [0, 0, depth, shift], [0, 0, -1, 0]])


def orthographic(half: float, depth: float) -> Doubles:
    """Returns the projection of a box, twice half wide and high, from 0 to depth ahead."""
    scale = 1.0 / half
    return np.array(
        [[scale, 0, 0, 0], [0, scale, 0, 0], [0, 0, -2.0 / depth, -1.0], [0, 0, 0, 1.0]]
    )


def look_at(eye: Doubles, target: Doubles) -> Doubles:
    """Returns the view matrix from an eye towards a target, y up where that is possible."""
    forward = (target - eye) / np.linalg.norm(target - eye)
    up = np.array([1.0, 0.0, 0.0] if abs(forward[1]) > 0.98 else [0.0, 1.0, 0.0])
    side = np.cross(forward, up)
    side /= np.linalg.norm(side)
    matrix = np.eye(4)
    matrix[:3, :3] = np.stack([side, np.cross(side, forward), -forward])
    matrix[:3, 3] = -matrix[:3, :3] @ eye
    return matrix
