/** Several cameras in one picture: which part shows which, a switch between all of them and one, and their names. */

const element = (id) => document.getElementById(id);

/**
 * The part of a picture of `size` ([width, height]) that a camera has: [left, top, width, height]; the whole picture of
 * null and of a world without `views` (as in v1/models).
 */
export function partOf(views, name, [width, height]) {
  const box = views?.boxes[views.names.indexOf(name)];
  if (!box) return [0, 0, width, height];
  const [own_height, own_width] = views.image_size;
  const [left, top, right, bottom] = box;
  const [across, down] = [width / own_width, height / own_height];
  return [left * across, top * down, (right - left) * across, (bottom - top) * down];
}

/** Calls `paint(size)` with the context moved to a part, outside of which nothing is drawn. */
export function within(context, [left, top, width, height], paint) {
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  context.translate(left, top);
  paint([width, height]);
  context.restore();
}

export class Cameras {
  only = null; // the camera that is shown alone; null: all of them
  #views = null;
  #onChange;

  constructor(onChange) {
    this.#onChange = onChange;
  }

  /** Offers the cameras of a world: `views` as in v1/models, or nothing. */
  offer(views) {
    const known = views ?? null;
    if (JSON.stringify(known) === JSON.stringify(this.#views)) return;
    [this.#views, this.only] = [known, null];
    const names = known && known.names.length > 1 ? [null, ...known.names] : [];
    const buttons = names.map((name) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: name ?? "All views" });
      button.dataset.camera = name ?? "";
      button.onclick = () => this.show(name);
      return button;
    });
    element("views").replaceChildren(...buttons);
    element("views").hidden = names.length === 0;
    this.show(null);
  }

  show(name) {
    this.only = name;
    for (const button of element("views").children) button.setAttribute("aria-pressed", button.dataset.camera === (name ?? ""));
    element("stage").dataset.camera = name ?? "";
    this.#onChange();
  }

  /** What is shown of a picture of `size`. */
  shown(size) {
    return partOf(this.#views, this.only, size);
  }

  /** Where a path may be drawn, on what is shown at `size`: the first camera sees the road. Null where it is not shown. */
  road(size) {
    const first = this.#views?.names[0] ?? null;
    if (this.only === null) return partOf(this.#views, first, size);
    return this.only === first ? [0, 0, ...size] : null;
  }

  /** Writes the names on the parts of all cameras. */
  paintNames(context, size) {
    if (!this.#views || this.only !== null) return;
    const text = Math.max(11, size[1] / 30);
    context.save();
    context.font = `600 ${text}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    for (const name of this.#views.names) {
      const [left, top] = partOf(this.#views, name, size);
      const wide = context.measureText(name).width + text;
      context.fillStyle = "rgb(11 15 20 / 0.72)";
      context.fillRect(left, top, wide, text * 1.7);
      context.fillStyle = "rgb(238 242 246)";
      context.fillText(name, left + text / 2, top + text * 0.9);
    }
    context.restore();
  }
}
