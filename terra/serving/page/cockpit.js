/** Whoever drives: keys, pedals, buttons and the slider, what they do to a drive, and its futures side by side. */

import { Controls, focusStage, pressHeldKeys, wireKeys, wirePedals, wirePicture } from "./controls.js";
import { Drive } from "./drive.js";
import { letter, showCaptions, showFutures, showGauges, showLost, showPace, showState, showTools } from "./instruments.js";
import { Lookout } from "./lookout.js";
import { areSeveral, showModel } from "./models.js";
import { hush, notify, say } from "./notice.js";
import { strokeToPath } from "./overlay.js";
import { controlsOf } from "./play.js";
import { Recordings } from "./recordings.js";
import { View } from "./view.js";
import { isDriven, showWorld } from "./world.js";

const element = (id) => document.getElementById(id);
const SEND_EVERY = 50; // milliseconds between controls, as those below
const KEEP_ALIVE_EVERY = 20_000;
const KEEP_ALIVE = 600_000; // after the last key or touch
const SLOWEST = 0.02; // pace of the wheel, of a model that takes seconds for a frame
const UNKNOWN_PACE = 0.1; // until two frames have come

const PACE_EVERY = 250; // milliseconds: the rate falls while no frame comes

const KEYS = {
  Space: "pause", // unless a control has it
  Period: "step",
  KeyR: "restart",
  KeyB: "fork",
  KeyO: "overlay",
  KeyM: "map-mode",
  KeyV: "record",
};

export class Cockpit {
  #drives = [];
  #drive = null;
  #car = new Controls();
  #controls = this.#car; // until a session says that its actions are others
  #space = null; // of these controls, as text
  #downward = []; // as in v1/worlds
  #subject = null; // what may be lost from view, as in v1/worlds
  #paced = 0; // when the rate was last written
  #callbacks;
  #recordings = new Recordings((text) => say(text));
  #view = new View((stroke, size) => this.#follow(stroke, size));
  #follows = null; // the path message that the car follows, instead of the wheel
  #sent = { order: "", time: 0 };
  #last = performance.now();
  #touched = Date.now();

