// Shared by all surfaces: three lights, sky, soft shadow, tone curve. Colours are linear with a
// gamma of 2, which a square and a square root convert.
in vec3 world;
in vec3 rest;
in vec3 normal;
in vec3 tangent;
in vec2 uv;
in vec3 light_place;
in float occlusion;

uniform vec3 camera;
uniform vec3 tint;
uniform sampler2D colour;
uniform sampler2DShadow shadow_map;

out vec4 fragment;

const vec3 KEY = vec3(-0.4402, 0.4992, 0.7463);
const vec3 KEY_COLOUR = vec3(1.0, 0.955, 0.90) * 1.16;
const vec3 FILL = vec3(0.7634, 0.1696, 0.6233);
const vec3 FILL_COLOUR = vec3(0.88, 0.93, 1.0) * 0.62;
const vec3 RIM = vec3(0.5571, 0.4643, -0.6885);
const vec3 RIM_COLOUR = vec3(1.0, 0.93, 0.85) * 0.75;
const vec3 SKY = vec3(0.47, 0.49, 0.53);
const vec3 GROUND = vec3(0.30, 0.26, 0.24);

float lit() {
    const float S = 2.6 / 512.0;
    vec3 place = vec3(light_place.xy, light_place.z - 0.0022);
    float sum = 0.0;
    sum += texture(shadow_map, place + vec3(-S, -S * 0.4, 0.0));
    sum += texture(shadow_map, place + vec3(S * 0.4, -S, 0.0));
    sum += texture(shadow_map, place + vec3(S, S * 0.4, 0.0));
    sum += texture(shadow_map, place + vec3(-S * 0.4, S, 0.0));
    sum += texture(shadow_map, place + vec3(-S * 0.3, S * 0.1, 0.0));
    sum += texture(shadow_map, place + vec3(S * 0.3, -S * 0.1, 0.0));
    return sum / 6.0;
}

// Light scattered below the surface reaches past the terminator: wrap is its reach per channel.
vec3 diffuse(vec3 n, vec3 wrap, float shade, float open_sky) {
    vec3 scale = 1.0 / (1.0 + wrap);
    vec3 key = clamp((dot(n, KEY) + wrap) * scale, 0.0, 1.0) * mix(vec3(shade), vec3(1.0), wrap * 0.5);
    vec3 fill = clamp((dot(n, FILL) + wrap) * scale, 0.0, 1.0) * mix(0.35, 1.0, open_sky);
    vec3 rim = clamp((dot(n, RIM) + wrap * 0.5) * scale, 0.0, 1.0) * open_sky;
    vec3 ambient = mix(GROUND, SKY, n.y * 0.5 + 0.5);
    vec3 occluded = mix(vec3(open_sky), vec3(1.0), wrap * 0.35);
    return KEY_COLOUR * key * mix(0.5, 1.0, open_sky) + FILL_COLOUR * fill + RIM_COLOUR * rim
         + ambient * occluded;
}

// GGX times Schlick's Fresnel, the visibility term folded into a constant.
float gloss(vec3 n, vec3 v, vec3 l, float roughness, float f0) {
    vec3 h = normalize(l + v);
    float nh = max(dot(n, h), 0.0);
    float a = roughness * roughness;
    a *= a;
    float d = nh * nh * (a - 1.0) + 1.0;
    float m = 1.0 - max(dot(v, h), 0.0);
    float m2 = m * m;
    return a / (3.1416 * d * d) * (f0 + (1.0 - f0) * m2 * m2 * m) * 0.25 * max(dot(n, l), 0.0);
}

vec3 to_linear(vec3 c) { return c * c; }

// A filmic curve: straight in the darks, rolled off in the lights.
vec3 to_display(vec3 c) {
    c = max(c, 0.0);
    vec3 rolled = c * (1.0 + c * 0.18) / (1.0 + c * 0.62);
    return sqrt(clamp(rolled, 0.0, 1.0));
}

float hash(vec2 p) { return fract(sin(dot(p, vec2(12.9898, 78.233))) * 43758.5453); }

float noise(vec2 p) {
    vec2 i = floor(p), f = p - i;
    f = f * f * (3.0 - 2.0 * f);
    return mix(mix(hash(i), hash(i + vec2(1, 0)), f.x),
               mix(hash(i + vec2(0, 1)), hash(i + vec2(1, 1)), f.x), f.y);
}
