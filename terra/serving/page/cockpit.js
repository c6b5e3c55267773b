/** The drive's view: it wires keys, pedals, buttons and the slider to a drive, and draws what the drive shows. */

import { arc, Controls, wirePedals } from "./controls.js";
import { Drive } from "./drive.js";
import { mapColors, showCaptions, showGauges, showState } from "./instruments.js";
import { drawMap } from "./map.js";
import { hush, notify, say } from "./notice.js";
import { strokeToPath } from "./overlay.js";
import { Recordings } from "./recordings.js";
import { decode, paintFrame, paintPath, paintStroke, wireStroke } from "./stage.js";

const element = (id) => document.getElementById(id);
const PLAY = "M7 4.5v15l12-7.5z";
const PAUSE = "M7 5h3.5v14H7zM13.5 5H17v14h-3.5z";
const SEND_EVERY = 50; // milliseconds between controls, as those below
const KEEP_ALIVE_EVERY = 20_000;
const KEEP_ALIVE = 600_000; // after the last key or touch
const DARK = matchMedia("(prefers-color-scheme: dark)");
export class Cockpit {
  #drives = [];
  #drive = null;
  #controls = new Controls();
  #callbacks;
  #recordings = new Recordings(element("recordings"), (text) => say(text));
  #picture = null;
  #pictureOf = null;
  #overlay = true;
  #whole = false;
  #drawing = false;
  #stroke = null;
  #follows = null; // the path message that the car follows, instead of the wheel
  #dirty = true;
  #colors = null;
  #sent = { steering: 0, speed: 0, time: 0 };
  #last = performance.now();
  #touched = Date.now();

