in vec2 in_corner;
out vec2 screen;  // [-1, 1], y up

void main() {
    screen = in_corner;
    gl_Position = vec4(in_corner, 0.99999, 1.0);
}
