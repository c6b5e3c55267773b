/** A frame's action in words, and drawn on its picture: what was pressed, or where each number stood. */

const LIT = "rgb(45 212 191)"; // as the path of a drive
const ON_LIT = "rgb(6 32 29)";
const GROUND = "rgb(11 15 20 / 0.72)";
const DIM = "rgb(238 242 246 / 0.6)";
const BRIGHT = "rgb(238 242 246)";
const MOST_CAPS = 10; // with more keys only those that are pressed are drawn

/** A vector's number of that index with its unit, with as many digits as its range needs. */
export function asText({ low, high, units }, index, value) {
  const range = high[index] - low[index];
  const text = value.toFixed(range >= 200 ? 0 : range >= 20 ? 1 : 2).replace(/^-(?=[0.]*$)/, "");
  return `${text.replace("-", "−")}${units[index] ? ` ${units[index]}` : ""}`;
}

/** "forward + left", "jump" or "steering 0.20 rad, throttle 0.50"; empty where no action led to the frame. */
export function words(space, action) {
  if (action == null) return "";
  if (space.kind === "keys") return action.join(" + ") || "nothing pressed";
  if (space.kind === "choice") return action;
  return space.names.map((name, index) => `${name} ${asText(space, index, action[name])}`).join(", ");
}

/** Draws the action at the bottom of the picture, of `size` ([width, height]). */
export function paintLegend(context, size, space, action) {
  if (action == null) return;
  context.save();
  context.textBaseline = "middle";
  if (space.kind === "vector") paintNumbers(context, size, space, action);
  else paintCaps(context, size, space, [action].flat());
  context.restore();
}

function paintCaps(context, [width, height], { kind, names }, pressed) {
  const text = Math.max(11, Math.min(height / 22, width / 32));
  const [high, pad, gap, margin] = [text * 1.9, text * 0.75, text * 0.45, text * 0.9];
  context.font = `600 ${text}px system-ui, sans-serif`;
  const all = kind === "keys" && names.length <= MOST_CAPS ? names : pressed.length ? pressed : ["–"];
  const caps = all.map((name) => ({ name, wide: Math.max(high, context.measureText(name).width + 2 * pad) }));
  const rows = [[]];
  let right = margin;
  for (const cap of caps) {
    if (right + cap.wide > width - margin && rows.at(-1).length) {
      rows.push([]);
      right = margin;
    }
    rows.at(-1).push({ ...cap, left: right });
    right += cap.wide + gap;
  }
  rows.forEach((row, index) => {
    const top = height - margin - high - (rows.length - 1 - index) * (high + gap);
    for (const { name, wide, left } of row) {
      const isLit = pressed.includes(name);
      box(context, left, top, wide, high, high * 0.28, isLit ? LIT : GROUND);
      context.fillStyle = isLit ? ON_LIT : DIM;
      context.textAlign = "center";
      context.fillText(name, left + wide / 2, top + high * 0.53);
    }
  });
}

function paintNumbers(context, [width, height], space, action) {
  const { names, low, high } = space;
  const columns = names.length > 4 ? 2 : 1;
  const lines = Math.ceil(names.length / columns);
  const text = Math.max(9, Math.min(height / 26, width / 36, (height * 0.55) / (lines * 1.55)));
  context.font = `600 ${text}px system-ui, sans-serif`;
  const texts = names.map((name, index) => asText(space, index, action[name]));
  const widest = (all) => Math.max(...all.map((each) => context.measureText(each).width));
  const [margin, pad, line, bar] = [text * 0.9, text * 0.8, text * 1.55, text * 5];
  const [name, value] = [Math.min(widest(names), text * 9), widest(texts)];
  const column = name + bar + value + 2 * pad;
  const [across, down] = [columns * column + (columns - 1) * pad * 2 + 2 * pad, lines * line + pad];
  const [left, top] = [margin, height - margin - down];
  box(context, left, top, across, down, text * 0.6, GROUND);
  names.forEach((each, index) => {
    const x = left + pad + Math.floor(index / lines) * (column + 2 * pad);
    const y = top + pad / 2 + ((index % lines) + 0.5) * line;
    const place = (number) => x + name + pad + (bar * (number - low[index])) / (high[index] - low[index]);
    const middle = place(Math.min(high[index], Math.max(low[index], 0)));
    const end = place(action[each]);
    context.textAlign = "left";
    context.fillStyle = DIM;
    context.fillText(each, x, y, name);
    box(context, x + name + pad, y - text * 0.14, bar, text * 0.28, text * 0.14, "rgb(238 242 246 / 0.22)");
    box(context, Math.min(middle, end), y - text * 0.14, Math.abs(end - middle), text * 0.28, 0, LIT);
    box(context, end - text * 0.2, y - text * 0.42, text * 0.4, text * 0.84, text * 0.2, LIT);
    context.textAlign = "right";
    context.fillStyle = BRIGHT;
    context.fillText(texts[index], x + column, y);
  });
}

function box(context, left, top, width, height, radius, color) {
  context.fillStyle = color;
  context.beginPath();
  context.roundRect(left, top, width, height, radius);
  context.fill();
}
