// Depth of surfaces with holes.
in vec2 uv;
uniform sampler2D colour;

void main() {
    if (texture(colour, uv).a < 0.5) discard;
}