  /** `callbacks`: onLeave(), onRestart(), and onEnded(detail, hasFrames) when a session ends by itself. */
  constructor(callbacks) {
    this.#callbacks = callbacks;
    this.#wireButtons();
    this.#wireKeys();
    wireStroke(element("view"), {
      isOn: () => this.#drawing,
      onChange: (stroke) => {
        this.#stroke = stroke;
        this.#dirty = true;
      },
      onEnd: (stroke, size) => this.#follow(stroke, size),
    });
    wirePedals(element("drive"), this.#controls, () => this.#pressed());
    new ResizeObserver(() => this.#resize()).observe(element("stage"));
    DARK.addEventListener("change", () => {
      this.#colors = null;
      this.#dirty = true;
    });
    for (const name of ["keydown", "pointerdown"]) window.addEventListener(name, () => (this.#touched = Date.now()), true);
    setInterval(() => this.#keepAlive(), KEEP_ALIVE_EVERY);
    document.addEventListener("visibilitychange", () => document.hidden && this.#drive?.pause());
    requestAnimationFrame((now) => this.#tick(now));
  }

  open(opening) {
    this.close();
    this.#show(this.#begin(opening));
    focusStage();
  }

  close() {
    this.#recordings.stop();
    this.#setDrawing(false);
    for (const drive of this.#drives) drive.close();
    this.#drives = [];
    this.#drive = null;
    this.#picture = this.#pictureOf = this.#follows = null;
    this.#controls.releaseAll();
    this.#refresh();
  }

  pause() {
    this.#drive?.pause();
  }

  #begin(opening, past) {
    const drive = new Drive(opening, past);
    drive.addEventListener("change", () => {
      if (drive !== this.#drive) return;
      this.#refresh();
      // A key that is held since before the session opened.
      if (drive.state === "waiting" && this.#controls.held && drive.atEnd) this.#go();
    });
    drive.addEventListener("shown", ({ detail }) => drive === this.#drive && this.#shown(detail?.isNew));
    drive.addEventListener("forked", ({ detail }) => this.#forked(drive, detail));
    drive.addEventListener("refused", ({ detail }) => {
      if (drive === this.#drive) notify(`The server refused that: ${detail.message}.`, [["Close", hush]]);
    });
    drive.addEventListener("ended", ({ detail }) => {
      if (drive !== this.#drive) return;
      if (opening.fork && !detail.opened && detail.error) return this.#takeBack(drive, detail.error.message);
      this.#recordings.stop();
      this.#callbacks.onEnded(detail, drive.frames.length > 0);
    });
    this.#drives.push(drive);
    return drive;
  }

  #show(drive) {
    this.#drive?.pause();
    this.#drive = drive;
    this.#pictureOf = this.#follows = null;
    this.#controls.reset(drive.frame?.header.speed ?? 0);
    this.#shown(false);
    this.#refresh();
  }

  #forked(drive, fork) {
    const { format, quality } = drive.opening;
    this.#show(this.#begin({ fork, format, quality }, drive.frames.slice(0, drive.base + 1)));
    say(`Future ${letter(this.#drives.length - 1)} begins at this frame.`);
  }

  // A fork that could not be opened: the drive that it came from is shown again.
  #takeBack(drive, reason) {
    this.#drives = this.#drives.filter((each) => each !== drive);
    this.#show(this.#drives.at(-1));
    notify(`The fork can’t begin: ${reason}.`, [["Close", hush]]);
  }

  // A new frame to look at: it is decoded, then drawn.
  async #shown(isNew) {
    const frame = this.#drive?.frame;
    if (!frame) return;
    if (this.#drive.state === "waiting") this.#controls.reset(frame.header.speed ?? 0);
    if (isNew) this.#recordings.add({ ...frame, camera: this.#drive.info?.camera, overlay: this.#overlay });
    const drive = this.#drive;
    const picture = await decode(frame.picture);
    drive.taken(frame.header.index);
    if (frame !== this.#drive?.frame) return;
    [this.#picture, this.#pictureOf] = [picture, frame];
    element("stage").dataset.frame = frame.header.index;
    this.#resize();
    this.#dirty = true;
  }

  get #order() {
    return this.#follows ?? { type: "control", steering: this.#controls.steering, speed: this.#controls.speed };
  }

  #go() {
    const drive = this.#drive;
    if (!drive) return;
    if (drive.state === "driving") return drive.pause();
    if (!drive.atEnd) {
      this.#follows = null;
      this.#controls.reset(drive.frame.header.speed ?? 0);
    }
    this.#note();
    // A path that is followed already lies on the server; sent again it would begin at the car anew.
    drive.go(this.#follows && drive.state === "paused" ? { type: "resume" } : this.#order);
  }

  #pressed() {
    if (this.#follows) {
      this.#follows = null;
      this.#controls.reset(this.#drive?.frame?.header.speed ?? 0);
      this.#sent = { steering: NaN, speed: NaN, time: 0 }; // so that the wheel is told even if it stands as before
    }
    if (this.#drive?.state === "waiting") this.#go();
  }

  // A server ends a session that says nothing; one who looks at a paused picture should have it a while longer.
  #keepAlive() {
    if (Date.now() - this.#touched > KEEP_ALIVE) return;
    for (const drive of this.#drives) if (drive.last >= 0) drive.taken(drive.frames[drive.last].header.index);
  }

  #note() {
    this.#sent = { steering: this.#controls.steering, speed: this.#controls.speed, time: performance.now() };
  }

  #tick(now) {
    const seconds = Math.min(0.1, (now - this.#last) / 1000);
    this.#last = now;
    const { state, info, rate } = this.#drive ?? {};
    if (state === "driving" && !this.#follows) {
      // A slow model lives in slow time: the wheel must not be through before the next frame shows it.
      const pace = rate ? Math.max(0.15, Math.min(1, rate / info.fps)) : 1;
      if (this.#controls.update(seconds * pace)) this.#dirty = true;
      const { steering, speed, time } = this.#sent;
      const changed = steering !== this.#controls.steering || speed !== this.#controls.speed;
      if (changed && now - time >= SEND_EVERY) {
        this.#note();
        this.#drive.control(this.#controls.steering, this.#controls.speed);
      }
    }
    if (this.#dirty && this.#drive) this.#draw();
    requestAnimationFrame((next) => this.#tick(next));
  }

  #draw() {
    this.#dirty = false;
    const { frame, info, frames, viewed, state, atEnd } = this.#drive;
    const canvas = element("view");
    const [context, size] = [canvas.getContext("2d"), [canvas.width, canvas.height]];
    if (!frame) return context.clearRect(0, 0, ...size);
    if (!this.#picture || !this.#pictureOf) return; // the one before stays until this one is decoded
    paintFrame(context, size, this.#picture);
    const { header } = this.#pictureOf;
    const camera = info?.camera;
    const { steering, speed } = this.#controls;
    if (this.#overlay && camera && !this.#stroke) {
      const steers = state === "driving" && atEnd && !this.#follows && Math.abs(steering) > 0.005;
      paintPath(context, size, { camera, path: header.path, wheel: steers ? arc(steering, speed) : null });
    }
    if (this.#stroke && camera) {
      const path = strokeToPath(this.#stroke, camera, size, header.speed ?? 5)?.points;
      paintStroke(context, size, { camera, stroke: this.#stroke, path });
    }
    const { rate } = this.#drive;
    showGauges({ header, metres: this.#pictureOf.metres, state, rate, controls: this.#controls, follows: this.#follows });
    const poses = frames.map((each) => each.header.pose);
    this.#colors ??= mapColors();
    const [path, colors] = [header.path ?? [], this.#colors];
    drawMap(element("map"), { poses, current: viewed, path, whole: this.#whole, colors });
  }

  #refresh() {
    this.#dirty = true;
    const drive = this.#drive;
    const state = drive?.state ?? "opening";
    showState(drive && state);
    element("stage").dataset.state = drive ? state : "";
    const isDriving = state === "driving";
    element("pause").querySelector("path").setAttribute("d", isDriving ? PAUSE : PLAY);
    element("pause").querySelector("span").textContent = isDriving ? "Pause" : "Drive";
    const able = ["waiting", "driving", "paused"].includes(state);
    for (const id of ["pause", "step", "fork", "draw"]) element(id).disabled = !able;
    element("record").disabled = !this.#recordings.isPossible || (!able && !this.#recordings.isRunning);
    element("record").setAttribute("aria-pressed", this.#recordings.isRunning);
    element("record").querySelector("span").textContent = this.#recordings.isRunning ? "Stop" : "Record";
    element("badge-record").hidden = !this.#recordings.isRunning;
    const slider = element("slider");
    slider.min = drive?.first ?? 0;
    slider.max = Math.max(0, drive?.last ?? 0);
    slider.value = Math.max(0, drive?.viewed ?? 0);
    slider.disabled = !drive || drive.last < 1;
    showCaptions(drive, { follows: this.#follows, drawing: this.#drawing });
    this.#showBranches();
  }

  #showBranches() {
    const root = element("branches");
    root.hidden = this.#drives.length < 2;
    if (root.children.length !== this.#drives.length) {
      root.replaceChildren(...this.#drives.map((drive) => {
        const button = document.createElement("button");
        button.type = "button";
        button.onclick = () => this.#show(drive);
        return button;
      }));
    }
    this.#drives.forEach((drive, index) => {
      const button = root.children[index];
      button.textContent = `Future ${letter(index)} · ${drive.frames.length} frames`;
      button.setAttribute("aria-pressed", drive === this.#drive);
    });
  }

  #setDrawing(on) {
    this.#drawing = on;
    this.#stroke = null;
    element("draw").setAttribute("aria-pressed", on);
    element("stage").classList.toggle("drawing", on);
    this.#refresh();
  }

  #actions = {
    pause: () => this.#go(),
    step: () => {
      this.#note();
      this.#drive?.step(this.#order);
    },
    restart: () => this.#callbacks.onRestart(),
    fork: () => this.#drive?.fork(),
    draw: () => {
      if (!this.#drawing) this.#drive?.pause();
      this.#setDrawing(!this.#drawing);
    },
    overlay: () => {
      this.#overlay = !this.#overlay;
      element("overlay").setAttribute("aria-pressed", this.#overlay);
      this.#dirty = true;
    },
    "map-mode": () => {
      this.#whole = !this.#whole;
      element("map-mode").setAttribute("aria-pressed", this.#whole);
      this.#dirty = true;
    },
    record: () => {
      const fps = this.#drive?.info?.fps ?? 10;
      const [height, width] = this.#drive?.info?.size ?? [144, 256];
      this.#recordings.toggle({ fps, size: enlarged(width, height) });
      this.#refresh();
    },
    leave: () => this.#callbacks.onLeave(),
  };

  #wireButtons() {
    for (const [id, action] of Object.entries(this.#actions)) {
      element(id).addEventListener("click", (event) => {
        action();
        // After a click of the mouse the keys are the car's again; who came by Tab stays where they are.
        if (event.detail > 0 && id !== "leave") focusStage();
      });
    }
    const slider = element("slider");
    slider.addEventListener("input", () => this.#drive?.look(Number(slider.value)));
    slider.addEventListener("pointerup", () => focusStage());
    element("stage").addEventListener("pointerdown", () => focusStage());
  }

  #wireKeys() {
    const keys = {
      Space: "pause", Period: "step", KeyR: "restart", KeyF: "fork", KeyP: "draw", KeyO: "overlay", KeyM: "map-mode", KeyV: "record",
    };
    window.addEventListener("keydown", (event) => {
      if (!this.#drive || event.ctrlKey || event.metaKey || event.altKey || element("help").open) return;
      const field = event.target.closest("input:not([type=range]), select, textarea");
      const control = event.target.closest("button, a, summary, video");
      const slider = event.target.closest("input[type=range]");
      if (field || (control && event.code === "Space") || (slider && event.code.startsWith("Arrow"))) return;
      if (event.code === "Escape" && this.#drawing) return this.#setDrawing(false);
      const pedal = Controls.pedal(event);
      const action = keys[event.code];
      if (pedal) {
        this.#controls.press(event.code, pedal);
        if (!event.repeat) this.#pressed();
      } else if (action && !event.repeat && !element(action).disabled) this.#actions[action]();
      else if (event.code === "Comma" || event.key === ";") {
        this.#drive.look(this.#drive.viewed + (event.key === ";" ? 1 : -1));
      } else if (!action) return;
      event.preventDefault();
    });
    window.addEventListener("keyup", (event) => this.#controls.release(event.code));
    window.addEventListener("blur", () => this.#controls.releaseAll());
  }

  #follow(stroke, size) {
    const { info, frame } = this.#drive;
    const path = info && strokeToPath(stroke, info.camera, size, frame.header.speed ?? 5);
    if (!path) return (element("hint").textContent = "That was too short. Draw a line on the road, from the bottom up.");
    this.#setDrawing(false);
    this.#controls.steering = 0;
    this.#drive.go(path);
    this.#follows = path;
    this.#refresh();
  }

  #resize() {
    const canvas = element("view");
    const [height, width] = this.#drive?.info?.size ?? [144, 256];
    const wide = Math.round(element("stage").clientWidth * Math.min(devicePixelRatio, 2));
    const high = Math.round((wide * height) / width);
    if (!wide || (canvas.width === wide && canvas.height === high)) return;
    [canvas.width, canvas.height] = [wide, high];
    this.#dirty = true;
  }
}

const focusStage = () => element("stage").focus({ preventScroll: true, focusVisible: false });

const letter = (index) => String.fromCharCode(65 + (index % 26)) + (index >= 26 ? Math.floor(index / 26) : "");

/** About 1024 pixels wide, whole times the frame, even as H.264 wants it: [width, height]. */
function enlarged(width, height) {
  const times = Math.max(1, Math.round(1024 / width));
  return [width, height].map((side) => 2 * Math.ceil((side * times) / 2));
}
