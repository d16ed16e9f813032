"""Renders a synthetic head to uint8 frames with OpenGL, headless, on a GPU or on plain CPU cores.

One frame is three passes: depth from the key light, colour on a grid of samples finer than the
pixels, and their mean. On a software rasteriser a plain finer grid costs less than multisampling.
Each material has its own small program, because a software rasteriser runs both sides of every
branch. Opaque surfaces are drawn front to back, hair first, so that early depth tests skip what is
hidden; brows, lashes and the thin ends of the hair are blended last. Vertices are sent again only
where the face moves them.

The same call on the same machine gives the same bytes.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Self

import moderngl
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipelines.train.art import Art
from pipelines.train.gl import (
    DeviceMesh,
    brightness_gain,
    eyeball_array,
    head_rotation,
    load_texture,
    look_at,
    make_context,
    make_program,
    orthographic,
    perspective,
    read_shader,
    set_uniforms,
    sphere_directions,
)
from pipelines.train.head import NECK_SLOPE, NECKLINE, Head, HeadSpec
from pipelines.train.mesh import Doubles, Floats
from rtgen.errors import ConfigError, StreamClosed

Frame = NDArray[np.uint8]

_HAIR_CUTOFF = 0.6  # opacity from which hair is drawn as solid
_SHADOW_SIZE = 512
_LIGHT = np.array([-0.4402, 0.4992, 0.7463])  # direction of the key light; KEY in lighting.glsl
_OPEN_JAW = 0.5  # jawOpen at which the second occlusion is baked
_OCCLUSION_SIZE = 512
_STRANDS = 220.0  # hairs across the width of the hair texture
_MATERIALS = {
    "skin": "skin",
    "shirt": "cloth",
    "upper_teeth": "mouth",
    "lower_teeth": "mouth",
    "tongue": "mouth",
    "brow": "fringe",
    "lash": "fringe",
    "hair": "hair",
    "eye": "eye",
}
_SCREENS = ("backdrop", "backdrop_copy", "downsample")
_TEETH_TINT = (1.5, 1.45, 1.36)
_TONGUE_TINT = (0.50, 0.24, 0.24)
_LASH_TINT = (0.10, 0.08, 0.08)


class HeadRenderer:
    """Draws one person, framed from the hair to the collar, on a fixed backdrop.

    Owns an OpenGL context: use it from the thread that made it, and close it.

    Attributes:
        size: Width and height of the frames, pixels.
        head: The geometry.
    """

    def __init__(self, spec: HeadSpec, art: Art, size: int = 256, samples: int = 4) -> None:
        """Loads the art and prepares the context.

        Args:
            spec: Who to draw.
            art: From find_art.
            size: Width and height of the frames, pixels.
            samples: Shaded samples a pixel: 1, 4, 9 or 16, on a square grid.

        Raises:
            BackendUnavailable: If no headless OpenGL context can be made.
            ConfigError: If the size or the number of samples is not supported.
        """
        if size < 16 or size % 2:
            raise ConfigError(f"size must be even and at least 16, got {size}")
        if samples not in (1, 4, 9, 16):
            raise ConfigError(f"samples must be 1, 4, 9 or 16, got {samples}")
        self.size = size
        self.head = Head(spec, art)
        self._closed = False
        self._context = make_context()
        with self._context:
            self._place()
            self._build_programs()
            self._build_targets(samples)
            self._build_textures(spec, art)
            self._build_meshes()
            self._bake_backdrop()
            self._bake_occlusion()

    def render(
        self,
        weights: Mapping[str, float],
        pose: tuple[float, float, float] = (0.0, 0.0, 0.0),
        gaze: tuple[float, float] = (0.0, 0.0),
        breath: float = 0.0,
    ) -> Frame:
        """Returns one frame.

        Args:
            weights: ARKit face units, usually in [0, 1]; those left out are 0.
            pose: Yaw (to the image's right), pitch (down), roll of the head, rad.
            gaze: Right and up, seen in the image, relative to the head, rad.
            breath: Lift of the chest, dm; 0.01 is a calm breath.

        Returns:
            uint8 [size, size, 3].

        Raises:
            ConfigError: If a weight names no face unit.
            StreamClosed: If the renderer is closed.
        """
        if self._closed:
            raise StreamClosed("this HeadRenderer is closed; make a new one")
        with self._context:
            posed = self.head.pose(weights, gaze)
            for name, (positions, normals) in posed.items():
                self._meshes[name].update(positions, normals)
            self._set_motion(weights, pose, gaze, breath)
            self._context.enable_only(moderngl.DEPTH_TEST)
            self._draw_depth(self._shadow_target, self._light_projection)
            self._draw_colour()
            self._resolved.use()
            self._context.enable_only(moderngl.NOTHING)
            self._fine.use(0)
            self._screens["downsample"].render(moderngl.TRIANGLE_STRIP)
            pixels = np.frombuffer(self._resolved.read(components=3), np.uint8)
        return np.ascontiguousarray(pixels.reshape(self.size, self.size, 3)[::-1])

    def close(self) -> None:
        """Frees the context; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._context.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set_motion(
        self,
        weights: Mapping[str, float],
        pose: tuple[float, float, float],
        gaze: tuple[float, float],
        breath: float,
    ) -> None:
        jaw = weights.get("jawOpen", 0.0) + self.head.spec.expression.get("jawOpen", 0.0)
        forward = math.cos(gaze[0]) * math.cos(gaze[1])
        direction = np.array([math.sin(gaze[0]), math.sin(gaze[1]), forward])
        self._set(
            rotation=head_rotation(*pose),
            breath=np.array([0.0, breath, breath * 0.5]),
            openness=min(max(jaw / _OPEN_JAW, 0.0), 1.0),
            gaze=direction / np.linalg.norm(direction),
        )

    def _place(self) -> None:
        """Puts camera, light, neck and mouth in relation to the eyes."""
        eye = self.head.eye_height
        self._camera = np.array([0.0, eye - 0.05, 9.4])
        target = np.array([0.0, eye - 0.16, 0.4])
        self._projection = perspective(math.radians(20.0), 1.0, 30.0) @ look_at(
            self._camera, target
        )
        focus = np.array([0.0, eye - 0.3, 0.4])
        self._light_projection = orthographic(1.75, 20.0) @ look_at(focus + _LIGHT * 9.0, focus)
        skin = self.head.parts["skin"]
        self._lips_front = float(skin.rest[skin.reach("mouthPucker") > 0.05, 2].max()) - 0.12

    def _build_programs(self) -> None:
        lighting, vertex = read_shader("lighting"), read_shader("surface_vertex")
        screen = read_shader("screen_vertex")
        context = self._context
        self._programs = {
            name: make_program(context, vertex, lighting + read_shader(name))
            for name in sorted(set(_MATERIALS.values()))
        }
        depth = read_shader("depth_vertex")
        self._programs["depth"] = make_program(context, depth, read_shader("depth"))
        self._programs["depth_cutout"] = make_program(context, depth, read_shader("depth_cutout"))
        for name in _SCREENS:
            self._programs[name] = make_program(context, screen, read_shader(name))
        eye = self.head.eye_height
        self._set(
            view_projection=self._projection,
            light_projection=self._light_projection,
            camera=self._camera,
            pivot=np.array([0.0, eye - 0.98, 0.15]),
            neck=np.array([eye - 1.38, eye - 0.68]),
            rigid=0.0,
            rotation=np.eye(3),
            breath=np.zeros(3),
            openness=0.0,
            neckline=eye + NECKLINE,
            neck_slope=NECK_SLOPE,
            lips_front=self._lips_front,
            strands=_STRANDS,
            colour=0,
            masks=1,
            shadow_map=2,
        )

    def _build_targets(self, samples: int) -> None:
        context, size = self._context, (self.size, self.size)
        grid = math.isqrt(samples)
        fine = (self.size * grid, self.size * grid)
        self._fine = context.texture(fine, 4)
        self._target = context.framebuffer([self._fine], context.depth_renderbuffer(fine))
        self._set(("downsample",), grid=grid)
        self._resolved = context.framebuffer([context.renderbuffer(size, 4)])
        self._shadow = context.depth_texture((_SHADOW_SIZE, _SHADOW_SIZE))
        self._shadow.compare_func = "<="
        self._shadow_target = context.framebuffer(depth_attachment=self._shadow)

    def _build_textures(self, spec: HeadSpec, art: Art) -> None:
        teeth = art.clothes_texture("teeth", "Teeth_Base")
        white = Image.new("RGBA", (4, 4), (255, 255, 255, 255))
        self._textures = {
            "skin": load_texture(self._context, Image.open(art.skin(spec.skin))),
            "upper_teeth": load_texture(self._context, Image.open(teeth)),
            "lower_teeth": load_texture(self._context, Image.open(teeth)),
            "tongue": load_texture(
                self._context, Image.open(art.clothes_texture("tongue", "tongue01"))
            ),
            "brow": load_texture(
                self._context, Image.open(art.clothes_texture("eyebrows", spec.brow))
            ),
            "lash": load_texture(
                self._context, Image.open(art.clothes_texture("eyelashes", spec.lash))
            ),
            "hair": load_texture(self._context, Image.open(art.clothes_texture("hair", spec.hair))),
            "shirt": load_texture(self._context, white),
            "eye": load_texture(self._context, white),
        }
        self._set(("hair",), gain=brightness_gain(art.clothes_texture("hair", spec.hair)))
        bands = [
            Image.open(art.mask(name)).convert("L").resize((1024, 1024), Image.Resampling.BILINEAR)
            for name in ("lips", "inside-mouth")
        ]
        empty = Image.new("L", (1024, 1024))
        self._masks = load_texture(self._context, Image.merge("RGBA", [*bands, empty, empty]))
        self._tints = {
            "skin": spec.skin_tint,
            "shirt": spec.shirt,
            "upper_teeth": _TEETH_TINT,
            "lower_teeth": _TEETH_TINT,
            "tongue": _TONGUE_TINT,
            "brow": spec.brow_tint,
            "lash": _LASH_TINT,
            "hair": spec.hair_tint,
            "eye": spec.iris,
        }

    def _build_meshes(self) -> None:
        hair = self.head.parts["hair"]
        centres = hair.rest[hair.triangles].mean(axis=1)
        hair.reorder(np.argsort(np.linalg.norm(centres - self._camera, axis=1), kind="stable"))
        self._meshes = {
            name: DeviceMesh(
                self._context,
                part,
                self._programs[_MATERIALS[name]],
                self._programs[_depth_program(name)],
            )
            for name, part in self.head.parts.items()
        }
        self._eyes = [
            (eyeball_array(self._context, self._programs["eye"], ball), ball)
            for ball in self.head.eyeballs
        ]
        corners = np.array([-1, -1, 1, -1, -1, 1, 1, 1], np.float32)
        buffer = self._context.buffer(corners.tobytes())
        self._screens = {
            name: self._context.vertex_array(self._programs[name], [(buffer, "2f", "in_corner")])
            for name in _SCREENS
        }

    def _bake_backdrop(self) -> None:
        size = (self.size, self.size)
        self._backdrop = self._context.texture(size, 4)
        self._backdrop.repeat_x = self._backdrop.repeat_y = False
        self._context.framebuffer([self._backdrop]).use()
        self._context.enable_only(moderngl.NOTHING)
        self._screens["backdrop"].render(moderngl.TRIANGLE_STRIP)

    def _bake_occlusion(self, num_directions: int = 64) -> None:
        """Bakes how much sky each vertex sees, with the mouth closed and with it open."""
        for column, jaw in enumerate((0.0, _OPEN_JAW)):
            posed = self.head.pose({"jawOpen": jaw}, (0.0, 0.0))
            for name, part in self.head.parts.items():
                self._meshes[name].update(*posed.get(name, (part.rest, part.rest_normals)))
            seen = self._sky_seen(posed, num_directions)
            for name, amount in seen.items():
                self._meshes[name].set_occlusion(column, amount)
        for name, part in self.head.parts.items():
            self._meshes[name].update(part.rest, part.rest_normals)

    def _sky_seen(
        self, posed: Mapping[str, tuple[Floats, Floats]], num_directions: int
    ) -> dict[str, Floats]:
        """Returns the cosine-weighted share of open directions `[N]` of every part."""
        size = _OCCLUSION_SIZE
        texture = self._context.depth_texture((size, size))
        target = self._context.framebuffer(depth_attachment=texture)
        parts = {n: posed.get(n, (p.rest, p.rest_normals)) for n, p in self.head.parts.items()}
        open_sum = {name: np.zeros(len(p[0])) for name, p in parts.items()}
        full_sum = {name: np.full(len(p[0]), 1e-6) for name, p in parts.items()}
        focus = np.array([0.0, self.head.eye_height - 0.4, 0.4])
        self._context.enable_only(moderngl.DEPTH_TEST)
        for direction in sphere_directions(num_directions):
            matrix = orthographic(2.2, 20.0) @ look_at(focus + direction * 10.0, focus)
            self._draw_depth(target, matrix)
            nearest = np.frombuffer(texture.read(), np.float32).reshape(size, size)
            for name, (positions, normals) in parts.items():
                lifted = (positions + normals * 0.02) @ matrix[:3, :3].T + matrix[:3, 3]
                place = (lifted[:, :2].T * 0.5 + 0.5) * size
                column, row = np.clip(place, 0, size - 1).astype(np.int64)
                cosine = np.clip(normals @ direction, 0.0, None)
                is_open = lifted[:, 2] * 0.5 + 0.5 < nearest[row, column] + 0.002
                open_sum[name] += cosine * is_open
                full_sum[name] += cosine
        target.release()
        texture.release()
        self._set(light_projection=self._light_projection)
        return {name: (open_sum[name] / full_sum[name]).astype(np.float32) for name in parts}

    def _draw_depth(self, target: moderngl.Framebuffer, matrix: Doubles) -> None:
        self._set(("depth", "depth_cutout"), light_projection=matrix)
        target.use()
        target.clear(depth=1.0)
        for name in ("skin", "hair"):  # the shirt shades nothing in view
            self._textures[name].use(0)
            self._set((_depth_program(name),), rigid=float(name == "hair"))
            self._meshes[name].depth.render()

    def _draw_colour(self) -> None:
        context = self._context
        self._target.use()
        self._target.clear(depth=1.0)
        self._masks.use(1)
        self._shadow.use(2)
        self._draw("hair", rigid=1.0, cutoff=_HAIR_CUTOFF)
        context.enable(moderngl.CULL_FACE)
        self._draw("skin")
        context.disable(moderngl.CULL_FACE)
        for name in ("upper_teeth", "lower_teeth"):
            self._draw(name, wetness=0.9, gums=1.0)
        self._draw("tongue", wetness=0.4, gums=0.0)
        for array, ball in self._eyes:
            self._textures["eye"].use(0)
            self._set(("eye",), centre=ball.centre, tint=np.array(self._tints["eye"]), rigid=1.0)
            array.render()
        self._draw("shirt")
        self._backdrop.use(0)
        self._screens["backdrop_copy"].render(moderngl.TRIANGLE_STRIP)
        context.enable(moderngl.BLEND)
        context.blend_func = moderngl.SRC_ALPHA, moderngl.ONE_MINUS_SRC_ALPHA
        self._target.depth_mask = False
        self._draw("brow", density=1.0)
        self._draw("lash", density=self.head.spec.lash_density)
        self._draw("hair", rigid=1.0, cutoff=1.0 / 255.0)
        self._target.depth_mask = True
        context.disable(moderngl.BLEND)

    def _draw(self, name: str, **uniforms: float) -> None:
        self._textures[name].use(0)
        tint = np.array(self._tints[name])
        self._set((_MATERIALS[name],), tint=tint, **uniforms)
        self._meshes[name].colour.render()

    def _set(
        self, programs: Iterable[str] | None = None, **uniforms: float | Doubles | Floats
    ) -> None:
        """Sets uniforms in the named programs (all by default) that have them."""
        for name in programs if programs is not None else self._programs:
            set_uniforms(self._programs[name], uniforms)


def _depth_program(part: str) -> str:
    return "depth_cutout" if part == "hair" else "depth"
