// A calm, out-of-focus wall: a vertical gradient, a pool of light behind the head, two warm spots.
in vec2 screen;
out vec4 fragment;

float pool(vec2 place, float width) { vec2 d = screen - place; return exp(-dot(d, d) / width); }

void main() {
    vec3 c = mix(vec3(0.19, 0.25, 0.32), vec3(0.34, 0.41, 0.49), smoothstep(-1.2, 1.1, screen.y));
    c += vec3(0.20, 0.20, 0.19) * pool(vec2(0.15, 0.25), 0.9);
    c += vec3(0.16, 0.10, 0.03) * pool(vec2(0.95, 0.55), 0.35);
    c += vec3(0.02, 0.06, 0.08) * pool(vec2(-0.95, 0.35), 0.5);
    fragment = vec4(c * (1.0 - 0.10 * dot(screen, screen)), 1.0);
}
