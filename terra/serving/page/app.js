/** The page: which view is shown, what happens when the connection ends, and the model's name. */

import { isUp, request, untilReachable } from "./api.js";
import { Cockpit } from "./cockpit.js";
import { showState } from "./instruments.js";
import { areSeveral, offerModels, viewNames } from "./models.js";
import { askForKey, hush, notify, renotify, say } from "./notice.js";
import { isHere, openingOf, readSettings, showScenes, title, wireUpload } from "./scenes.js";
import { isDriven } from "./world.js";

const element = (id) => document.getElementById(id);
const cockpit = new Cockpit({ onLeave: leave, onEnded: ended, onRestart: open, onOpened: named });
let waiting = null; // for the server, as in api.js
let loading = null; // of the lists of models and worlds

function leave() {
  location.hash = "";
}

/** Shows what the address says: the start, or a drive that begins anew. */
async function route() {
  stopWaiting();
  hush();
  loading = loadModel();
  const opening = openingOf(location.hash);
  element("start").hidden = opening !== null;
  element("drive").hidden = opening === null;
  document.body.dataset.view = opening ? "drive" : "start";
  cockpit.close();
  if (opening) {
    document.title = `${title(opening.scene ?? "Your road")} · Terra`;
    window.scrollTo(0, 0);
    open();
  } else {
    showStart();
    await loadScenes();
  }
}

/** A session has opened: the title says which of several models drives. */
async function named({ model, size: [height, width] }) {
  await loading;
  if (document.body.dataset.view !== "drive") return;
  element("model").textContent = `${model} · ${width} × ${height}`;
  const scene = title(openingOf(location.hash)?.scene ?? "Your road");
  document.title = [scene, ...(areSeveral() ? [model] : []), "Terra"].join(" · ");
}

function showStart() {
  document.title = `Terra · ${isDriven() ? "drive" : "play"} the model`;
  showState();
}

async function open() {
  hush();
  const asked = location.hash;
  await loading; // the world's controls, which may be held from now on
  if (location.hash === asked) cockpit.open(openingOf(asked));
}

const begin = (source, id) => {
  location.hash = new URLSearchParams([[source, id], ...readSettings()]);
};

async function loadScenes() {
  try {
    await showScenes((id) => begin("scene", id));
    if (document.body.dataset.view === "start") hush();
  } catch (error) {
    if (error.status === 0) await waitForServer(error.message, loadScenes);
    else if (error.status === 401) askForKey("This server wants an API key.", route);
    else notify(error.message, [["Try again", route]]);
  }
}

async function loadModel() {
  const lists = await Promise.all(["v1/models", "v1/worlds"].map(async (path) => (await (await request(path)).json()).data)).catch(() => null);
  if (!lists) return;
  const [models, worlds] = lists;
  const [model] = models;
  offerModels(models);
  if (viewNames().length) {
    const names = viewNames();
    element("drop-detail").textContent = `Files called ${names.join(", ")} show one camera each, such as ${names[0]}.mp4; others show the whole picture.`;
  }
  cockpit.prepare(model, worlds.find(isHere));
  element("model").textContent = [model.id, model.size?.replace("x", " × ")].filter(Boolean).join(" · ");
  if (document.body.dataset.view === "start") showStart();
}

function stopWaiting() {
  if (waiting) waiting.stopped = true;
  waiting?.hurry?.();
  waiting = null;
}

/** Says that the server is away until it answers, then goes on with `then`. */
async function waitForServer(text, then, others = []) {
  stopWaiting();
  const mine = (waiting = { stopped: false });
  const hurry = () => {
    mine.now = true;
    mine.hurry?.();
  };
  notify(`${text} Trying again …`, [["Try now", hurry], ...others]);
  say(`${text} Trying again.`);
  const isBack = await untilReachable((left) => renotify(`${text} Next try in ${left} s.`), mine);
  if (isBack && waiting === mine) {
    waiting = null;
    await then();
  }
}

const AGAIN = ["Start again", open];
const SCENES = ["All scenes", leave];

/** A session ended that the driver didn't close; `detail` is of Live's `ended`. */
async function ended({ opened, code, reason, error }, hasFrames) {
  const kept = hasFrames ? " Its frames are still here to look at." : "";
  if (error?.code && /key|auth/.test(error.code)) return askForKey(`${capital(error.message)}.`, open);
  if (!opened && error) {
    const isFull = /^(server_full|too_many_sessions)$/.test(error.code);
    return notify(isFull ? `The server is full: ${error.message}.` : `The drive can’t begin: ${error.message}.`, [AGAIN, SCENES]);
  }
  if (error && code !== 1006) return notify(`The drive ended: ${error.message}.${kept}`, [AGAIN, SCENES]);
  const isGoing = /shut|restart|stop/.test(reason ?? "") || [1001, 1006, 1012].includes(code);
  if (reason && !isGoing) return notify(`The server closed the drive: ${explain(reason)}.${kept}`, [AGAIN, SCENES]);
  if (!opened && (await isUp())) {
    return notify("The server is there, but it refused the drive.", [AGAIN, SCENES]);
  }
  return waitForServer(
    "The connection to the server was lost.",
    () => {
      if (!opened && !hasFrames) return open();
      notify(`The server is back, without this drive.${kept}`, [AGAIN, SCENES]);
      say("The server is back.");
    },
    [SCENES],
  );
}

const REASONS = {
  idle: "nothing happened for a while",
  max_frames: "it has as many frames as the server allows",
};
const explain = (reason) => REASONS[reason] ?? reason.replaceAll("_", " ");
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

element("help-close").onclick = () => element("help").close();
element("help-open").onclick = () => {
  cockpit.pause();
  element("help").showModal();
};
wireUpload(
  ({ id, warning }) => {
    const drive = () => begin("context", id);
    if (warning) notify(`Note: ${warning}.`, [["Drive all the same", drive], ["Close", hush]]);
    else drive();
  },
  (error) => {
    if (error.status === 401) askForKey("This server wants an API key.", route);
    else notify(error.status === 0 ? error.message : `These files won’t do: ${error.message}`, [["Close", hush]]);
  },
);
window.addEventListener("hashchange", route);
window.addEventListener("pagehide", () => cockpit.close());
// Out of the back-forward cache it comes with a session that is gone.
window.addEventListener("pageshow", (event) => event.persisted && route());
route();
