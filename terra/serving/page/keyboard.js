/** Which keys of the keyboard stand for named actions: arrows for directions, Space for fire, else a letter or a digit. */

const DIRECTIONS = {
  up: { words: "up upward forward forwards accelerate gas go north", codes: ["ArrowUp", "KeyW"] },
  left: { words: "left west", codes: ["ArrowLeft", "KeyA"] },
  down: { words: "down downward back backward backwards brake reverse south", codes: ["ArrowDown", "KeyS"] },
  right: { words: "right east", codes: ["ArrowRight", "KeyD"] },
};
const TRIGGER = { words: "fire attack shoot", codes: ["Space", "ControlLeft", "ControlRight", "KeyF"] };
const RESERVED = ["KeyR", "KeyB", "KeyO", "KeyP", "KeyV"]; // the page's own
const DIGITS = [..."1234567890"].map((digit) => `Digit${digit}`);
const LETTERS = [..."ABCDEFGHIJKLMNOPQRSTUVWXYZ"].map((letter) => `Key${letter}`);
const ARROWS = { ArrowUp: "↑", ArrowLeft: "←", ArrowDown: "↓", ArrowRight: "→" };

const wordsOf = (name) => name.replaceAll(/([a-z])([A-Z])/g, "$1 $2").toLowerCase().split(/[^a-z0-9]+/);
const hasOne = (name, words) => wordsOf(name).some((word) => words.split(" ").includes(word));

/** The direction that a name means, such as "up" for move_forward; null if it means none, or two of them. */
export function direction(name) {
  const meant = Object.keys(DIRECTIONS).filter((each) => hasOne(name, DIRECTIONS[each].words));
  return meant.length === 1 ? meant[0] : null;
}

/** The first name that means to fire, which Space, Ctrl and a click on the picture do, too; null if none does. */
export const trigger = (names) => names.find((name) => direction(name) === null && hasOne(name, TRIGGER.words)) ?? null;

/** A Map from each key's code to the name that it stands for; where there are more names than keys some have none. */
export function assignKeys(names) {
  const codes = new Map();
  const isFree = (code) => !codes.has(code) && !RESERVED.includes(code);
  const left = (given) => names.filter((name) => ![...codes.values()].includes(name) && given(name));
  const codesOf = (text) => [...text.toUpperCase()].map((letter) => (/\d/.test(letter) ? `Digit${letter}` : `Key${letter}`));
  const known = (code) => DIGITS.includes(code) || LETTERS.includes(code);
  const give = (name, candidates) => {
    const code = candidates.find((each) => known(each) && isFree(each));
    if (code) codes.set(code, name);
  };
  for (const name of left((each) => each.length === 1)) give(name, codesOf(name));
  for (const name of left(direction)) {
    for (const code of DIRECTIONS[direction(name)].codes.filter(isFree)) codes.set(code, name);
  }
  for (const name of left((each) => each === trigger(names))) {
    for (const code of TRIGGER.codes.filter(isFree)) codes.set(code, name);
    give(name, codesOf(name));
  }
  for (const name of left((each) => /\d$/.test(each))) give(name, codesOf(name.slice(-1)));
  for (const name of left(() => true)) give(name, [...codesOf(name), ...DIGITS, ...LETTERS]);
  return codes;
}

/** What is printed on a key. */
export const label = (code) => ARROWS[code] ?? code.replace(/^(Key|Digit)/, "").replace(/^Control.*/, "Ctrl");
