// Teeth and tongue: wet, lit through the lips, darker with depth.
uniform float lips_front;
uniform float wetness;
uniform float gums;  // 1 where red texels are gums

void main() {
    vec3 n = normalize(normal), v = normalize(camera - world);
    vec3 texel = texture(colour, uv).rgb;
    float gum = smoothstep(0.10, 0.22, texel.r - texel.g) * gums;
    vec3 albedo = mix(to_linear(texel) * tint, vec3(0.42, 0.15, 0.14), gum);
    float depth = clamp((lips_front - rest.z) * 1.5, 0.0, 1.0);
    float open_sky = mix(1.0, 0.10, depth) * mix(0.45, 1.0, occlusion);
    vec3 c = albedo * diffuse(n, vec3(0.5, 0.42, 0.38), 0.75, open_sky);
    c *= mix(vec3(1.0), vec3(0.30, 0.14, 0.12), depth);
    c += gloss(n, v, KEY, 0.28, 0.04) * wetness * open_sky;
    fragment = vec4(to_display(c), 1.0);
}
