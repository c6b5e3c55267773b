/** The start: scenes to choose from, and files to begin with. */

import { address, request } from "./api.js";
import { chosenModel, offerScenesModels, viewNames } from "./models.js";

const element = (id) => document.getElementById(id);
const SHAPE = 16 / 9; // of the pictures in the lists
const NEAR = 1.1; // a shape that differs by less fills the space: hardly anything of it is cut off

/** Fills the lists of scenes, one for each world; `onChoose` gets the id of a scene of this page's world. Throws ApiError. */
export async function showScenes(onChoose) {
  const { data } = await (await request("v1/scenes")).json();
  offerScenesModels(data);
  fill(element("scenes"), data, "", onChoose);
  const worlds = (await (await request("v1/worlds")).json()).data;
  const here = worlds.find(isHere);
  document.body.dataset.worlds = worlds.length > 1 ? "several" : "one";
  element("world").hidden = worlds.length < 2;
  element("world").textContent = here.title ?? title(here.id);
  element("world-line").textContent = here.line;
  element("worlds").replaceChildren(...worlds.filter((each) => !isHere(each)).map(worldOf));
}

/** Whether a world of v1/worlds is that of this page. */
export const isHere = ({ url }) => url === "./";

/** Another world's scenes, each of which leads to its world's page. */
function worldOf({ id, url, title: name, line }) {
  const section = document.createElement("section");
  section.dataset.name = id;
  const list = Object.assign(document.createElement("ul"), { className: "scenes" });
  const heading = document.createElement("h3");
  heading.append(Object.assign(document.createElement("a"), { textContent: name ?? title(id), href: address(url) }));
  section.append(heading, Object.assign(document.createElement("p"), { className: "line", textContent: line }), list);
  const begin = (scene) => (location.href = address(`${url}#${new URLSearchParams({ scene })}`));
  request(`${url}v1/scenes`)
    .then((response) => response.json())
    .then(({ data }) => fill(list, data, url, begin))
    .catch((error) => (list.textContent = error.message));
  return section;
}

/** Fills one world's list; `url` is the world's, as in v1/worlds. */
function fill(list, scenes, url, onChoose) {
  const items = scenes.map((scene) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "scene";
    button.dataset.scene = scene.id;
    const image = document.createElement("img");
    image.alt = "";
    const text = document.createElement("span");
    text.append(Object.assign(document.createElement("b"), { textContent: title(scene.id) }));
    if (scene.model) text.append(Object.assign(document.createElement("small"), { textContent: scene.model }));
    if (scene.line) text.append(Object.assign(document.createElement("em"), { textContent: scene.line }));
    button.append(image, text);
    button.onclick = () => onChoose(scene.id);
    item.append(button);
    loadImage(image, `${url}v1/scenes/${encodeURIComponent(scene.id)}/image`);
    return item;
  });
  list.replaceChildren(...items);
  if (!items.length) list.textContent = "This world has no scenes: begin on its page, with files of your own.";
}

export const title = (id) => id.charAt(0).toUpperCase() + id.slice(1).replaceAll(/[_-]/g, " ");

// By fetch, because an <img> sends no API key.
async function loadImage(image, path) {
  const response = await request(path).catch(() => null);
  if (!response) return;
  image.onload = () => {
    const wider = image.naturalWidth / image.naturalHeight / SHAPE;
    image.classList.toggle("fills", Math.max(wider, 1 / wider) < NEAR);
  };
  image.src = URL.createObjectURL(await response.blob());
}

/** Uploads files of the picker and of the drop zone; `onContext` gets the server's answer, `onError` an ApiError. */
export function wireUpload(onContext, onError) {
  const [drop, input, choose] = ["drop", "files", "choose"].map(element);
  choose.onclick = () => input.click();
  input.onchange = () => send([...input.files]);
  for (const name of ["dragenter", "dragover"]) {
    drop.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    send([...event.dataTransfer.files]);
  });
  // A file that misses the zone should not replace the page.
  for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());

  async function send(files) {
    input.value = "";
    if (!files.length) return;
    const body = new FormData();
    const inOrder = new Intl.Collator("en", { numeric: true });
    files.sort((a, b) => inOrder.compare(a.name, b.name)).forEach((file) => body.append(fieldOf(file.name), file));
    choose.disabled = true;
    choose.textContent = "Uploading …";
    try {
      const context = await (await request("v1/contexts", { method: "POST", body })).json();
      element("drop-detail").textContent = `The model shows these frames at ${context.psnr.toFixed(1)} dB PSNR.`;
      onContext(context);
    } catch (error) {
      onError(error);
    } finally {
      choose.disabled = false;
      choose.textContent = "Choose files";
    }
  }
}

/** The field of an uploaded file: that of the camera whose name its own is or begins with, as front.mp4 and front_0.png. */
const fieldOf = (name) => viewNames().find((view) => name.startsWith(view) && /^([_-].*)?\.[^.]*$/.test(name.slice(view.length))) ?? "files";

/** The model and the settings of the form as parameters of the page's address; what is left empty is the server's choice. */
export function readSettings() {
  const values = { seed: "seed", temperature: "temperature", top_p: "top-p", format: "format" };
  const filled = Object.entries(values).map(([name, id]) => [name, element(id)]);
  const given = filled.filter(([, { value, validity }]) => value !== "" && validity.valid);
  const model = chosenModel();
  const forgets = !element("remember").checked;
  return [...(model ? [["model", model]] : []), ...(forgets ? [["memory", "0"]] : []), ...given.map(([name, { value }]) => [name, value])];
}

/** The opening message that the page's address asks for, or null: #scene=day&seed=0. */
export function openingOf(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const source = ["scene", "context"].find((name) => given.get(name));
  if (!source) return null;
  const number = (name) => (given.get(name) && Number.isFinite(Number(given.get(name))) ? Number(given.get(name)) : undefined);
  const sampling = { temperature: number("temperature"), top_p: number("top_p") };
  const format = given.get("format") === "webp" ? "webp" : "jpeg";
  return {
    [source]: given.get(source),
    ...(given.get("model") ? { model: given.get("model") } : {}),
    ...(given.get("memory") === "0" ? { memory: false } : {}),
    seed: Math.max(0, Math.floor(number("seed") ?? 0)),
    ...(Object.values(sampling).some((value) => value !== undefined) ? { sampling } : {}),
    format,
    quality: 90,
  };
}
