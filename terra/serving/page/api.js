/** Requests to the server, with its errors and with waiting until it can be reached. */

const KEY = "terra-api-key";
const BACK_OFF = [1, 2, 4, 8, 15]; // seconds before each further try; the last repeats

/** What the server answered instead of what was asked for; status 0 means that it could not be reached. */
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

/** Relative to the page, so that it also works behind a path of a proxy. */
export const address = (path) => new URL(path, document.baseURI.split("#")[0]);

export function socketAddress(path) {
  const url = address(path);
  url.protocol = url.protocol.replace("http", "ws");
  return url;
}

export async function request(path, options = {}) {
  const headers = apiKey.get() ? { Authorization: `Bearer ${apiKey.get()}` } : {};
  let response;
  try {
    response = await fetch(address(path), { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The server does not answer.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const { message, code } = body?.error ?? {};
  // A proxy answers these for a server that is away.
  if (!body && [502, 503, 504].includes(response.status)) throw new ApiError(0, "unreachable", "The server is away.");
  throw new ApiError(response.status, code ?? "", message ?? `The server answered ${response.status}.`);
}

/** Whether the server answers and isn't about to go: it still does while it shuts down. */
export async function isUp() {
  try {
    return (await (await request("health", { signal: AbortSignal.timeout(5000) })).json()).status === "ok";
  } catch {
    return false;
  }
}

/**
 * Resolves to true when the server is up. Calls `onWait` with the seconds until the next try; `waiting.now` and
 * `waiting.stopped`, followed by `waiting.hurry()`, try at once and give up.
 */
export async function untilReachable(onWait, waiting) {
  for (let attempt = 0; !waiting.stopped; attempt++) {
    if (await isUp()) return !waiting.stopped;
    const seconds = BACK_OFF[Math.min(attempt, BACK_OFF.length - 1)];
    for (let left = seconds; left > 0 && !waiting.stopped && !waiting.now; left--) {
      onWait(left);
      await new Promise((resolve) => {
        waiting.hurry = resolve;
        setTimeout(resolve, 1000);
      });
    }
    waiting.now = false;
  }
  return false;
}
