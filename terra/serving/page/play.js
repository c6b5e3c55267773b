/**
 * The controls of worlds that are not driven, with the methods of `Controls`: buttons for keys and choices, a pad for two
 * numbers of a vector, sliders for more or fewer. They show themselves in the panel beside the picture, and tell what they do by an act
 * message.
 */

import { focusStage, wirePedals } from "./controls.js";
import { assignKeys, direction, label, trigger } from "./keyboard.js";
import { asText } from "./legend.js";

const LONG = 9; // letters from which on a third of the panel is too narrow for a name
const FULL = 0.35; // seconds from one end of a range to the other while a key is held
const DEAD = 0.12; // of a gamepad's axis, where it rests
const STEPS = 200; // of a slider

const element = (id) => document.getElementById(id);

const SHOWN_KEYS = 2; // on a button; the help names all

/**
 * The controls of a space, as the server's `opened` tells it; `onPress()` is called when one is used. `downward` names the
 * numbers that are positive where something moves down.
 */
export const controlsOf = ({ action_space: space, neutral }, downward, onPress) =>
  space.kind === "vector" ? new Numbers(space, neutral, downward, onPress) : new Presses(space, neutral, onPress);

/** Keys, several of them at once, or a choice, of which the last one pressed counts and else the neutral one. */
class Presses {
  clicked; // the name that a press on the picture stands for, or null
  #space;
  #neutral;
  #codes;
  #held = new Map(); // what is held down -> name
  #unseen = new Set(); // pressed, and in no frame yet: a short tap counts for one frame, however slowly these come
  #buttons = new Map();

