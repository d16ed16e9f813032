// The same motion as surface_vertex.glsl, seen from the light.
in vec3 in_position;
in vec2 in_uv;

uniform mat4 light_projection;
uniform mat3 rotation;
uniform vec3 pivot;
uniform vec2 neck;
uniform float rigid;

out vec2 uv;

void main() {
    float turn = max(rigid, smoothstep(neck.x, neck.y, in_position.y));
    vec3 turned = rotation * (in_position - pivot) + pivot;
    uv = in_uv;
    gl_Position = light_projection * vec4(mix(in_position, turned, turn), 1.0);
}
