// Averages the grid of samples behind each pixel.
out vec4 fragment;
uniform sampler2D colour;
uniform int grid;  // samples along one side of a pixel

void main() {
    ivec2 first = ivec2(gl_FragCoord.xy) * grid;
    vec3 sum = vec3(0.0);
    for (int y = 0; y < grid; y++)
        for (int x = 0; x < grid; x++) sum += texelFetch(colour, first + ivec2(x, y), 0).rgb;
    fragment = vec4(sum / float(grid * grid), 1.0);
}
