/** What is drawn of a drive: the picture with the paths on its road, and the map. */

import { Cameras, within } from "./cameras.js";
import { arc } from "./controls.js";
import { mapColors } from "./instruments.js";
import { paintLegend } from "./legend.js";
import { drawMap } from "./map.js";
import { strokeToPath } from "./overlay.js";
import { decode, paintFrame, paintPath, paintStroke, wireStroke } from "./stage.js";

const element = (id) => document.getElementById(id);
const DARK = matchMedia("(prefers-color-scheme: dark)");
const SIZE = [144, 256]; // height and width of frames, until a session says its own

/** Draws when `paint` is called after something changed; whoever changes the drive or the controls says so by `touch`. */
export class View {
  overlay = true; // whether the path lies on the road, or the legend on the picture
  whole = false; // whether the map shows all of the drive
  cameras = new Cameras(() => this.#resize({ always: true }));
  frame = null; // the frame whose picture is shown
  #drawing = false;
  #picture = null;
  #stroke = null;
  #wanted = null;
  #size = SIZE;
  #colors = null;
  #dirty = true;
  #remembered = new Map(); // pictures of memory frames, by their frame

  /** `onStroke(pixels, size)` gets each line that was drawn on the picture. */
  constructor(onStroke) {
    wireStroke(element("view"), {
      isOn: () => this.#drawing,
      onChange: (stroke) => {
        this.#stroke = stroke;
        this.touch();
      },
      onEnd: (stroke, size) => {
        const [left, top, ...road] = this.cameras.road(size);
        onStroke(stroke.map(([x, y]) => [x - left, y - top]), road);
      },
    });
    new ResizeObserver(() => this.#resize()).observe(element("stage"));
    DARK.addEventListener("change", () => {
      this.#colors = null;
      this.touch();
    });
  }

  touch() {
    this.#dirty = true;
  }

  /** Shows nothing, or the frame before until the next one is decoded. */
  forget({ keepPicture = false } = {}) {
    this.frame = this.#wanted = null;
    if (!keepPicture) this.#picture = null;
    this.touch();
  }

  /** Decodes a frame's picture; it is shown unless another has been asked for meanwhile. */
  async show(frame, size = SIZE) {
    this.#wanted = frame;
    const picture = await decode(frame.picture);
    if (frame !== this.#wanted) return;
    [this.#picture, this.frame, this.#size] = [picture, frame, size];
    element("stage").dataset.frame = frame.header.index;
    this.#resize();
    this.touch();
  }

  /** The pixels (RGBA) of the picture that is shown; null without one. */
  get pixels() {
    const picture = this.#picture;
    return picture && picture.getContext("2d").getImageData(0, 0, picture.width, picture.height).data;
  }

  get drawing() {
    return this.#drawing;
  }

  set drawing(on) {
    this.#drawing = on;
    this.#stroke = null;
    if (on && !this.cameras.road([1, 1])) this.cameras.show(null);
    element("draw").setAttribute("aria-pressed", on);
    element("stage").classList.toggle("drawing", on);
    this.touch();
  }

  /** Draws what changed since the last time; false if nothing did. `wheel`: steering and speed as they are held, or null. */
  paint({ drive, wheel }) {
    if (!this.#dirty) return false;
    this.#dirty = false;
    const canvas = element("view");
    const [context, size] = [canvas.getContext("2d"), [canvas.width, canvas.height]];
    if (!drive.frame) context.clearRect(0, 0, ...size);
    if (!drive.frame || !this.#picture || !this.frame) return false;
    paintFrame(context, size, this.#picture, this.cameras.shown([this.#picture.width, this.#picture.height]));
    if (drive.state !== "driving") this.cameras.paintNames(context, size);
    const { header } = this.frame;
    const camera = drive.info?.camera;
    const road = camera && this.cameras.road(size);
    if (road && this.#stroke) {
      const stroke = this.#stroke.map(([x, y]) => [x - road[0], y - road[1]]);
      within(context, road, (part) => {
        const path = strokeToPath(stroke, camera, part, header.speed ?? 5)?.points;
        paintStroke(context, part, { camera, stroke, path });
      });
    } else if (road && this.overlay) {
      const held = wheel && arc(wheel.steering, wheel.speed);
      within(context, road, (part) => paintPath(context, part, { camera, path: header.path, wheel: held }));
    }
    if (!header.pose) {
      if (drive.info && this.overlay) paintLegend(context, size, drive.info.action_space, header.action);
      return true;
    }
    this.#colors ??= mapColors();
    const poses = drive.frames.map((each) => each.header.pose);
    const memory = this.#memory(drive, header.memory ?? []);
    const [current, path] = [drive.viewed, header.path ?? []];
    drawMap(element("map"), { poses, current, path, whole: this.whole, colors: this.#colors, memory });
    return true;
  }

  // The memory frames of the drive itself; those of a server's map have negative indices, and no picture here.
  #memory(drive, indices) {
    const frames = indices.map((index) => drive.frames[index]).filter((frame) => frame?.header.pose);
    for (const frame of this.#remembered.keys()) if (!frames.includes(frame)) this.#remembered.delete(frame);
    for (const frame of frames) {
      if (this.#remembered.has(frame)) continue;
      this.#remembered.set(frame, null);
      if (!frame.picture) continue;
      decode(frame.picture).then((picture) => {
        if (this.#remembered.has(frame)) this.#remembered.set(frame, picture);
        this.touch();
      });
    }
    return frames.map((frame) => ({ pose: frame.header.pose, picture: this.#remembered.get(frame) }));
  }

  #resize({ always = false } = {}) {
    if (always) this.touch();
    const canvas = element("view");
    const [, , width, height] = this.cameras.shown(this.#size.toReversed());
    element("drive").style.setProperty("--shape", width / height);
    const wide = Math.round(element("stage").clientWidth * Math.min(devicePixelRatio, 2));
    const high = Math.round((wide * height) / width);
    if (!wide || (canvas.width === wide && canvas.height === high)) return;
    [canvas.width, canvas.height] = [wide, high];
    this.touch();
  }
}
