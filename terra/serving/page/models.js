/** The models to choose from: the base model, and its adapters. Of a server with one model nothing is shown. */

const element = (id) => document.getElementById(id);
let models = [];
let scenesHave = false; // whether a scene has a model of its own
let chosen = ""; // empty: the scene's own model, or else the base model

export const areSeveral = () => models.length > 1;

/** The model that was chosen for the next session; empty where that is left to the server. */
export const chosenModel = () => (areSeveral() ? chosen : "");

/** The names of the cameras that share a picture of the world; none for one camera. */
export const viewNames = () => models[0]?.views?.names ?? [];

/** Offers the models of the server's list. */
export function offerModels(listed) {
  models = listed;
  fill();
}

/** Offers the scenes' own models, too, if one of these scenes has one. */
export function offerScenesModels(scenes) {
  scenesHave = scenes.some(({ model }) => model);
  fill();
}

/** Says which model drives; null for none. */
export function showModel(name) {
  element("badge-model").hidden = !name || !areSeveral();
  element("badge-model").textContent = name ?? "";
}

function fill() {
  const choice = element("model-choice");
  const options = models.map(({ id }) => new Option(id, id));
  if (scenesHave) options.unshift(new Option("chosen by the scene", ""));
  choice.replaceChildren(...options);
  if (options.some(({ value }) => value === chosen)) choice.value = chosen;
  else chosen = "";
  element("models").hidden = !areSeveral();
  offerMemory();
}

/** Offers to go without memory where a model that may drive has one. */
function offerMemory() {
  const possible = models.filter(({ id }) => !chosenModel() || id === chosen);
  element("remembers").hidden = !possible.some(({ memory }) => memory);
}

element("model-choice").addEventListener("change", ({ target }) => {
  chosen = target.value;
  offerMemory();
});
