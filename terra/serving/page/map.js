/** The driven path from above. */

const CAR = [4.4, 1.8]; // meters
const NEAR = 70; // meters across around the car

const THUMB = 3.6; // memory frames beside each other, in the canvas's width

/**
 * Draws poses [[x, y, heading], ...] up to `current`, the rest of them faint, and the path ahead of the car; `memory` are
 * the frames that the picture's window remembers, {pose, picture (a canvas or null)}.
 */
export function drawMap(canvas, { poses, current, path, whole, colors, memory = [] }) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.fillStyle = colors.ground;
  context.fillRect(0, 0, width, height);
  if (!poses.length) return;
  const pose = poses[current];
  const view = whole ? fit(poses, width, height) : { x: pose[0], y: pose[1], up: pose[2], scale: width / NEAR, low: 0.66 };
  // World (x, y) to the canvas: `up` points up, and (view.x, view.y) is in the middle, `low` of the height down.
  const [cosine, sine] = [Math.cos(view.up), Math.sin(view.up)];
  const place = ([x, y]) => {
    const [dx, dy] = [x - view.x, y - view.y];
    return [
      width / 2 - view.scale * (dy * cosine - dx * sine),
      height * view.low - view.scale * (dx * cosine + dy * sine),
    ];
  };
  drawGrid(context, canvas, view, place, colors);
  const stroke = (points, color, size, alpha = 1) => {
    context.globalAlpha = alpha;
    context.strokeStyle = color;
    context.lineWidth = size;
    context.lineJoin = context.lineCap = "round";
    context.beginPath();
    points.forEach((point) => context.lineTo(...place(point)));
    context.stroke();
    context.globalAlpha = 1;
  };
  const wide = Math.max(4, Math.min(12, view.scale * 1.2));
  stroke(poses.slice(current), colors.muted, wide / 2, 0.6);
  stroke(poses.slice(0, current + 1), colors.accent, wide);
  const [c, s] = [Math.cos(pose[2]), Math.sin(pose[2])];
  const world = ([x, y]) => [pose[0] + c * x - s * y, pose[1] + s * x + c * y];
  context.setLineDash([wide, wide * 1.4]);
  stroke([[0, 0], ...path].map(world), colors.accent, Math.max(3, wide / 3));
  context.setLineDash([]);
  const size = Math.max(1, 14 / (view.scale * CAR[0]));
  const shape = [[0.5, 0], [-0.5, 0.5], [-0.3, 0], [-0.5, -0.5]].map(([x, y]) =>
    place(world([x * CAR[0] * size * 1.3, y * CAR[1] * size * 1.6])),
  );
  context.fillStyle = colors.ink;
  context.strokeStyle = colors.ground;
  context.lineWidth = 3;
  context.beginPath();
  shape.forEach((corner) => context.lineTo(...corner));
  context.closePath();
  context.stroke();
  context.fill();
  drawScale(context, canvas, view, colors);
  drawMemory(context, canvas, place, memory, colors);
}

/** Small pictures at the top, each with a line to the place that it was seen from. */
function drawMemory(context, { width }, place, memory, colors) {
  const wide = width / Math.max(THUMB, memory.length);
  memory.forEach(({ pose, picture }, index) => {
    const [x, y] = place(pose);
    const high = picture ? ((wide - 12) * picture.height) / picture.width : 0;
    context.strokeStyle = context.fillStyle = colors.ink;
    context.lineWidth = 2;
    context.globalAlpha = 0.7;
    context.beginPath();
    context.moveTo((index + 0.5) * wide, 6 + high);
    context.lineTo(x, y);
    context.stroke();
    context.beginPath();
    context.arc(x, y, 6, 0, 2 * Math.PI);
    context.fill();
    context.globalAlpha = 1;
    if (picture) context.drawImage(picture, index * wide + 6, 6, wide - 12, high);
  });
}

function fit(poses, width, height) {
  const [xs, ys] = [0, 1].map((axis) => poses.map((pose) => pose[axis]));
  const [low, high] = [[Math.min(...xs), Math.min(...ys)], [Math.max(...xs), Math.max(...ys)]];
  const across = Math.max(high[0] - low[0], high[1] - low[1], 30) * 1.3;
  return { x: (low[0] + high[0]) / 2, y: (low[1] + high[1]) / 2, up: 0, scale: Math.min(width, height) / across, low: 0.5 };
}

/** Meters between lines, so that they are neither crowded nor lost. */
const gridStep = (scale) => [10, 20, 50, 100, 200, 500, 1000, 5000].find((step) => step * scale > 60) ?? 20000;

function drawGrid(context, { width, height }, view, place, colors) {
  const step = gridStep(view.scale);
  const reach = Math.ceil(Math.hypot(width, height) / view.scale / step) * step;
  const [x0, y0] = [Math.round(view.x / step) * step, Math.round(view.y / step) * step];
  context.strokeStyle = colors.grid;
  context.lineWidth = 2;
  context.beginPath();
  for (let offset = -reach; offset <= reach; offset += step) {
    context.moveTo(...place([x0 + offset, y0 - reach]));
    context.lineTo(...place([x0 + offset, y0 + reach]));
    context.moveTo(...place([x0 - reach, y0 + offset]));
    context.lineTo(...place([x0 + reach, y0 + offset]));
  }
  context.stroke();
}

function drawScale(context, { height }, view, colors) {
  const step = gridStep(view.scale);
  const [left, bottom] = [20, height - 24];
  context.strokeStyle = context.fillStyle = colors.muted;
  context.lineWidth = 3;
  context.beginPath();
  context.moveTo(left, bottom - 8);
  context.lineTo(left, bottom);
  context.lineTo(left + step * view.scale, bottom);
  context.lineTo(left + step * view.scale, bottom - 8);
  context.stroke();
  context.font = "24px system-ui, sans-serif";
  context.fillText(`${step} m`, left + 10, bottom - 10);
}
