"""The GLSL programs. Lines, windows and stripes are formulas averaged over each pixel, so they never shimmer.

SNOW and WET are defined where the ground is that; without them the programs are those of a dry town, token for token.
"""

HEADER = "#version 330\n"

# The same for the town (one placed mesh) and for cars (INSTANCED: many placements of one mesh).
VERTEX = """
uniform mat4 view_projection;
in vec3 in_position; in vec3 in_normal; in vec4 in_surface; in vec3 in_color; in float in_material;
#ifdef INSTANCED
in vec4 in_pose; in vec3 in_paint;  // pose: x, y, heading, braking
#endif
out vec3 world; out vec3 normal; out vec4 surface; out vec3 color; flat out int material; flat out float braking;
void main() {
    world = in_position; normal = in_normal; surface = in_surface; color = in_color;
    material = int(in_material + 0.5); braking = 0.0;
#ifdef INSTANCED
    mat2 turn = mat2(cos(in_pose.z), sin(in_pose.z), -sin(in_pose.z), cos(in_pose.z));
    world = vec3(turn * in_position.xy + in_pose.xy, in_position.z);
    normal = vec3(turn * in_normal.xy, in_normal.z);
    braking = in_pose.w;
    if (material == 6) color = in_paint;
#endif
    gl_Position = view_projection * vec4(world, 1.0);
}
"""

LIGHT = """
uniform vec3 eye; uniform vec3 ahead; uniform vec3 sun; uniform vec3 sun_color; uniform vec3 sky_light;
uniform vec3 ground_light; uniform vec3 horizon; uniform float fog_density; uniform float lamps;
float fog_share(vec3 point) { return 1.0 - exp(-fog_density * length(point - eye)); }
"""

# box: share of the pixel where x is within [low, high]; pulses: the same, repeated for every whole number.
FILTERS = """
float box(float x, float low, float high) {
    float width = max(fwidth(x), 1e-4);
    return clamp((min(x + 0.5 * width, high) - max(x - 0.5 * width, low)) / width, 0.0, 1.0);
}
float covered(float x, float low, float high) { return floor(x) * (high - low) + clamp(fract(x), low, high) - low; }
float pulses(float x, float low, float high) {
    float width = max(fwidth(x), 1e-4);
    return (covered(x + 0.5 * width, low, high) - covered(x - 0.5 * width, low, high)) / width;
}
float mark(float x, float at, float half_width) { return box(x, at - half_width, at + half_width); }
float hash(vec2 cell) { return fract(sin(dot(cell, vec2(12.9898, 78.233))) * 43758.5453); }
"""

