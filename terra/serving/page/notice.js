/** The bar that says what went wrong and what can be done, and the line that screen readers speak. */

import { apiKey } from "./api.js";

const element = (id) => document.getElementById(id);

/** Shows a message with buttons, [label, action] each; the first is the one to choose. */
export function notify(text, actions = []) {
  element("notice-text").textContent = text;
  element("key-form").hidden = true;
  element("notice-actions").replaceChildren(
    ...actions.map(([label, action], index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = label;
      button.className = index === 0 ? "primary" : "";
      button.onclick = action;
      return button;
    }),
  );
  element("notice").hidden = false;
}

/** Changes the text alone, so that a countdown doesn't take the focus from the buttons. */
export function renotify(text) {
  element("notice-text").textContent = text;
}

export function hush() {
  element("notice").hidden = true;
}

/** Asks for the API key, then calls `retry`. */
export function askForKey(text, retry) {
  notify(text);
  const form = element("key-form");
  form.hidden = false;
  element("key").focus();
  form.onsubmit = (event) => {
    event.preventDefault();
    apiKey.set(element("key").value);
    hush();
    retry();
  };
}

export function say(text) {
  element("live").textContent = text;
}
