/** A drive: a live session with the frames that it has shown, and which of them is looked at. */

import { Live } from "./live.js";
import { Rate } from "./rate.js";

const KEPT = 6000; // pictures, about 100 MB

const distance = ([x0, y0], [x1, y1]) => Math.hypot(x1 - x0, y1 - y0);

/**
 * `state` is "opening", "waiting" (context frames are there, nothing drives yet), "driving", "paused" or "ended".
 * Events: `opened` when there is `info`, `change` (state or the frame looked at), `shown` (a new frame is looked at), `forked` with the fork's id,
 * `refused` with an error message that does not end the session, `ended` as Live sends it.
 */
export class Drive extends EventTarget {
  state = "opening";
  frames = []; // {header, picture (a Blob; null of the oldest of many), meters driven}
  viewed = -1;
  info = null; // the server's "opened"
  lookout = null; // of whoever watches the pictures
  #live;
  #rewinding = null; // what to do once the server has rewound; frames until then are of the past
  #rate = new Rate();

  constructor(opening, past = []) {
    super();
    this.opening = opening;
    this.frames = past.slice();
    this.#live = new Live(opening);
    this.#live.addEventListener("message", ({ detail }) => this.#receive(detail));
    this.#live.addEventListener("frame", ({ detail }) => this.#add(detail));
    this.#live.addEventListener("ended", ({ detail }) => this.#end(detail));
  }

  get last() {
    return this.frames.length - 1;
  }

  /** The oldest frame whose picture is kept. */
  get first() {
    return Math.max(0, this.frames.length - KEPT);
  }

  get frame() {
    return this.frames[this.viewed] ?? null;
  }

  /** The frame to drive on from: the one looked at, or the last context frame if that is later. */
  get base() {
    return Math.min(this.last, Math.max(this.viewed, (this.info?.num_context ?? 1) - 1));
  }

  get atEnd() {
    return this.viewed === this.last;
  }

  /** Frames that come in a second while one drives; null before the first. */
  get rate() {
    return this.#rate.at(performance.now());
  }

  control(order) {
    if (this.state === "driving") this.#live.send(order);
  }

  /** Drives on from the frame looked at; what lay after it is dropped. `action` is a control, path or act message. */
  go(action) {
    if (!["waiting", "paused", "driving"].includes(this.state)) return;
    const wasPaused = this.state === "paused";
    const go = () => {
      this.#live.send(action);
      if (wasPaused) this.#live.send({ type: "resume" });
    };
    if (this.base === this.last) go();
    else this.#rewind(go);
    this.viewed = this.base;
    if (this.state !== "driving") this.#rate.begin(performance.now());
    this.#set("driving");
  }

  /** Acknowledges a frame: called when it is on the screen, so that a slow one is not flooded. */
  taken(index) {
    this.#live.send({ type: "ack", index });
  }

  pause() {
    if (this.state !== "driving") return;
    this.#live.send({ type: "pause" });
    this.#rate.end();
    this.#set("paused");
  }

  /** One frame more, after the one looked at, with `action` as in `go`. */
  step(action) {
    if (this.state === "driving") this.pause();
    if (this.state !== "waiting" && this.state !== "paused") return;
    // A control would start a session that waits.
    if (this.state === "waiting") this.#live.send({ type: "pause" });
    const step = () => {
      this.#live.send(action);
      this.#live.send({ type: "step" });
    };
    if (this.base === this.last) step();
    else this.#rewind(step);
    this.#set("paused");
  }

  /** Looks at frame `index`; the session is paused while one looks back. */
  look(index) {
    const next = Math.max(this.first, Math.min(this.last, index));
    if (next === this.viewed) return;
    if (next < this.last) this.pause();
    this.viewed = next;
    this.#emit("shown");
    this.#emit("change");
  }

  fork() {
    if (this.state === "ended" || this.state === "opening") return;
    this.pause();
    this.#live.send({ type: "fork", frame: this.base });
  }

  close() {
    this.#live.close();
    if (this.state !== "ended") this.#set("ended");
  }

  #rewind(then) {
    this.#rewinding = then;
    this.#live.send({ type: "rewind", frame: this.base });
  }

  #receive(message) {
    if (message.type === "opened") {
      this.info = message;
      this.#emit("opened");
    } else if (message.type === "rewound") {
      this.frames.length = Math.min(this.frames.length, message.frame + 1);
      this.viewed = this.last;
      this.#rewinding?.();
      this.#rewinding = null;
      this.#emit("shown");
      this.#emit("change");
    } else if (message.type === "forked") this.#emit("forked", message.fork);
    else if (message.type === "error" && this.info) {
      if (this.#rewinding) this.#set("paused");
      this.#rewinding = null;
      this.#emit("refused", message);
    }
  }

  #add({ header, picture }) {
    if (this.#rewinding) return;
    const follows = this.atEnd || this.viewed < 0;
    const isNew = header.generated && header.index > this.last;
    const before = this.frames[header.index - 1];
    const meters = before && header.pose ? before.meters + distance(before.header.pose, header.pose) : 0;
    this.frames[header.index] = { header, picture, meters };
    if (this.first > 0) this.frames[this.first - 1].picture = null;
    if (isNew) this.#rate.came(performance.now());
    if (this.state === "opening" && this.info) this.#set("waiting");
    if (follows || this.state === "waiting") this.viewed = this.last;
    if (follows) this.#emit("shown", { isNew });
    else this.taken(header.index);
    this.#emit("change");
  }

  #end(detail) {
    this.#set("ended");
    this.#emit("ended", detail);
  }

  #set(state) {
    this.state = state;
    this.#emit("change");
  }

  #emit(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}
