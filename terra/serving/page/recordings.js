/** Recordings: one that runs, and a dialog of those that are finished, each with a preview and a link to save it. */

import { partOf, within } from "./cameras.js";
import { paintLegend } from "./legend.js";
import { canRecord, writeVideo } from "./record.js";
import { decode, paintFrame, paintPath } from "./stage.js";
import { isDriven } from "./world.js";

export class Recordings {
  isPossible = canRecord();
  #root = document.getElementById("recordings");
  #dialog = document.getElementById("saved");
  #say;
  #running = null; // {fps, size, model, frames}
  #count = 0;

  constructor(say) {
    this.#say = say;
    for (const button of document.querySelectorAll(".saved-open")) button.onclick = () => this.#dialog.showModal();
    document.getElementById("saved-close").onclick = () => this.#dialog.close();
    this.#showCount();
  }

  get isRunning() {
    return this.#running !== null;
  }

  /** Seconds of video so far. */
  get seconds() {
    return this.#running ? this.#running.frames.length / this.#running.fps : 0;
  }

  /** Begins with {fps, size, model (for the file's name, or null)}, or ends the one that runs. */
  toggle({ fps, size, model }) {
    if (this.#running) {
      if (this.#running.frames.length) this.#dialog.showModal();
      return this.stop();
    }
    this.#running = { fps, size, model, frames: [] };
    this.#say("Recording.");
  }

  add(frame) {
    this.#running?.frames.push(frame);
  }

  async stop() {
    const recording = this.#running;
    this.#running = null;
    if (!recording) return;
    const { frames, fps, size, model } = recording;
    if (!frames.length) return this.#say("Nothing was recorded: no new frame came.");
    const card = document.createElement("div");
    card.className = "recording";
    this.#root.prepend(card);
    this.#showCount();
    const onProgress = (share) => (card.textContent = `Writing the video … ${Math.round(100 * share)} %`);
    onProgress(0);
    try {
      const { blob, suffix } = await writeVideo(frames, { size, fps, paint, onProgress });
      this.#count += 1;
      const parts = ["terra", isDriven() ? "drive" : "play", ...(model ? [model] : []), this.#count];
      this.#fill(card, { blob, name: `${parts.join("-")}.${suffix}`, seconds: frames.length / fps });
      this.#say("The recording is ready to save.");
    } catch (error) {
      card.textContent = `The video could not be written: ${error.message}`;
      throw error;
    }
  }

  #showCount() {
    for (const button of document.querySelectorAll(".saved-open")) {
      button.hidden = this.#root.children.length === 0;
      button.querySelector("span").textContent = `Recordings · ${this.#root.children.length}`;
    }
  }

  #fill(card, { blob, name, seconds }) {
    const url = URL.createObjectURL(blob);
    const video = Object.assign(document.createElement("video"), { src: url, controls: true, loop: true, muted: true });
    video.playsInline = true;
    video.setAttribute("aria-label", `Preview of ${name}`);
    const text = document.createElement("span");
    text.className = "grow";
    text.textContent = `${name} · ${seconds.toFixed(1)} s · ${(blob.size / 1e6).toFixed(1)} MB`;
    const link = Object.assign(document.createElement("a"), { href: url, download: name, textContent: "Save video" });
    const remove = Object.assign(document.createElement("button"), { type: "button", className: "quiet", textContent: "Discard" });
    remove.onclick = () => {
      URL.revokeObjectURL(url);
      card.remove();
      this.#showCount();
      if (!this.#root.children.length) this.#dialog.close();
    };
    card.replaceChildren(video, text, link, remove);
  }
}

async function paint(context, size, { picture, header, camera, space, views, overlay }) {
  const decoded = await decode(picture);
  if (!decoded) return;
  paintFrame(context, size, decoded);
  if (overlay && camera && header.path) {
    const road = partOf(views, views?.names[0], size);
    within(context, road, (part) => paintPath(context, part, { camera, path: header.path }));
  } else if (overlay && !header.path) paintLegend(context, size, space, header.action);
}
