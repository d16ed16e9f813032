// An eyeball without texture: sclera, limbus, iris fibres, pupil and the reflection of two windows.
uniform vec3 centre;
uniform vec3 gaze;

void main() {
    vec3 n = normalize(normal), v = normalize(camera - world);
    vec3 d = normalize(rest - centre);
    vec3 right = normalize(cross(vec3(0.0, 1.0, 0.0), gaze));
    vec2 p = vec2(dot(d, right), dot(d, cross(gaze, right)));
    float angle = acos(clamp(dot(d, gaze), -1.0, 1.0));
    const float IRIS = 0.50;
    float turn = atan(p.y, p.x);
    float fibre = noise(vec2(turn * 9.0, angle * 12.0)) * 0.6 + noise(vec2(turn * 22.0, 3.0)) * 0.4;
    vec3 iris = tint * (0.45 + 0.9 * fibre) * mix(1.25, 0.35, smoothstep(IRIS * 0.55, IRIS, angle));
    iris *= mix(0.02, 1.0, smoothstep(0.15, 0.19, angle));
    vec3 white = vec3(0.74, 0.71, 0.69) - vec3(0.06, 0.12, 0.12) * smoothstep(0.6, 1.3, angle);
    float limbus = smoothstep(IRIS - 0.04, IRIS + 0.05, angle);
    vec3 albedo = mix(iris, white, limbus);
    float lid = mix(0.40, 1.0, smoothstep(0.48, -0.05, d.y)) * mix(1.0, 0.72, smoothstep(0.45, 0.85, abs(d.x)));
    vec3 c = albedo * diffuse(n, vec3(0.25, 0.2, 0.2), mix(0.65, 1.0, lit()), lid);
    vec3 r = reflect(-v, n);
    c += vec3(0.95) * smoothstep(0.93, 0.965, dot(r, normalize(vec3(-0.34, 0.26, 0.90)))) * smoothstep(0.45, 0.7, lid);
    c += vec3(0.22, 0.25, 0.30) * smoothstep(0.95, 0.98, dot(r, normalize(vec3(0.5, 0.12, 0.86))));
    fragment = vec4(to_display(c), 1.0);
}