SURFACES = """
uniform sampler2D noise_map;
const vec3 WHITE_LINE = vec3(0.64, 0.64, 0.61);
const vec3 YELLOW_LINE = vec3(0.66, 0.48, 0.16);
vec3 to_linear(vec3 srgb) { return pow(srgb, vec3(2.2)); }

vec3 asphalt(vec3 base) {
    float grain = texture(noise_map, world.xy / 37.0).r - 0.5 + 0.6 * (texture(noise_map, world.xy / 11.0).r - 0.5);
    return base * (1.0 + 0.14 * grain);
}

vec3 road(vec3 base) {
    float u = surface.x, v = surface.y, plan = surface.w;
    vec3 shade = asphalt(base);
    if (plan < 0.5) return shade;
    float lanes = floor(plan + 0.1), edge = lanes * 3.5 + 0.05, parking = step(0.25, plan - lanes);
    shade *= 1.0 + 0.05 * cos(u * 3.5904) * step(abs(u), edge);  // two paler tracks a lane
    float from_end = surface.z - v, near = min(v, from_end);
    float stripes = pulses(u, 0.25, 0.75) * box(near, 0.4, 3.2) * box(u, -edge - 2.3 * parking, edge + 2.3 * parking);
    float stops = box(v, 3.9, 4.3) * box(u, 0.15, edge) + box(from_end, 3.9, 4.3) * box(u, -edge, -0.15);
    float open = box(near, 4.3, 1e4);
    float dashes = pulses(v / 8.0, 0.0, 0.45);
    float white = mark(abs(u), edge, 0.08) * mix(1.0, 0.85, parking);
    float broken = mix(dashes, 1.0, box(near, 4.3, 20.0));  // solid before a junction
    float yellow = lanes > 1.5 ? mark(abs(u), 0.17, 0.07) : mark(u, 0.0, 0.085) * broken;
    if (lanes > 1.5) white += mark(abs(u), 3.5, 0.085) * broken;
    white += parking * mark(fract(v / 6.4) * 6.4, 3.2, 0.05) * box(abs(u), edge, edge + 2.2) * step(10.0, near);
    shade = mix(shade, YELLOW_LINE, clamp(yellow * open, 0.0, 1.0));
    return mix(shade, WHITE_LINE, clamp(white * open + stripes + stops, 0.0, 1.0));
}

vec3 pavement(vec3 base) {
    float joints = max(pulses(surface.x / 1.5, 0.97, 1.0), pulses(surface.y / 1.5, 0.97, 1.0));
    vec3 slab = base * (1.0 - 0.12 * joints) * (0.97 + 0.06 * texture(noise_map, world.xy / 23.0).r);
    return mix(slab, base * 1.12, box(surface.x, -0.1, 0.25));
}

vec3 grass(vec3 base) {
    float tone = texture(noise_map, world.xy / 61.0).r + 0.5 * texture(noise_map, world.xy / 17.0).r - 0.75;
    return base * (1.0 + vec3(0.26, 0.22, 0.16) * tone);
}

// Returns the wall's albedo; `glow` receives the light of lit windows.
vec3 facade(vec3 base, vec3 view, out vec3 glow) {
    float u = surface.x, v = surface.y, style = surface.w;
    bool house = style > 7.5;
    float kind = house ? style - 8.0 : style;
    vec4 pane = kind < 0.5 ? vec4(0.25, 0.75, 0.28, 0.80) : kind < 1.5 ? vec4(0.14, 0.86, 0.32, 0.82)
        : kind < 2.5 ? vec4(0.0, 1.0, 0.36, 0.84) : vec4(0.36, 0.64, 0.22, 0.84);
    if (house) pane = vec4(0.30, 0.70, 0.34, 0.74);
    float ground = house ? 0.0 : box(v, -1.0, 1.0);
    float upper = pulses(u, pane.x, pane.y) * pulses(v, pane.z, pane.w);
    float shop = pulses(u, 0.06, 0.94) * box(v, 0.12, 0.72);
    float glass = mix(upper, shop, ground);
    float trim = pulses(u, max(pane.x - 0.05, 0.0), min(pane.y + 0.05, 1.0)) * pulses(v, pane.z - 0.05, pane.w + 0.04);
    float ledge = pulses(v + 0.04, 0.0, 0.09) * (house ? 0.0 : 1.0);
    vec3 wall = base * mix(1.0, 0.8, ground);
    wall = mix(wall, base * 1.22, clamp(trim - upper, 0.0, 1.0) * (1.0 - ground) * 0.8);
    wall = mix(wall, base * 0.72, ledge);
    wall *= mix(0.72, 1.0, smoothstep(0.0, 0.7, v));
    float detail = clamp(1.4 - 2.2 * max(fwidth(u), fwidth(v)), 0.0, 1.0);
    float pick = mix(0.5, hash(floor(vec2(u, v)) + 7.0 * floor(64.0 * surface.z + 0.5)), detail);
    float slant = pow(1.0 - abs(dot(view, normal)), 3.0);
    vec3 pane_color = mix(vec3(0.045, 0.065, 0.09), horizon, 0.12 + 0.16 * pick + 0.35 * slant);
    float lit_share = mix(0.3, step(0.66, pick), detail) + 0.7 * ground;
    glow = lamps * glass * min(lit_share, 1.0) * vec3(0.95, 0.66, 0.32) * (0.5 + 0.4 * pick);
    // Panes keep a share of the wall: a softer contrast, and calmer still where they are small in the picture.
    return mix(wall, mix(wall * 0.45, pane_color, 0.45 + 0.3 * detail), glass);
}
"""

