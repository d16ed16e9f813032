// Turns the head about the neck, bends the neck between, and lifts the chest with the breath.
in vec3 in_position;
in vec3 in_normal;
in vec2 in_uv;
in vec2 in_occlusion;  // with the mouth closed, with it open
in vec3 in_tangent;

uniform mat4 view_projection;
uniform mat4 light_projection;
uniform mat3 rotation;
uniform vec3 pivot;
uniform vec2 neck;      // heights where the turn begins and where it is whole
uniform float rigid;    // 1: follows the head all the way down (hair, eyes)
uniform vec3 breath;
uniform float openness; // of the mouth, 0 to 1

out vec3 world;
out vec3 rest;          // before the turn
out vec3 normal;
out vec3 tangent;
out vec2 uv;
out vec3 light_place;
out float occlusion;

void main() {
    float turn = max(rigid, smoothstep(neck.x, neck.y, in_position.y));
    vec3 turned = rotation * (in_position - pivot) + pivot;
    float chest = (1.0 - turn) * smoothstep(neck.x - 1.8, neck.x - 0.3, in_position.y);
    rest = in_position;
    world = mix(in_position, turned, turn) + breath * chest;
    normal = mix(in_normal, rotation * in_normal, turn);
    tangent = mix(in_tangent, rotation * in_tangent, turn);
    uv = in_uv;
    occlusion = mix(in_occlusion.x, in_occlusion.y, openness);
    light_place = (light_projection * vec4(world, 1.0)).xyz * 0.5 + 0.5;
    gl_Position = view_projection * vec4(world, 1.0);
}
