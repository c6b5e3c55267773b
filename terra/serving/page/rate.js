/** Frames a second, as they have really come. */

const SECONDS = 4;
const FRAMES = 8;

/**
 * The rate of the last four seconds, or of the last eight frames if these took longer. It counts from when frames were
 * asked for, so that two that come at once are no high rate, and it falls while the next one is late. Times are in
 * milliseconds.
 */
export class Rate {
  #times = []; // when frames were asked for, then when each came

  /** Begins anew: frames are asked for from now on. */
  begin(now) {
    this.#times = [now];
  }

  /** No frames are asked for any more. */
  end() {
    this.#times = [];
  }

  came(now) {
    if (this.#times.length) this.#times.push(now);
  }

  /** Frames a second; null before the first one. */
  at(now) {
    const kept = this.#times.findIndex((time, index, all) => time > now - 1000 * SECONDS || index >= all.length - 1 - FRAMES);
    if (kept > 0) this.#times.splice(0, kept);
    const frames = this.#times.length - 1;
    if (frames < 1) return null;
    const [first, last] = [this.#times[0], this.#times.at(-1)];
    return Math.min((1000 * frames) / Math.max(last - first, 1), (1000 * (frames + 1)) / Math.max(now - first, 1));
  }
}
