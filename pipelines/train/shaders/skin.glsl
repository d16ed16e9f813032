// Skin, lips and the inside of the mouth.
uniform sampler2D masks;  // r lips, g inside of the mouth
uniform float lips_front; // depth of the lips: what lies behind it is inside the mouth

void main() {
    vec3 n = normalize(normal), v = normalize(camera - world);
    vec2 mask = texture(masks, uv).rg;
    float lips = mask.r;
    float inside = mask.g * smoothstep(0.02, 0.20, lips_front - rest.z);
    vec3 albedo = to_linear(texture(colour, uv).rgb) * tint;
    albedo = mix(albedo, albedo * vec3(0.76, 0.55, 0.57), lips * 0.85);
    albedo = mix(albedo, vec3(0.22, 0.045, 0.045), mask.g * 0.8);
    vec3 wrap = vec3(0.40, 0.17, 0.10) * (1.0 - inside);
    float open_sky = mix(0.25, 1.0, occlusion) * mix(1.0, 0.15, inside);
    float shade = lit();
    vec3 light = diffuse(n, wrap, shade, open_sky);
    float roughness = mix(0.50, 0.34, lips);
    float shine = gloss(n, v, KEY, roughness, 0.035) * shade * 2.2
                + gloss(n, v, FILL, roughness, 0.035) * 0.7;
    fragment = vec4(to_display(albedo * light + shine * occlusion * (1.0 - inside * 0.8)), 1.0);
}