# Snow lies where a surface faces up, and is worn away by wheels and feet. Rain darkens what it wets, and makes it
# shine.
GROUND = """
#ifdef SNOW
const vec3 SNOW_WHITE = vec3(0.80, 0.83, 0.88);
const vec3 SLUSH = vec3(0.30, 0.30, 0.31);

// Albedo of a road with its paint, under snow: dark and wet where wheels run, slush between, white at the edges.
vec3 snowy_road(vec3 bare, float rough) {
    float u = surface.x, plan = surface.w, cover = 0.62;
    if (plan > 0.5) {
        float edge = floor(plan + 0.1) * 3.5 + 0.05;
        float track = 0.5 - 0.5 * cos(u * 3.5904);  // 1 in the middle of a wheel track, two a lane
        track = mix(track, 0.5, smoothstep(0.5, 1.5, fwidth(u)));
        cover = mix(0.78, 0.06, smoothstep(0.25, 0.75, track + 0.35 * rough));
        cover *= 1.0 - 0.75 * box(u, -0.25, 0.25);  // overtaking cars bare the line between the directions
        cover = mix(cover, 1.0, smoothstep(edge - 0.7, edge + 0.2, abs(u) + 0.7 * rough));
    }
    cover = clamp(cover + 0.5 * rough, 0.0, 1.0);
    vec3 slush = mix(bare * 0.75, SLUSH, smoothstep(0.05, 0.45, cover));
    return mix(slush, SNOW_WHITE, smoothstep(0.35, 0.95, cover) * 0.95);
}

vec3 snowy(vec3 bare, vec3 n, out float lying) {
    float rough = texture(noise_map, world.xy / 9.0).r + texture(noise_map, world.xy / 31.0).r - 1.0;
    lying = 0.0;
    if (material == 1) return snowy_road(bare, rough);
    if (material == 3) return bare;
    float cover = smoothstep(0.30, 0.62, n.z + 0.30 * rough);
    if (material == 2) cover *= 0.80 + 0.5 * rough;  // trodden
    if (material == 9) {
        bare = mix(bare, vec3(dot(bare, vec3(0.3, 0.6, 0.1))), 0.5) * 0.8;  // leaves of the winter
        cover = smoothstep(-0.15, 0.55, n.z + 0.5 * rough);
    }
#ifdef INSTANCED
    cover *= 0.45;  // who moves sheds most of it
#endif
    lying = clamp(cover, 0.0, 1.0);
    return mix(bare, SNOW_WHITE, lying);
}
#endif
#ifdef WET
// How much of a surface is under water, and its darker albedo.
vec3 wetted(vec3 bare, vec3 n, out float lying) {
    float rough = texture(noise_map, world.xy / 13.0).r + texture(noise_map, world.xy / 47.0).r - 1.0;
    bool paved = material == 1 || material == 2 || (material == 0 && n.z > 0.95);
    lying = paved ? clamp(0.7 + 0.9 * rough, 0.25, 1.0) : 0.0;
    return bare * (paved ? 0.55 : 0.82);
}
#endif
"""

FRAGMENT = (
    """
in vec3 world; in vec3 normal; in vec4 surface; in vec3 color; flat in int material; flat in float braking;
out vec4 out_color;
"""
    + LIGHT
    + FILTERS
    + SURFACES
    + GROUND
    + """
void main() {
    vec3 n = normalize(normal), to_eye = eye - world, albedo = to_linear(color), glow = vec3(0.0);
    float range = length(to_eye);
    vec3 view = to_eye / max(range, 1e-3);
    if (material == 1) albedo = road(albedo);
    else if (material == 2) albedo = pavement(albedo);
    else if (material == 3) albedo = facade(albedo, view, glow);
    else if (material == 4) albedo = grass(albedo);
    else if (material == 5) glow = albedo * (0.1 + 1.6 * lamps);
    else if (material == 7) glow = albedo * (0.15 + 0.5 * lamps) + vec3(1.1, 0.05, 0.03) * braking;
    else if (material == 8) glow = albedo * (0.25 + 1.4 * lamps);
#ifdef SNOW
    float lying;
    albedo = snowy(albedo, n, lying);
    glow *= 1.0 - lying;
#endif
#ifdef WET
    float lying;
    albedo = wetted(albedo, n, lying);
#endif
    float facing = dot(n, sun);
    float direct = material == 9 ? 0.35 + 0.65 * max(facing * 0.6 + 0.4, 0.0) : max(facing, 0.0) * 0.9 + 0.1;
    vec3 light = mix(ground_light, sky_light, 0.5 + 0.5 * n.z) + sun_color * direct;
    // Our own headlights: a soft cone that reaches some 30 m.
    float cone = smoothstep(0.86, 0.985, dot(-view, ahead)) * (1.0 - smoothstep(6.0, 46.0, range));
    light += lamps * lamps * cone * vec3(0.75, 0.70, 0.58);
    vec3 lit = albedo * light + glow;
#ifdef WET
    // Fresnel's law, nearly: water mirrors the sky at a low angle.
    lit = mix(lit, horizon, lying * (0.03 + 0.75 * pow(1.0 - max(dot(view, n), 0.0), 5.0)));
#endif
    vec3 shade = mix(lit, horizon, fog_share(world));
    out_color = vec4(pow(clamp(shade, 0.0, 1.0), vec3(1.0 / 2.2)), 1.0);
}
"""
)

