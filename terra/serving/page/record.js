/** Frames to a video file in the browser, each shown equally long however slowly it came. */

import { mp4 } from "./mp4.js";

const CODEC = "avc1.420028"; // baseline, which has no B-frames, up to 1920 x 1088
const BITRATE = 6_000_000;
const KEY_EVERY = 30; // frames
const FORMATS = [
  { type: "video/mp4;codecs=avc1.420028", suffix: "mp4" },
  { type: "video/webm;codecs=vp9", suffix: "webm" },
  { type: "video/webm;codecs=vp8", suffix: "webm" },
  { type: "video/webm", suffix: "webm" },
];

const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const bytes = (data) =>
  ArrayBuffer.isView(data) ? new Uint8Array(data.buffer, data.byteOffset, data.byteLength) : new Uint8Array(data);
const playable = () => FORMATS.find(({ type }) => globalThis.MediaRecorder?.isTypeSupported(type));

export const canRecord = () => Boolean(globalThis.VideoEncoder || playable());

/**
 * Writes `frames` to {blob, suffix}: an MP4 at once where the browser encodes H.264, else what it can record while the
 * frames are played to it. `paint(context, size, frame)` draws one; `onProgress` is told the share that is done.
 */
export async function writeVideo(frames, { size, fps, paint, onProgress }) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = size;
  const job = { frames, canvas, context: canvas.getContext("2d"), size, fps, paint, onProgress };
  const config = { codec: CODEC, width: size[0], height: size[1], bitrate: BITRATE, framerate: fps, avc: { format: "avc" } };
  // Browsers have the encoder for pages of https and of localhost alone.
  const support = await globalThis.VideoEncoder?.isConfigSupported(config).catch(() => null);
  return support?.supported ? encode(job, config) : play(job, playable());
}

async function encode({ frames, canvas, context, size, fps, paint, onProgress }, config) {
  const chunks = [];
  let [description, failure] = [null, null];
  const encoder = new VideoEncoder({
    output(chunk, metadata) {
      const data = new Uint8Array(chunk.byteLength);
      chunk.copyTo(data);
      chunks.push({ data, isKey: chunk.type === "key" });
      const given = metadata?.decoderConfig?.description;
      if (given) description = bytes(given);
    },
    error: (error) => (failure = error),
  });
  encoder.configure(config);
  for (const [index, frame] of frames.entries()) {
    await paint(context, size, frame);
    const picture = new VideoFrame(canvas, { timestamp: Math.round((1e6 * index) / fps), duration: Math.round(1e6 / fps) });
    encoder.encode(picture, { keyFrame: index % KEY_EVERY === 0 });
    picture.close();
    while (encoder.encodeQueueSize > 4 && !failure) await sleep(4);
    if (failure) throw failure;
    onProgress((index + 1) / frames.length);
  }
  await encoder.flush();
  encoder.close();
  return { blob: mp4({ chunks, size, fps, description }), suffix: "mp4" };
}

async function play({ frames, canvas, context, size, fps, paint, onProgress }, { type, suffix }) {
  const stream = canvas.captureStream(0);
  const recorder = new MediaRecorder(stream, { mimeType: type, videoBitsPerSecond: BITRATE });
  const pieces = [];
  recorder.ondataavailable = ({ data }) => pieces.push(data);
  await paint(context, size, frames[0]);
  recorder.start();
  const started = performance.now();
  for (const [index, frame] of frames.entries()) {
    await paint(context, size, frame);
    stream.getVideoTracks()[0].requestFrame();
    onProgress((index + 1) / frames.length);
    await sleep(Math.max(0, started + (1000 * (index + 1)) / fps - performance.now()));
  }
  const stopped = new Promise((resolve) => (recorder.onstop = resolve));
  recorder.stop();
  await stopped;
  return { blob: new Blob(pieces, { type: type.split(";")[0] }), suffix };
}
