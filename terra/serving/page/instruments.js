/** What is written about a drive: its state, the gauges, the captions on the picture and by the slider. */

import { TOP_SPEED } from "./controls.js";
import { words } from "./legend.js";
import { isDriven } from "./world.js";

const element = (id) => document.getElementById(id);
const REAL_TIME = 0.945; // share of the world's rate from which on one does not notice
const MAX_WHEEL = 0.55; // radians; where the bar ends
const PLAY = "M7 4.5v15l12-7.5z";
const PAUSE = "M7 5h3.5v14H7zM13.5 5H17v14h-3.5z";
const STATES = {
  opening: ["idle", "opening"],
  waiting: ["live", "ready"],
  driving: ["live", "driving"],
  paused: ["live", "paused"],
  ended: ["lost", "not connected"],
};

/** Says how the connection is; without a state there is no drive. */
export function showState(state) {
  const [link, word] = STATES[state] ?? ["idle", "not driving"];
  element("link").dataset.state = link;
  element("link-text").textContent = isDriven() ? word : word.replace("driving", "playing");
}

/** The buttons and the slider as the drive allows them; `drive` may be null. */
export function showTools(drive, recordings) {
  const state = drive?.state;
  element("stage").dataset.state = state ?? "";
  const isDriving = state === "driving";
  element("pause").querySelector("path").setAttribute("d", isDriving ? PAUSE : PLAY);
  element("pause").title = isDriven() ? "Drive, pause (Space)" : "Play, pause (P)";
  element("pause").querySelector("span").textContent = isDriving ? "Pause" : isDriven() ? "Drive" : "Play";
  const able = ["waiting", "driving", "paused"].includes(state);
  for (const id of ["pause", "step", "fork"]) element(id).disabled = !able;
  element("draw").disabled = !able || !isDriven();
  element("record").disabled = !recordings.isPossible || (!able && !recordings.isRunning);
  element("record").setAttribute("aria-pressed", recordings.isRunning);
  element("record").querySelector("span").textContent = recordings.isRunning ? "Stop" : "Record";
  element("badge-record").hidden = !recordings.isRunning;
  const slider = element("slider");
  slider.min = drive?.first ?? 0;
  slider.max = Math.max(0, drive?.last ?? 0);
  slider.value = Math.max(0, drive?.viewed ?? 0);
  slider.disabled = !drive || drive.last < 1;
}

/** A button for each of several drives; `onChoose` gets the drive. */
export function showFutures(drives, current, onChoose) {
  const root = element("branches");
  root.hidden = drives.length < 2;
  if (root.children.length !== drives.length) {
    root.replaceChildren(...drives.map(() => Object.assign(document.createElement("button"), { type: "button" })));
  }
  drives.forEach((drive, index) => {
    const button = root.children[index];
    button.onclick = () => onChoose(drive);
    button.textContent = `Future ${letter(index)} · ${drive.frames.length} frames`;
    button.setAttribute("aria-pressed", drive === current);
  });
}

/** The name of the drive of that index: A, B, ... */
export const letter = (index) => String.fromCharCode(65 + (index % 26)) + (index >= 26 ? Math.floor(index / 26) : "");

/** Fills the gauges from a frame's header and from the controls, which are ahead of it while one drives. */
export function showGauges({ header, meters, state, controls, follows }) {
  element("latency").textContent = duration(header.latency_ms);
  if (!isDriven()) return;
  const speed = state === "driving" && !follows ? controls.speed : (header.speed ?? 0);
  element("speed").textContent = Math.round(speed * 3.6);
  element("speed-bar").style.width = `${Math.min(100, (100 * speed) / TOP_SPEED)}%`;
  const degrees = Math.round((controls.steering * 180) / Math.PI);
  const turned = degrees === 0 ? "straight" : `${Math.abs(degrees)}° ${degrees > 0 ? "left" : "right"}`;
  element("steering").textContent = follows ? "your path" : turned;
  const width = Math.min(50, Math.abs(controls.steering / MAX_WHEEL) * 50);
  const bar = element("steering-bar").style;
  bar.width = `${width}%`;
  bar.left = controls.steering > 0 ? `${50 - width}%` : "50%";
  element("driven").textContent = `${Math.round(meters)} m`;
}

/** Writes the frames that come in a second (null for none), and how much slower than the world's own rate that is. */
export function showPace(rate, fps) {
  element("rate").textContent = rate === null ? "–" : rate.toFixed(1);
  const share = rate === null ? 1 : rate / fps;
  element("pace").hidden = share > REAL_TIME;
  if (share > REAL_TIME) return;
  element("pace").textContent = `${share < 0.095 ? share.toFixed(2) : share.toFixed(1)}× real time`;
  element("pace").title = `Slower than real time: ${rate.toFixed(1)} of ${fps.toFixed(1)} frames a second.`;
}

/** Says that what has this name is lost; null: nothing is. */
export function showLost(name) {
  element("lost").hidden = name === null;
  if (name !== null) element("lost-text").textContent = `${name} is lost, and may not come back.`;
}

function duration(milliseconds) {
  if (milliseconds == null) return "–";
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}

/** Writes which frame is shown and what one can do now; `drive` may be null. */
export function showCaptions(drive, { follows, drawing }) {
  const header = drive?.frame?.header;
  const [fps, context] = [drive?.info?.fps ?? 10, drive?.info?.num_context ?? 1];
  const seconds = (index) => Math.max(0, (index - context + 1) / fps).toFixed(1);
  element("time").textContent = header ? `${seconds(drive.viewed)} / ${seconds(drive.last)} s` : "0.0 s";
  const action = header && !header.pose && drive.info ? words(drive.info.action_space, header.action) : "";
  element("did").textContent = action;
  const did = action && `, ${action}`;
  const spoken = header ? `frame ${header.index} of ${drive.last}, ${seconds(drive.viewed)} s${did}` : "";
  element("slider").setAttribute("aria-valuetext", spoken);
  element("badge-frame").textContent = header ? `${header.generated ? "imagined" : "context"} · ${header.index}` : "…";
  element("badge-mode").hidden = !follows && !drawing;
  element("badge-mode").textContent = drawing ? "drawing" : "follows your path";
  element("hint").textContent = hint(drive, drawing);
}

function hint(drive, drawing) {
  const touch = matchMedia("(pointer: coarse)").matches;
  const key = touch ? (isDriven() ? "Drive" : "Play") : isDriven() ? "Space" : "P";
  if (drawing) return "Draw on the road, from the bottom up: the car will follow.";
  switch (drive?.state) {
    case "opening":
      return "Opening …";
    case "waiting":
      if (element("panel").dataset.kind === "pad") return touch ? "Drag the knob, or press Play." : "Drag the knob, or use the arrow keys.";
      if (!isDriven()) return touch ? "Press a control, or Play." : "Use a control to play.";
      return touch ? "Press Gas, or Drive." : "Press ↑ to drive, ← → to steer.";
    case "paused":
      if (drive.atEnd) return "";
      return `${key} ${isDriven() ? "drives" : "goes"} on from here. What comes after is dropped; Fork keeps it.`;
    case "ended":
      return drive.last < 0 ? "" : "Not connected. The frames are still here to look at.";
    default:
      return "";
  }
}

/** The scheme's colors for the map. */
export function mapColors() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  return {
    ground: color("--map-ground"),
    grid: color("--map-grid"),
    muted: color("--muted"),
    accent: color("--accent"),
    ink: color("--ink"),
  };
}
