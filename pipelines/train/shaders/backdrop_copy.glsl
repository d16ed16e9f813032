in vec2 screen;
out vec4 fragment;
uniform sampler2D colour;

void main() { fragment = vec4(texture(colour, screen * 0.5 + 0.5).rgb, 1.0); }