# Drawn with result = 2 * this * what is there: 0.5 changes nothing, less darkens, more brightens.
DECAL_FRAGMENT = (
    """
in vec3 world; in vec3 normal; in vec4 surface; in vec3 color; flat in int material; flat in float braking;
out vec4 out_color;
"""
    + LIGHT
    + """
void main() {
    vec2 p = surface.xy;
    float clear = 1.0 - fog_share(world);
    vec3 factor;
    if (material == 16) {
        vec2 q = 1.0 - smoothstep(0.55, 1.0, abs(p));
        float soft = mix(q.x * q.y, 1.0 - smoothstep(0.5, 1.0, length(p)), surface.z);
        factor = vec3(0.5 * (1.0 - surface.w * soft * clear));
    } else {
        float pool = pow(max(0.0, 1.0 - dot(p, p)), 1.5) * lamps * clear;
        factor = 0.5 + 0.5 * pool * vec3(1.0, 0.86, 0.6);
    }
    out_color = vec4(factor, 1.0);
}
"""
)

SKY_FRAGMENT = (
    """
in vec2 corner; out vec4 out_color;
uniform mat3 rays; uniform sampler2D clouds; uniform vec3 zenith; uniform float cover; uniform vec3 cloud_color;
"""
    + LIGHT
    + """
void main() {
    vec3 ray = normalize(rays * vec3(corner, 1.0));
    float height = max(ray.z, 0.0);
    vec3 shade = mix(horizon, zenith, 1.0 - exp(-3.2 * height));
    float glow = pow(max(dot(ray, sun), 0.0), 6.0) * (1.0 - height);
    shade += 0.22 * sun_color * glow * smoothstep(0.0, 0.25, height);
    vec2 plane = ray.xy / (height + 0.22);
    float wisp = texture(clouds, plane * 0.22).r;
    float veil = smoothstep(0.78 - 0.55 * cover, 1.0 - 0.25 * cover, wisp) * smoothstep(0.02, 0.35, height);
    shade = mix(shade, cloud_color, 0.85 * veil * step(0.01, cover));
    out_color = vec4(pow(clamp(shade, 0.0, 1.0), vec3(1.0 / 2.2)), 1.0);
}
"""
)

# A flake is a streak from where it was when the shutter opened to where it is, as the moving camera sees it.
FALLING_VERTEX = """
uniform mat4 view_projection; uniform vec3 middle; uniform vec3 eye; uniform vec3 motion; uniform vec3 drift;
uniform float time; uniform float exposure; uniform float box; uniform float sway; uniform float radius;
uniform float focal; uniform vec2 pixels; uniform vec4 shade;
in vec2 in_corner; in vec4 in_seed;
out vec2 across; out vec4 tint;
void main() {
    vec3 velocity = drift * (0.75 + 0.5 * in_seed.w);
    vec2 swing = sway * sin(vec2(2.1, 1.7) * time + 40.0 * in_seed.wx);
    vec3 at = in_seed.xyz * box + velocity * time + vec3(swing, 0.0);
    at = middle + mod(at - middle + 0.5 * box, box) - 0.5 * box;
    vec4 now = view_projection * vec4(at, 1.0);
    vec4 before = view_projection * vec4(at - (velocity - motion) * exposure, 1.0);
    across = vec2(0.0); tint = vec4(0.0);
    gl_Position = vec4(2.0, 2.0, 2.0, 1.0);
    if (min(now.w, before.w) < 0.6) return;
    vec2 head = 0.5 * pixels * now.xy / now.w, tail = 0.5 * pixels * before.xy / before.w;
    float streak = length(head - tail);
    vec2 along = streak > 1e-3 ? (head - tail) / streak : vec2(0.0, 1.0);
    float true_radius = radius * focal / now.w, shown = max(true_radius, 0.7);
    vec2 corner = (in_corner.x < 0.5 ? tail - shown * along : head + shown * along)
        + in_corner.y * shown * vec2(-along.y, along.x);
    // Thinner than a pixel, or spread over a streak: as much light in all.
    float share = (true_radius / shown) * sqrt(2.0 * true_radius / (2.0 * true_radius + streak));
    float fade = 1.0 - smoothstep(0.30, 0.48, length(at - middle) / box);
    tint = vec4(shade.rgb, shade.a * share * fade);
    across = vec2(in_corner.x * 2.0 - 1.0, in_corner.y);
    gl_Position = vec4(corner / (0.5 * pixels), now.z / now.w, 1.0);
}
"""

FALLING_FRAGMENT = """
in vec2 across; in vec4 tint; out vec4 out_color;
void main() {
    float soft = (1.0 - across.y * across.y) * (1.0 - pow(across.x, 4.0));
    out_color = vec4(tint.rgb, tint.a * soft);
}
"""