  constructor(space, neutral, onPress) {
    [this.#space, this.#neutral] = [space, neutral];
    this.#codes = assignKeys(space.names);
    this.clicked = trigger(space.names);
    this.#build(onPress);
  }

  get order() {
    return { type: "act", action: this.#action };
  }

  get held() {
    return this.#held.size > 0;
  }

  get #action() {
    const pressed = [...this.#unseen, ...this.#held.values()];
    if (this.#space.kind === "choice") return pressed.at(-1) ?? this.#neutral;
    return this.#space.names.filter((name) => pressed.includes(name));
  }

  meaning(code) {
    return this.#codes.get(code);
  }

  press(source, name) {
    if (this.#held.get(source) === name) return; // the keyboard's own repetition
    if (this.#space.kind === "choice") this.#unseen.clear();
    this.#held.set(source, name);
    this.#unseen.add(name);
    this.#light();
  }

  release(source) {
    if (this.#held.delete(source)) this.#light();
  }

  releaseAll() {
    this.#held.clear();
    this.reset();
  }

  reset() {
    this.#unseen.clear();
    this.#light();
  }

  /** A frame has come, made with `action`. */
  took({ action }) {
    for (const name of [action].flat()) this.#unseen.delete(name);
    this.#light();
  }

  update() {
    return false;
  }

  #light() {
    const lit = [this.#action].flat();
    for (const [name, button] of this.#buttons) {
      button.classList.toggle("lit", lit.includes(name));
      button.setAttribute("aria-pressed", lit.includes(name));
    }
  }

  #build(onPress) {
    const [arrows, rest] = ["arrows", "others"].map((name) => Object.assign(document.createElement("div"), { className: name }));
    const places = new Set();
    for (const name of this.#space.names) {
      const keys = this.#keysOf(name).slice(0, SHOWN_KEYS);
      const button = Object.assign(document.createElement("button"), { type: "button", title: name });
      button.dataset.hold = name;
      button.addEventListener("pointerup", focusStage);
      button.append(Object.assign(document.createElement("span"), { textContent: name }));
      if (keys.length) button.append(Object.assign(document.createElement("kbd"), { textContent: keys.join(" ") }));
      const place = direction(name);
      const isArrow = place && !places.has(place);
      if (isArrow) button.dataset.place = place;
      if (isArrow) places.add(place);
      (isArrow ? arrows : rest).append(button);
      this.#buttons.set(name, button);
    }
    rest.classList.toggle("long", [...rest.children].some(({ title }) => title.length > LONG));
    element("panel").replaceChildren(...[arrows, rest].filter((each) => each.children.length));
    element("panel").dataset.kind = this.#space.kind;
    wirePedals(element("panel"), () => this, onPress);
    const several = this.#space.kind === "keys" ? "several at once count" : "the last one pressed counts";
    explain([...this.#space.names.map((name) => [this.#keysOf(name), name]), ["these keys", several]]);
    this.#light();
  }

  // What is printed on the keys of a name.
  #keysOf(name) {
    const keys = [...this.#codes].filter(([, each]) => each === name).map(([code]) => label(code));
    if (name === this.clicked) keys.splice(1, 0, "click");
    return [...new Set(keys)];
  }
}

/** A pad for two numbers, else a slider for each. Arrow keys and a gamepad's sticks move the first ones while they are held. */
class Numbers {
  clicked = null;
  #space;
  #neutral;
  #signs; // of each number: -1 where it is positive downward
  #set; // what the sliders were left at
  #now;
  #held = new Map(); // what is held down -> [index, -1 or 1], or [] for a pad or a slider
  #sticks = []; // indices that a gamepad moves
  #rows = [];
  #pad = null;
  #onPress;

  constructor(space, neutral, downward, onPress) {
    this.#space = space;
    this.#signs = space.names.map((name) => (downward.includes(name) ? -1 : 1));
    this.#neutral = space.names.map((name) => neutral[name]);
    this.#set = this.#neutral.slice();
    this.#now = this.#neutral.slice();
    this.#onPress = onPress;
    this.#build();
  }

  get order() {
    return { type: "act", action: Object.fromEntries(this.#space.names.map((name, index) => [name, this.#now[index]])) };
  }

  get held() {
    return this.#held.size > 0;
  }

  meaning(code) {
    const second = this.#now.length > 1 ? 1 : 0;
    const up = second ? this.#signs[second] : 1;
    const meanings = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [second, up], ArrowDown: [second, -up] };
    return meanings[{ KeyD: "ArrowRight", KeyA: "ArrowLeft", KeyW: "ArrowUp", KeyS: "ArrowDown" }[code] ?? code];
  }

  press(source, meaning) {
    this.#held.set(source, meaning);
  }

  release(source) {
    this.#held.delete(source);
  }

  releaseAll() {
    this.#held.clear();
    this.#rest();
  }

  // The sliders stay as they are seen.
  reset() {}

  took() {}

  /** Moves what keys and sticks hold, and what comes back from them; true when a number changed. */
  update(seconds) {
    const { low, high } = this.#space;
    const before = this.#now.slice();
    const sticks = this.#axes();
    this.#now.forEach((value, index) => {
      if (index in sticks) return (this.#now[index] = sticks[index]);
      const [, sign] = [...this.#held.values()].findLast(([each]) => each === index) ?? [];
      const wanted = sign ? (sign > 0 ? high : low)[index] : this.#set[index];
      const step = ((high[index] - low[index]) * seconds) / FULL;
      this.#now[index] = Math.abs(wanted - value) <= step ? wanted : value + Math.sign(wanted - value) * step;
    });
    const started = Object.keys(sticks).some((index) => !this.#sticks.includes(index));
    this.#sticks = Object.keys(sticks);
    if (started) this.#onPress();
    const changed = this.#now.some((value, index) => value !== before[index]);
    if (changed) this.#show();
    return changed;
  }

  // Numbers by index of the axes that are not at rest; up on a stick is more.
  #axes() {
    const pads = [...(navigator.getGamepads?.() ?? [])].filter((each) => each?.connected);
    const axes = (pads[0]?.axes ?? []).slice(0, this.#now.length);
    const moved = axes.map((value, index) => [index, index % 2 ? -value * this.#signs[index] : value]);
    const place = ([index, value]) => {
      const end = (value > 0 ? this.#space.high : this.#space.low)[index];
      const share = Math.min(1, (Math.abs(value) - DEAD) / (1 - DEAD));
      return [index, share * end + (1 - share) * this.#neutral[index]];
    };
    return Object.fromEntries(moved.filter(([, value]) => Math.abs(value) > DEAD).map(place));
  }

  // How far along its range a number lies: 0 to 1.
  #share(index, value) {
    const { low, high } = this.#space;
    return (value - low[index]) / (high[index] - low[index]);
  }

  #rest() {
    this.#set = this.#neutral.slice();
    this.#now = this.#neutral.slice();
    this.#show();
  }

  #show() {
    if (this.#pad) this.#showPad();
    this.#rows.forEach(({ slider, output }, index) => {
      slider.value = this.#now[index];
      slider.style.setProperty("--now", this.#share(index, this.#now[index]));
      output.textContent = asText(this.#space, index, this.#now[index]);
      slider.setAttribute("aria-valuetext", output.textContent);
    });
  }

  #showPad() {
    const [across, up] = this.#now.map((value, index) => this.#share(index, value));
    this.#pad.style.setProperty("--x", across);
    this.#pad.style.setProperty("--y", this.#signs[1] < 0 ? up : 1 - up);
    const text = this.#space.names.map((name, index) => `${name} ${asText(this.#space, index, this.#now[index])}`).join("  ");
    this.#pad.nextElementSibling.textContent = text;
    this.#pad.setAttribute("aria-valuetext", text);
  }

  #build() {
    if (this.#space.names.length === 2) this.#buildPad();
    else this.#buildSliders();
    const [first, second] = this.#space.names;
    const sticks = this.#space.names.slice(0, 4).join(", ");
    const isUp = !second || this.#signs[1] > 0;
    explain([
      [[..."←→AD"], first],
      [isUp ? [..."↓↑SW"] : [..."↑↓WS"], second ?? first],
      ["a gamepad’s sticks", sticks],
    ]);
    this.#show();
  }

  // The knob follows a finger or the mouse, and goes back to the middle when it is let go.
  #buildPad() {
    const pad = (this.#pad = Object.assign(document.createElement("div"), { className: "pad", tabIndex: 0 }));
    pad.setAttribute("role", "slider");
    pad.setAttribute("aria-label", `${this.#space.names.join(" and ")}: drag, or use the arrow keys`);
    pad.append(document.createElement("i"));
    const output = Object.assign(document.createElement("output"), { className: "num" });
    const { low, high } = this.#space;
    const move = (event) => {
      const box = pad.getBoundingClientRect();
      const shares = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
      if (this.#signs[1] > 0) shares[1] = 1 - shares[1];
      this.#set = shares.map((share, index) => low[index] + Math.max(0, Math.min(1, share)) * (high[index] - low[index]));
      this.#now = this.#set.slice();
      this.#show();
    };
    pad.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      pad.setPointerCapture(event.pointerId);
      this.#held.set(pad, []);
      move(event);
      this.#onPress();
    });
    pad.addEventListener("pointermove", (event) => this.#held.has(pad) && move(event));
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) {
      pad.addEventListener(name, () => {
        if (!this.#held.delete(pad)) return;
        this.#set = this.#neutral.slice(); // where the numbers go back to, in #update
        focusStage();
      });
    }
    pad.addEventListener("contextmenu", (event) => event.preventDefault());
    element("panel").replaceChildren(pad, output);
    element("panel").dataset.kind = "pad";
  }

  #buildSliders() {
    const { names, low, high } = this.#space;
    this.#rows = names.map((name, index) => {
      const row = Object.assign(document.createElement("label"), { className: "number" });
      const title = Object.assign(document.createElement("span"), { textContent: name });
      const output = Object.assign(document.createElement("output"), { className: "num" });
      const step = (high[index] - low[index]) / STEPS;
      const slider = Object.assign(document.createElement("input"), { type: "range", min: low[index], max: high[index], step });
      slider.dataset.name = name;
      slider.style.setProperty("--zero", this.#share(index, Math.min(high[index], Math.max(low[index], 0))));
      slider.addEventListener("input", () => {
        // A slider's last step may lie beyond its end by a rounding error.
        const value = Math.min(high[index], Math.max(low[index], Number(slider.value)));
        this.#set[index] = this.#now[index] = value;
        this.#show();
        this.#onPress();
      });
      slider.addEventListener("pointerdown", () => this.#held.set(slider, []));
      slider.addEventListener("pointerup", focusStage);
      for (const name of ["pointerup", "pointercancel"]) slider.addEventListener(name, () => this.#held.delete(slider));
      const head = Object.assign(document.createElement("div"), { className: "head" });
      const [least, most] = [low, high].map((ends) =>
        Object.assign(document.createElement("small"), { textContent: asText({ ...this.#space, units: [] }, index, ends[index]) }),
      );
      head.append(title, output);
      row.append(head, least, slider, most);
      return { row, slider, output };
    });
    const rest = Object.assign(document.createElement("button"), { type: "button", className: "quiet", textContent: "Neutral" });
    rest.onclick = ({ detail }) => {
      this.#rest();
      if (detail > 0) focusStage();
    };
    element("panel").replaceChildren(...this.#rows.map(({ row }) => row), rest);
    element("panel").dataset.kind = "vector";
  }
}

/** Writes the help's rows, [keys (or words for them), what they do] each. */
function explain(rows) {
  const make = (kind, ...content) => {
    const made = document.createElement(kind);
    made.append(...content);
    return made;
  };
  const caps = (keys) => (typeof keys === "string" ? [keys] : keys.flatMap((key) => [make("kbd", key), " "]));
  element("help-actions").replaceChildren(
    ...rows.map(([keys, text]) => make("div", make("dt", ...caps(keys)), make("dd", text))),
  );
}
