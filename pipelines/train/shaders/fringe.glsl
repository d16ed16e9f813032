// Brows and lashes: flat hairs on the skin.
uniform float density;

void main() {
    vec4 texel = texture(colour, uv);
    vec3 c = to_linear(texel.rgb) * tint * diffuse(normalize(normal), vec3(0.4), 1.0, 1.0);
    fragment = vec4(to_display(c), texel.a * density);
}
