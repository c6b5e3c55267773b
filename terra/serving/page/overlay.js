/** The path on the road: ground points to pixels and back, by the camera that took the frames. */

const CAR_WIDTH = 1.8; // meters
const RIBBON_START = 2; // meters; nearer ground is under the bonnet
const RIBBON_STEP = 0.25;
const FADE = 25;
const REACH = 60; // meters; a pixel further up is too near the horizon to tell its distance

const lens = ({ fov_degrees, pitch_radians, height_meters, x_forward_meters = 0 }, width) => ({
  focal: width / (2 * Math.tan((fov_degrees * Math.PI) / 360)),
  cosine: Math.cos(pitch_radians),
  sine: Math.sin(pitch_radians),
  height: height_meters,
  forward: x_forward_meters,
});

/** A ground point [x forward, y left] in meters to [column, row], or null where the camera can't see it. */
export function project([x, y], camera, [width, height]) {
  const { focal, cosine, sine, height: above, forward } = lens(camera, width);
  const ahead = x - forward;
  const depth = ahead * cosine - above * sine;
  if (depth < 1e-6) return null;
  const row = height / 2 + (focal * (ahead * sine + above * cosine)) / depth;
  const column = width / 2 - (focal * y) / depth;
  return Math.max(Math.abs(column), Math.abs(row)) < 8 * Math.max(width, height) ? [column, row] : null;
}

/** The ground point that a pixel shows, or null at and above the horizon. Undoes `project`. */
export function unproject([column, row], camera, [width, height]) {
  const { focal, cosine, sine, height: above, forward } = lens(camera, width);
  const down = (row - height / 2) / focal;
  const slope = down * cosine - sine;
  if (slope < 1e-6) return null;
  const ahead = (above * (cosine + down * sine)) / slope;
  if (ahead > REACH) return null;
  return [ahead + forward, ((width / 2 - column) / focal) * (ahead * cosine - above * sine)];
}

/** Points every `step` meters along the polyline that begins at the car, from `start` meters on. */
export function resample(points, step = RIBBON_STEP, start = RIBBON_START) {
  const result = [];
  let [last, traveled, next] = [[0, 0], 0, start];
  for (const point of points) {
    const length = Math.hypot(point[0] - last[0], point[1] - last[1]);
    while (length > 0 && next <= traveled + length) {
      const share = (next - traveled) / length;
      result.push([last[0] + share * (point[0] - last[0]), last[1] + share * (point[1] - last[1])]);
      next += step;
    }
    traveled += length;
    last = point;
  }
  return result;
}

/** The polyline from the car on with its corners cut twice (G. Chaikin, 1974). */
function smooth(points) {
  let line = [[0, 0], ...points];
  for (let round = 0; round < 2; round++) {
    line = line.flatMap((point, index) => {
      const next = line[index + 1];
      if (!next) return [point];
      return [0.25, 0.75].map((share) => point.map((value, axis) => value + share * (next[axis] - value)));
    });
  }
  return line;
}

/** Draws the path as a ribbon of the car's width; it fades with distance. */
export function drawRibbon(context, path, camera, size, color) {
  const center = resample(smooth(path));
  if (center.length < 2) return;
  const sides = [1, -1].map((side) =>
    center.map((point, index) => {
      const [from, to] = [center[Math.max(0, index - 1)], center[Math.min(center.length - 1, index + 1)]];
      const length = Math.hypot(to[0] - from[0], to[1] - from[1]) || 1;
      const offset = (side * CAR_WIDTH) / 2 / length;
      return project([point[0] - offset * (to[1] - from[1]), point[1] + offset * (to[0] - from[0])], camera, size);
    }),
  );
  context.save();
  context.lineCap = "round";
  for (let index = center.length - 2; index >= 0; index--) {
    const corners = [sides[0][index], sides[0][index + 1], sides[1][index + 1], sides[1][index]];
    if (corners.includes(null)) continue;
    const fade = Math.exp((-index * RIBBON_STEP) / FADE);
    context.fillStyle = context.strokeStyle = color;
    context.globalAlpha = 0.1 + 0.34 * fade;
    context.beginPath();
    corners.forEach((corner) => context.lineTo(...corner));
    context.fill();
    context.globalAlpha = 0.35 + 0.6 * fade;
    context.lineWidth = Math.max(1, size[1] * 0.007 * fade);
    for (const [from, to] of [corners.slice(0, 2), corners.slice(2)]) {
      context.beginPath();
      context.moveTo(...from);
      context.lineTo(...to);
      context.stroke();
    }
  }
  context.restore();
}

/** Draws the path as a thin dashed line: where the wheel as it is held now would lead. */
export function drawLine(context, path, camera, size, color) {
  const pixels = resample(path, 0.5).map((point) => project(point, camera, size));
  context.save();
  context.strokeStyle = color;
  context.lineWidth = Math.max(1.5, size[1] / 200);
  context.setLineDash([size[1] / 50, size[1] / 60]);
  context.beginPath();
  pixels.forEach((pixel) => pixel && context.lineTo(...pixel));
  context.stroke();
  context.restore();
}

/**
 * A stroke on the picture to a path message: smooth ground points a meter apart and when the car is there at `speed`.
 * Null when it is shorter than 4 m.
 */
export function strokeToPath(pixels, camera, size, speed) {
  const ground = pixels.map((pixel) => unproject(pixel, camera, size)).filter((point) => point && point[0] > 0);
  const points = resample(smooth(ground), 1, 1);
  if (points.length < 4) return null;
  return { type: "path", points, times: points.map((_, index) => (index + 1) / Math.max(speed, 2)) };
}
