/** The picture: a frame enlarged, and the path drawn on its road. */

import { drawLine, drawRibbon } from "./overlay.js";

const PATH = "rgb(45 212 191)"; // on pictures in both schemes, as in the videos that terra-generate draws
const DRAWN = "rgb(255 191 90)";

// Browsers enlarge with a soft kernel (Mitchell's keeps 8/9 of a pixel and spreads the rest): this gives back its edges.
const SHARPEN = 0.09;

/** A frame's picture (a Blob) as a canvas of its own size, ready to be enlarged; null when it is no picture. */
export async function decode(picture) {
  const bitmap = await createImageBitmap(picture).catch(() => null);
  if (!bitmap) return null;
  const { width, height } = bitmap;
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  const image = context.getImageData(0, 0, width, height);
  const source = image.data.slice();
  const row = 4 * width;
  for (let y = 1; y < height - 1; y++) {
    for (let at = y * row + 4; at < (y + 1) * row - 4; at++) {
      const around = source[at - 4] + source[at + 4] + source[at - row] + source[at + row];
      image.data[at] = source[at] + SHARPEN * (4 * source[at] - around);
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Draws a decoded frame, or a part of it ([left, top, width, height]), over the whole `size` ([width, height]) of the context. */
export function paintFrame(context, size, picture, part = [0, 0, picture.width, picture.height]) {
  context.imageSmoothingEnabled = true;
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, ...part, 0, 0, ...size);
}

/** Draws what belongs to the frame's path. `wheel` (a path or null) is where the wheel as held now would lead. */
export function paintPath(context, size, { camera, path, wheel }) {
  if (path) drawRibbon(context, path, camera, size, PATH);
  if (wheel) drawLine(context, wheel, camera, size, "rgb(255 255 255 / 0.85)");
}

/** Draws a stroke of the finger or the mouse, and below it the road that it means. */
export function paintStroke(context, size, { camera, stroke, path }) {
  if (path) drawRibbon(context, path, camera, size, DRAWN);
  context.save();
  context.strokeStyle = DRAWN;
  context.lineWidth = Math.max(2, size[1] / 140);
  context.lineJoin = context.lineCap = "round";
  context.beginPath();
  stroke.forEach((pixel) => context.lineTo(...pixel));
  context.stroke();
  context.restore();
}

/** Follows a stroke on the canvas while `isOn()`: `onChange(pixels | null)` as it grows, `onEnd(pixels, size)` at its end. */
export function wireStroke(canvas, { isOn, onChange, onEnd }) {
  let stroke = null;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    const [across, down] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    return [across * canvas.width, down * canvas.height];
  };
  const end = (event) => {
    if (!stroke) return;
    const pixels = stroke;
    stroke = null;
    onChange(null);
    if (event.type === "pointerup") onEnd(pixels, [canvas.width, canvas.height]);
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (!isOn() || event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    stroke = [place(event)];
    event.preventDefault();
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!stroke) return;
    stroke.push(place(event));
    onChange(stroke);
  });
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
}
