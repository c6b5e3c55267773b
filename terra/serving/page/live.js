/** One session over a WebSocket: JSON messages both ways, and each frame as one binary message. */

import { apiKey, socketAddress } from "./api.js";

/** A binary message to its header and its picture: 4 bytes big-endian length of the JSON header, header, picture. */
export function parseFrame(buffer, type) {
  const length = new DataView(buffer).getUint32(0);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  return { header, picture: new Blob([new Uint8Array(buffer, 4 + length)], { type }) };
}

/**
 * Sends `message` events with each JSON message, `frame` events with {header, picture}, and one `ended` event with
 * {opened, code, reason, error}: `reason` where the server said goodbye, `error` its last error message.
 */
export class Live extends EventTarget {
  #socket;
  #opened = false;
  #reason = null;
  #error = null;
  #left = false;

  constructor(opening) {
    super();
    const type = `image/${opening.format}`;
    this.#socket = new WebSocket(socketAddress("v1/live"));
    this.#socket.binaryType = "arraybuffer";
    this.#socket.onopen = () => {
      const key = apiKey.get();
      this.send({ type: "open", ...opening, ...(key ? { api_key: key } : {}) });
    };
    this.#socket.onmessage = ({ data }) => {
      if (this.#left) return;
      if (typeof data === "string") this.#receive(JSON.parse(data));
      else this.#emit("frame", parseFrame(data, type));
    };
    this.#socket.onclose = ({ code, reason }) => {
      if (this.#left) return;
      const ended = { opened: this.#opened, code, reason: this.#reason ?? reason, error: this.#error };
      this.#emit("ended", ended);
    };
  }

  send(message) {
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }

  /** Ends the session; no more events. */
  close() {
    this.#left = true;
    this.send({ type: "close" });
    this.#socket.close();
  }

  #receive(message) {
    if (message.type === "opened") this.#opened = true;
    if (message.type === "closed") this.#reason = message.reason || "closed";
    if (message.type === "error") this.#error = message;
    this.#emit("message", message);
  }

  #emit(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}
