class DeviceMesh:
    """A part on the device: one interleaved vertex buffer, drawn in colour and in depth."""

    def __init__(
        self, context: moderngl.Context, programs: Mapping[str, moderngl.Program], part: Part
    ) -> None:
        self._rows = np.zeros((len(part.rest), 13), np.float32)
        self._rows[:, 6:8] = part.uvs
        self._rows[:, 8:10] = 1.0
        self._rows[:, 10:13] = card_tangents(part)
        self._buffer = context.buffer(reserve=self._rows.nbytes, dynamic=True)
        indices = context.buffer(np.ascontiguousarray(part.triangles, np.int32).tobytes())
        program = programs[_MATERIALS[part.name]]
        self.colour = vertex_array(context, program, self._buffer, indices)
        depth = programs["depth_cutout" if part.name == "hair" else "depth"]
        self.depth = vertex_array(context, depth, self._buffer, indices)
        self.update(part.rest, part.rest_normals)

    def update(self, positions: Floats, normals: Floats) -> None:
        self._rows[:, 0:3] = positions
        self._rows[:, 3:6] = normals
        self._buffer.write(self._rows)

    def set_occlusion(self, column: int, amount: Floats) -> None:
        self._rows[:, 8 + column] = amount


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


def card_tangents(part: Part) -> Floats:
    """Returns unit vectors `[N, 3]` along growing v, the way the hair cards run."""
    corners, uvs = part.rest[part.triangles], part.uvs[part.triangles]
    first, second = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    du, dv = np.moveaxis(uvs[:, 1:] - uvs[:, :1], 2, 0)  # [M, 2] each
    sign = np.sign(du[:, 0] * dv[:, 1] - du[:, 1] * dv[:, 0])[:, None]
    along = (second * du[:, :1] - first * du[:, 1:]) * sign
    total = np.zeros_like(part.rest)
    np.add.at(total, part.triangles.ravel(), np.repeat(along, 3, axis=0))
    return total / (np.linalg.norm(total, axis=1, keepdims=True) + 1e-12)


def eyeball_array(
    context: moderngl.Context, program: moderngl.Program, ball: Eyeball
) -> moderngl.VertexArray:
    """Returns the front half of an eyeball, 16 rings of 24."""
    rings, steps = 16, 24
    polar = np.linspace(0.0, math.pi * 0.55, rings + 1)
    turn = np.arange(steps) * 2.0 * math.pi / steps
    circle = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    normals = np.concatenate(
        [
            np.sin(polar)[:, None, None] * circle[None],
            np.broadcast_to(np.cos(polar)[:, None, None], (rings + 1, steps, 1)),
        ],
        axis=2,
    ).reshape(-1, 3)
    rows = np.zeros((len(normals), 13), np.float32)
    rows[:, 0:3] = normals * ball.radius + ball.centre
    rows[:, 3:6] = normals
    rows[:, 8:10] = 1.0
    index = np.arange((rings + 1) * steps).reshape(rings + 1, steps)
    a, b = index[:-1], index[1:]
    c, d = np.roll(b, -1, axis=1), np.roll(a, -1, axis=1)
    triangles = np.stack([a, b, c, a, c, d], axis=2).reshape(-1, 3)
    buffer = context.buffer(rows.tobytes())
    indices = context.buffer(triangles.astype(np.int32).tobytes())
    return vertex_array(context, program, buffer, indices)


def make_context() -> moderngl.Context:
    try:
        return moderngl.create_context(standalone=True, backend="egl")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise BackendUnavailable(
            f"no headless OpenGL context ({error}); on Debian install libegl1 and libgl1-mesa-dri"
        ) from error


def read_shader(name: str) -> str:
    return (resources.files("pipelines.train") / "shaders" / f"{name}.glsl").read_text("utf-8")


def make_program(context: moderngl.Context, vertex: str, fragment: str) -> moderngl.Program:
    header = "#version 330\n"
    return context.program(vertex_shader=header + vertex, fragment_shader=header + fragment)


def sphere_directions(count: int) -> Iterable[Floats]:
    """Yields directions spread evenly over the sphere along a golden spiral."""
    golden = math.pi * (3.0 - math.sqrt(5.0))
    for index in range(count):
        y = 1.0 - 2.0 * (index + 0.5) / count
        radius = math.sqrt(1.0 - y * y)
        angle = golden * index
        yield np.array([radius * math.cos(angle), y, radius * math.sin(angle)])


def head_rotation(yaw: float, pitch: float, roll: float) -> Floats:
    """Returns the head's rotation: roll first, then pitch, then yaw."""
    cy, sy = math.cos(yaw), math.sin(yaw)
    cp, sp = math.cos(pitch), math.sin(pitch)
    cr, sr = math.cos(roll), math.sin(roll)
    about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    about_x = np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])
    about_z = np.array([[cr, -sr, 0], [sr, cr, 0], [0, 0, 1]])
    return about_y @ about_x @ about_z


def perspective(fov: float, near: float, far: float) -> Floats:
    """Returns OpenGL's perspective matrix of a square view, angle of view in rad."""
    scale = 1.0 / math.tan(fov / 2.0)
    depth, shift = (far + near) / (near - far), 2.0 * far * near / (near - far)
    return np.array([[scale, 0, 0, 0], [0, scale, 0, 0], [0, 0, depth, shift], [0, 0, -1, 0]])


def orthographic(half: float, depth: float) -> Floats:
    """Returns the projection of a box 2 half wide and high, from 0 to depth before the eye."""
    return np.array(
        [[1 / half, 0, 0, 0], [0, 1 / half, 0, 0], [0, 0, -2 / depth, -1], [0, 0, 0, 1]]
    )


def look_at(eye: Floats, target: Floats) -> Floats:
    """Returns the view matrix from an eye towards a target, y up where possible."""
    forward = (target - eye) / np.linalg.norm(target - eye)
    up = np.array([1.0, 0.0, 0.0] if abs(forward[1]) > 0.98 else [0.0, 1.0, 0.0])
    side = np.cross(forward, up)
    side /= np.linalg.norm(side)
    matrix = np.eye(4)
    matrix[:3, :3] = np.stack([side, np.cross(side, forward), -forward])
    matrix[:3, 3] = -matrix[:3, :3] @ eye
    return matrix
