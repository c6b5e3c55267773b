/** Keys and pedals to steering and speed, both smooth. */

export const WHEELBASE = 2.7; // meters, the server's
export const TOP_SPEED = 14; // m/s
const MAX_STEERING = 0.55; // radians at the wheels, when slow
const SIDEWAYS = 3.5; // m/s^2 that a turn may pull; the wheel turns less when fast
const TURN = 0.9; // rad/s
const RETURN = 1.5;
const GAS = 3; // m/s^2
const BRAKE = 6;

const KEYS = {
  ArrowUp: "gas",
  KeyW: "gas",
  ArrowDown: "brake",
  KeyS: "brake",
  ArrowLeft: "left",
  KeyA: "left",
  ArrowRight: "right",
  KeyD: "right",
};

const approach = (value, target, step) => value + Math.max(-step, Math.min(step, target - value));

export class Controls {
  steering = 0; // radians, left positive
  speed = 0; // m/s
  #held = new Map(); // what is held down -> "gas" | "brake" | "left" | "right"

  press(source, pedal) {
    this.#held.set(source, pedal);
  }

  release(source) {
    this.#held.delete(source);
  }

  releaseAll() {
    this.#held.clear();
  }

  /** Holds the wheel straight and the speed of a frame's header. */
  reset(header) {
    this.steering = 0;
    this.speed = Math.min(TOP_SPEED, Math.max(0, header?.speed ?? 0));
  }

  /** The pedal that a key of the keyboard stands for. */
  meaning(code) {
    return KEYS[code];
  }

  /** What a press on the picture stands for: nothing, in a car. */
  clicked = null;

  // A frame has come, made with an earlier order.
  took() {}

  get order() {
    return { type: "control", steering: this.steering, speed: this.speed };
  }

  is(pedal) {
    return [...this.#held.values()].includes(pedal);
  }

  get held() {
    return this.#held.size > 0;
  }

  /** Moves wheel and speed on by `seconds` while the car drives; true when something changed. */
  update(seconds, drives) {
    if (!drives) return false;
    const before = [this.steering, this.speed];
    const limit = Math.min(MAX_STEERING, Math.atan((SIDEWAYS * WHEELBASE) / Math.max(this.speed, 0.1) ** 2));
    const wanted = (this.is("left") ? limit : 0) - (this.is("right") ? limit : 0);
    const rate = wanted === 0 || wanted * this.steering < 0 ? RETURN : TURN;
    this.steering = approach(this.steering, wanted, rate * seconds);
    if (this.is("brake")) this.speed = Math.max(0, this.speed - BRAKE * seconds);
    else if (this.is("gas")) this.speed = Math.min(TOP_SPEED, this.speed + GAS * seconds);
    return before[0] !== this.steering || before[1] !== this.speed;
  }
}

/** Where the car would go in the next `seconds` with this wheel and speed: [[x forward, y left], ...], meters. */
export function arc(steering, speed, seconds = 3, points = 30) {
  const turn = (speed * Math.tan(steering)) / WHEELBASE; // rad/s
  return Array.from({ length: points }, (_, index) => {
    const time = (seconds * (index + 1)) / points;
    if (Math.abs(turn) < 1e-6) return [speed * time, 0];
    return [(speed / turn) * Math.sin(turn * time), (speed / turn) * (1 - Math.cos(turn * time))];
  });
}

/** Gives the keys to the picture, after a click on something that would take them. */
export const focusStage = () => document.getElementById("stage").focus({ preventScroll: true, focusVisible: false });

/** Buttons with data-hold press their pedal of `controls()` as long as a finger, a pointer or Space and Enter hold them. */
export function wirePedals(root, controls, onPress) {
  for (const button of root.querySelectorAll("[data-hold]")) {
    const pedal = button.dataset.hold;
    const down = () => {
      controls().press(button, pedal);
      button.classList.add("held");
      onPress();
    };
    const up = () => {
      controls().release(button);
      button.classList.remove("held");
    };
    button.addEventListener("pointerdown", (event) => {
      down();
      button.setPointerCapture(event.pointerId);
    });
    for (const name of ["pointerup", "pointercancel", "lostpointercapture", "blur"]) button.addEventListener(name, up);
    button.addEventListener("keydown", (event) => {
      if (event.code !== "Space" && event.code !== "Enter") return;
      event.preventDefault();
      event.stopPropagation();
      if (!event.repeat) down();
    });
    button.addEventListener("keyup", up);
    button.addEventListener("contextmenu", (event) => event.preventDefault());
  }
}

/** A press of mouse or finger on the picture, as long as it is held, is what `controls().clicked` says. */
export function wirePicture(picture, controls, onPress) {
  picture.addEventListener("pointerdown", (event) => {
    const pedal = controls().clicked;
    if (!pedal || event.button !== 0 || event.target.closest("button")) return;
    picture.setPointerCapture(event.pointerId);
    controls().press(picture, pedal);
    onPress();
  });
  for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) {
    picture.addEventListener(name, () => controls().release(picture));
  }
}

const down = new Set(); // codes of the keys that are held, whatever they mean

/** Presses what the keys that are held mean to these controls, which were not there when they went down. */
export function pressHeldKeys(controls) {
  for (const code of down) if (controls.meaning(code)) controls.press(code, controls.meaning(code));
}

/**
 * Presses the pedals of `controls()` by keys of the window while `isOn()`: `onPress()` follows. Other keys go to `onKey(event)`, which says
 * whether they mean something. Fields, buttons and sliders keep the keys that they use themselves.
 */
export function wireKeys(controls, { isOn, onPress, onKey }) {
  window.addEventListener("keydown", (event) => {
    if (event.metaKey || event.altKey) return;
    const field = event.target.closest("input:not([type=range]), select, textarea");
    const button = event.target.closest("button, a, summary, video");
    const slider = event.target.closest("input[type=range]");
    if (field || (button && event.code === "Space") || (slider && event.code.startsWith("Arrow"))) return;
    const pedal = controls().meaning(event.code);
    // Ctrl with another key is the browser's, but where Ctrl itself is a control it may be held beside others.
    if (event.ctrlKey && !(pedal && controls().meaning("ControlLeft"))) return;
    down.add(event.code);
    if (!isOn()) return;
    if (pedal) {
      controls().press(event.code, pedal);
      if (!event.repeat) onPress();
    } else if (!onKey(event)) return;
    event.preventDefault();
  });
  window.addEventListener("keyup", (event) => {
    down.delete(event.code);
    controls().release(event.code);
  });
  window.addEventListener("blur", () => {
    down.clear();
    controls().releaseAll();
  });
  // Ctrl + W closes a tab, and no page can keep the keys: while Ctrl is a control that is held, the browser asks.
  window.addEventListener("beforeunload", (event) => {
    const isHeld = ["ControlLeft", "ControlRight"].some((code) => down.has(code) && controls().meaning(code));
    if (isOn() && isHeld) event.preventDefault();
  });
}
