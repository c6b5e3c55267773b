"""The GLSL programs for tracks: textured ground and objects, plain cars with their shadows, and a panorama as sky."""

from terra.recording.mesh import Material

HEADER = f"""#version 330
#define PAINT {int(Material.PAINT)}
#define TAIL_LIGHT {int(Material.TAIL_LIGHT)}
#define HEADLIGHT {int(Material.HEADLIGHT)}
"""

LIGHT = """
uniform vec3 eye; uniform vec3 ahead; uniform vec3 sun; uniform vec3 sun_color; uniform vec3 sky_light;
uniform vec3 ground_light; uniform vec3 horizon; uniform float fog_density; uniform float lamps;
vec3 to_linear(vec3 srgb) { return pow(srgb, vec3(2.2)); }
vec3 to_srgb(vec3 linear) { return pow(clamp(linear, 0.0, 1.0), vec3(1.0 / 2.2)); }
float fog_share(vec3 point) { return 1.0 - exp(-fog_density * length(point - eye)); }
vec3 light_on(vec3 point, vec3 n, float sun_share) {
    vec3 light = mix(ground_light, sky_light, 0.5 + 0.5 * n.z) + sun_color * sun_share;
    // Our own headlights: a soft cone that reaches some 50 m.
    float range = length(point - eye);
    float cone = smoothstep(0.86, 0.985, dot((point - eye) / max(range, 1e-3), ahead));
    return light + lamps * lamps * cone * (1.0 - smoothstep(8.0, 55.0, range)) * vec3(0.95, 0.88, 0.72);
}
"""

TRACK_VERTEX = """
uniform mat4 view_projection;
in vec3 in_position; in vec3 in_normal; in vec4 in_uv; in float in_layer; in float in_shaded;
out vec3 world; out vec3 normal; out vec4 uv; flat out float layer; flat out float shaded;
void main() {
    world = in_position; normal = in_normal; uv = in_uv; layer = in_layer; shaded = in_shaded;
    gl_Position = view_projection * vec4(world, 1.0);
}
"""

TRACK_FRAGMENT = (
    """
in vec3 world; in vec3 normal; in vec4 uv; flat in float layer; flat in float shaded;
out vec4 out_color;
uniform sampler2DArray textures; uniform sampler2D shading;
"""
    + LIGHT
    + """
void main() {
    vec4 texel = texture(textures, vec3(uv.xy, layer));
    vec3 shadow = texture(shading, uv.zw).rgb;
    // The rim of leaves and fences is where alpha is 0.45: as wide as a pixel, for the samples to cover a part of it.
    float alpha = clamp((texel.a - 0.45) / max(fwidth(texel.a), 1e-3) + 0.5, 0.0, 1.0);
    if (texel.a > 0.99) alpha = 1.0;
    if (alpha < 0.05) discard;
    vec3 n = normalize(normal);
    // Both sides of a face show.
    if (dot(n, eye - world) < 0.0) n = -n;
    float sun_share = 0.3 + 0.7 * max(dot(n, sun), 0.0);
    vec3 albedo = to_linear(texel.rgb) * mix(vec3(1.0), to_linear(shadow), shaded);
    vec3 shade = mix(albedo * light_on(world, n, sun_share), horizon, fog_share(world));
    out_color = vec4(to_srgb(shade), alpha);
}
"""
)

# pose: x, y, z, heading; tilt: pitch, braking
CAR_VERTEX = """
uniform mat4 view_projection;
in vec3 in_position; in vec3 in_normal; in vec3 in_color; in float in_material;
in vec4 in_pose; in vec2 in_tilt; in vec3 in_paint;
out vec3 world; out vec3 normal; out vec3 color; out vec2 plan; flat out int material; flat out float braking;
void main() {
    float c = cos(in_pose.w), s = sin(in_pose.w), u = cos(in_tilt.x), v = sin(in_tilt.x);
    mat3 turn = mat3(c * u, s * u, v, -s, c, 0.0, -c * v, -s * v, u);
    world = turn * in_position + in_pose.xyz; normal = turn * in_normal;
    material = int(in_material + 0.5); braking = in_tilt.y;
    color = material == PAINT ? in_paint : in_color;
    plan = in_color.xy;
    gl_Position = view_projection * vec4(world, 1.0);
}
"""

CAR_FRAGMENT = (
    """
in vec3 world; in vec3 normal; in vec3 color; in vec2 plan; flat in int material; flat in float braking;
out vec4 out_color;
"""
    + LIGHT
    + """
void main() {
    vec3 n = normalize(normal), albedo = to_linear(color), glow = vec3(0.0);
    if (material == TAIL_LIGHT) glow = albedo * (0.15 + 0.5 * lamps) + vec3(1.1, 0.05, 0.03) * braking;
    if (material == HEADLIGHT) glow = albedo * (0.25 + 1.4 * lamps);
    float sun_share = 0.1 + 0.9 * max(dot(n, sun), 0.0);
    vec3 shade = mix(albedo * light_on(world, n, sun_share) + glow, horizon, fog_share(world));
    out_color = vec4(to_srgb(shade), 1.0);
}
"""
)

# Blended over the ground; plan runs from -1 to 1 over the patch.
SHADOW_FRAGMENT = (
    """
in vec3 world; in vec3 normal; in vec3 color; in vec2 plan; flat in int material; flat in float braking;
out vec4 out_color;
"""
    + LIGHT
    + """
void main() {
    vec2 soft = 1.0 - smoothstep(0.6, 1.0, abs(plan));
    out_color = vec4(0.0, 0.0, 0.0, 0.7 * soft.x * soft.y * (1.0 - fog_share(world)));
}
"""
)

# The panorama is a cylinder's inside; weather tints it and veils it, most of all near the horizon.
SKY_FRAGMENT = (
    """
in vec2 corner; out vec4 out_color;
uniform mat3 rays; uniform sampler2D panorama; uniform float turns; uniform vec2 span; uniform vec3 zenith;
uniform vec3 tint; uniform float veil; uniform float detail;
"""
    + LIGHT
    + """
void main() {
    vec3 ray = normalize(rays * vec3(corner, 1.0));
    float around = atan(ray.y, ray.x) / 6.2831853, slope = ray.z / max(length(ray.xy), 1e-4);
    // With the level given there is no seam where the angle jumps.
    vec2 at = vec2(turns * around, clamp((slope - span.x) / (span.y - span.x), 0.002, 0.998));
    vec3 far = to_linear(textureLod(panorama, at, detail).rgb) * tint;
    float height = max(ray.z, 0.0);
    vec3 air = mix(horizon, zenith, 1.0 - exp(-3.2 * height));
    float thickness = 100.0 + 300.0 * exp(-6.0 * abs(slope));
    out_color = vec4(to_srgb(mix(far, air, 1.0 - (1.0 - veil) * exp(-fog_density * thickness))), 1.0);
}
"""
)
