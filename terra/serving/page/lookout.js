/** Looks for what a player moves in each picture, by its color, and says when it has been gone for a while. */

export class Lookout {
  #subject;
  #seen = []; // by the frame's index: whether it was seen; holes where a frame was not looked at

  /** `subject` as in v1/worlds: {color, tolerance, pixels, frames}. */
  constructor(subject) {
    this.#subject = subject;
  }

  /** Whether the last frames up to this one, whose pixels (RGBA) are given, are all without the subject. */
  isLost(index, pixels) {
    const { color, tolerance, pixels: least, frames } = this.#subject;
    let count = 0;
    for (let at = 0; at < pixels.length; at += 4) {
      const [red, green, blue] = [pixels[at] - color[0], pixels[at + 1] - color[1], pixels[at + 2] - color[2]];
      if (red * red + green * green + blue * blue <= tolerance * tolerance) count++;
    }
    this.#seen[index] = count >= least;
    const last = this.#seen.slice(0, index + 1).filter(() => true).slice(-frames); // without the holes
    return last.length === frames && !last.includes(true);
  }
}