  /**
   * `callbacks`: onLeave(), onRestart(), onOpened(info) with the server's `opened`, and onEnded(detail, hasFrames) when a
   * session ends by itself.
   */
  constructor(callbacks) {
    this.#callbacks = callbacks;
    this.#wireButtons();
    wireKeys(() => this.#controls, {
      isOn: () => this.#drive && !document.querySelector("dialog[open]"),
      onPress: () => this.#pressed(),
      onKey: (event) => this.#key(event),
    });
    wirePedals(element("drive"), () => this.#controls, () => this.#pressed());
    wirePicture(element("stage"), () => this.#controls, () => this.#pressed());
    for (const name of ["keydown", "pointerdown"]) window.addEventListener(name, () => (this.#touched = Date.now()), true);
    setInterval(() => this.#keepAlive(), KEEP_ALIVE_EVERY);
    document.addEventListener("visibilitychange", () => document.hidden && this.#drive?.pause());
    requestAnimationFrame((now) => this.#tick(now));
  }

  /** Shows the controls of a world before a session has opened: `model` as in v1/models, `world` as in v1/worlds. */
  prepare(model, world) {
    this.#downward = world?.downward ?? [];
    this.#subject = world?.subject ?? null;
    this.#meet(model);
  }

  /** What is held by now counts as soon as the session can be driven. */
  open(opening) {
    this.#end();
    this.#show(this.#begin(opening));
    pressHeldKeys(this.#controls);
    focusStage();
  }

  close() {
    this.#end();
    this.#controls.releaseAll();
  }

  #end() {
    this.#recordings.stop();
    this.#setDrawing(false);
    for (const drive of this.#drives) drive.close();
    this.#drives = [];
    this.#drive = null;
    this.#follows = null;
    this.#view.forget();
    showLost(null);
    this.#refresh();
  }

  pause() {
    this.#drive?.pause();
  }

  #begin(opening, past) {
    const drive = new Drive(opening, past);
    if (this.#subject) drive.lookout = new Lookout(this.#subject);
    drive.addEventListener("change", () => {
      if (drive !== this.#drive) return;
      if (drive.info) this.#meet(drive.info);
      this.#refresh();
      // A key that is held since before the session opened.
      if (drive.state === "waiting" && this.#controls.held && drive.atEnd) this.#go();
    });
    drive.addEventListener("opened", () => this.#callbacks.onOpened(drive.info));
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

  // The controls of the world that a session has, which are made anew only for another world.
  #meet(info) {
    this.#view.cameras.offer(info.views);
    const space = JSON.stringify(info.action_space);
    if (space === this.#space) return;
    this.#space = space;
    showWorld(info.action_space);
    this.#controls.releaseAll();
    this.#controls = isDriven() ? this.#car : controlsOf(info, this.#downward, () => this.#pressed());
    element("stage").classList.toggle("pressed", this.#controls.clicked !== null);
    // The path belongs to the road; a legend would cover what is played.
    this.#setOverlay(isDriven());
    pressHeldKeys(this.#controls);
  }

  #show(drive) {
    this.#drive?.pause();
    this.#drive = drive;
    this.#follows = null;
    this.#view.forget({ keepPicture: true });
    showLost(null);
    this.#controls.reset(drive.frame?.header);
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
    const drive = this.#drive;
    if (drive.state === "waiting") this.#controls.reset(frame.header);
    if (isNew) {
      const { camera, action_space: space, views } = drive.info;
      this.#controls.took(frame.header);
      this.#recordings.add({ ...frame, camera, space, views, overlay: this.#view.overlay });
    }
    await this.#view.show(frame, drive.info?.size);
    drive.taken(frame.header.index);
    this.#watch(drive, frame);
  }

  // Says it where what one plays with has not been seen for some frames.
  #watch(drive, frame) {
    if (!this.#subject || drive !== this.#drive || frame !== this.#view.frame || !this.#view.pixels) return;
    const isLost = drive.lookout.isLost(frame.header.index, this.#view.pixels);
    if (isLost && element("lost").hidden) say(`${this.#subject.name} is lost.`);
    showLost(isLost ? this.#subject.name : null);
  }

  get #order() {
    return this.#follows ?? this.#controls.order;
  }

  #go() {
    const drive = this.#drive;
    if (!drive) return;
    if (drive.state === "driving") return drive.pause();
    if (!drive.atEnd) {
      this.#follows = null;
      this.#controls.reset(drive.frame.header);
    }
    this.#note();
    // A path that is followed already lies on the server; sent again it would begin at the car anew.
    drive.go(this.#follows && drive.state === "paused" ? { type: "resume" } : this.#order);
  }

  #pressed() {
    if (this.#follows) {
      this.#follows = null;
      this.#controls.reset(this.#drive?.frame?.header);
      this.#sent = { order: "", time: 0 }; // so that the wheel is told even if it stands as before
    }
    if (this.#drive?.state === "waiting") this.#go();
  }

  // A server ends a session that says nothing; one who looks at a paused picture should have it a while longer.
  #keepAlive() {
    if (Date.now() - this.#touched > KEEP_ALIVE) return;
    for (const drive of this.#drives) if (drive.last >= 0) drive.taken(drive.frames[drive.last].header.index);
  }

  #note() {
    this.#sent = { order: JSON.stringify(this.#controls.order), time: performance.now() };
  }

  #tick(now) {
    const seconds = Math.min(0.1, (now - this.#last) / 1000);
    this.#last = now;
    const { state, info, rate } = this.#drive ?? {};
    const drives = state === "driving" && !this.#follows;
    // A slow model lives in slow time: the wheel must not be through before the next frame shows it.
    const pace = !isDriven() ? 1 : rate ? Math.max(SLOWEST, Math.min(1, rate / info.fps)) : UNKNOWN_PACE;
    if (this.#drive && this.#controls.update(seconds * pace, drives)) this.#view.touch();
    if (drives && now - this.#sent.time >= SEND_EVERY && this.#sent.order !== JSON.stringify(this.#controls.order)) {
      this.#note();
      this.#drive.control(this.#controls.order);
    }
    if (this.#drive) this.#paint();
    if (now - this.#paced >= PACE_EVERY) {
      this.#paced = now;
      showPace(state === "driving" ? rate : null, info?.fps);
    }
    requestAnimationFrame((next) => this.#tick(next));
  }

  #paint() {
    const [drive, controls, follows] = [this.#drive, this.#controls, this.#follows];
    const { state } = drive;
    const steers = isDriven() && state === "driving" && drive.atEnd && !follows && Math.abs(controls.steering) > 0.005;
    if (this.#view.paint({ drive, wheel: steers ? controls : null })) {
      const { header, meters } = this.#view.frame;
      showGauges({ header, meters, state, controls, follows });
    }
  }

  #refresh() {
    this.#view.touch();
    const drive = this.#drive;
    showState(drive?.state);
    showModel(drive?.info?.model);
    showTools(drive, this.#recordings);
    showCaptions(drive, { follows: this.#follows, drawing: this.#view.drawing });
    showFutures(this.#drives, drive, (each) => this.#show(each));
  }

  #setOverlay(on) {
    this.#view.overlay = on;
    element("overlay").setAttribute("aria-pressed", on);
    this.#view.touch();
  }

  #setDrawing(on) {
    this.#view.drawing = on;
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
      if (!this.#view.drawing) this.#drive?.pause();
      this.#setDrawing(!this.#view.drawing);
    },
    overlay: () => this.#setOverlay(!this.#view.overlay),
    "map-mode": () => {
      this.#view.whole = !this.#view.whole;
      element("map-mode").setAttribute("aria-pressed", this.#view.whole);
      this.#view.touch();
    },
    record: () => {
      const fps = this.#drive?.info?.fps ?? 10;
      const [height, width] = this.#drive?.info?.size ?? [144, 256];
      const model = areSeveral() ? this.#drive?.info?.model : null;
      if (this.#recordings.isRunning) this.#drive?.pause(); // the video is shown over the picture
      this.#recordings.toggle({ fps, size: enlarged(width, height), model });
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
    element("lost-restart").addEventListener("click", () => this.#callbacks.onRestart());
  }

  // A key that is no pedal; true if it means something.
  #key(event) {
    const action = event.code === "KeyP" ? (isDriven() ? "draw" : "pause") : KEYS[event.code];
    if (event.code === "Escape" && this.#view.drawing) this.#setDrawing(false);
    else if (action) !event.repeat && !element(action).disabled && this.#actions[action]();
    else if (event.code === "Comma" || event.key === ";") this.#drive.look(this.#drive.viewed + (event.key === ";" ? 1 : -1));
    else return false;
    return true;
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
}

/** About 1024 pixels wide, whole times the frame, even as H.264 wants it: [width, height]. */
function enlarged(width, height) {
  const times = Math.max(1, Math.round(1024 / width));
  return [width, height].map((side) => 2 * Math.ceil((side * times) / 2));
}
