// A plain knitted shirt, cut off along a sloping neckline.
uniform float neckline;
uniform float neck_slope;

void main() {
    float edge = neckline - rest.y - neck_slope * (rest.z - 0.2);
    if (edge < 0.0) discard;
    vec3 n = normalize(normal);
    if (dot(n, camera - world) < 0.0) n = -n;
    float ribs = smoothstep(0.10, 0.07, edge);
    float weave = noise(rest.xy * vec2(60.0, 22.0)) * 0.10 + noise(rest.xy * 7.0) * 0.10;
    vec3 albedo = tint * (0.9 + weave - 0.22 * ribs * (0.5 + 0.5 * sin(rest.x * 130.0)));
    vec3 c = albedo * diffuse(n, vec3(0.15), lit(), occlusion);
    fragment = vec4(to_display(c), 1.0);
}
