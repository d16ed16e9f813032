// Hair cards: strands from noise along the cards, two shifted highlights (Kajiya and Kay, 1989).
uniform float strands;
uniform float cutoff;  // thinner hair is left to the blended pass
uniform float gain;  // brings the texture's brightness to about one

void main() {
    vec4 texel = texture(colour, uv);
    float alpha = clamp((texel.a - 0.08) * 1.35, 0.0, 1.0);
    if (alpha < cutoff) discard;
    vec3 n = normalize(normal), v = normalize(camera - world);
    if (dot(n, v) < 0.0) n = -n;
    float strand = noise(vec2(uv.x * strands, uv.y * 14.0));
    vec3 t = normalize(tangent + n * (strand - 0.5) * 0.5);
    float pattern = clamp(dot(texel.rgb, vec3(0.35, 0.45, 0.20)) * gain, 0.3, 1.6);
    vec3 albedo = tint * pattern * (0.6 + 0.8 * strand);
    float shade = mix(0.45, 1.0, lit());
    vec3 h = normalize(KEY + v);
    float th = dot(t, h);
    float sine = 1.0 - th * th;
    float s2 = sine * sine, s8 = s2 * s2 * s2 * s2;
    float s32 = s8 * s8; s32 *= s32;
    float wrapped = clamp(dot(n, KEY) * 0.6 + 0.4, 0.0, 1.0);
    vec3 c = albedo * diffuse(n, vec3(0.5), shade, occlusion);
    c += (albedo * 1.1 * s8 * s8 + vec3(0.05, 0.045, 0.04) * s32 * s8) * wrapped * shade * occlusion;
    fragment = vec4(to_display(c), alpha);
}
