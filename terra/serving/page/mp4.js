/** An MP4 file of one H.264 track whose frames all last equally long (ISO/IEC 14496-12 and -15). */

const text = (letters) => [...letters].map((letter) => letter.charCodeAt(0));
const u16 = (...values) => values.flatMap((value) => [(value >> 8) & 255, value & 255]);
const u32 = (...values) => values.flatMap((value) => [...u16(value >>> 16), ...u16(value)]);
const zeros = (count) => new Array(count).fill(0);
const box = (type, ...parts) => {
  const content = parts.flat();
  return [...u32(8 + content.length), ...text(type), ...content];
};
/** A box with version 0 and flags. */
const full = (type, flags, ...parts) => box(type, u32(flags), ...parts);

const MATRIX = u32(0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000);

/**
 * The file as a Blob. `chunks` are {data: Uint8Array, isKey}, in order, none of them a B-frame; `size` is
 * [width, height]; `description` the track's AVCDecoderConfigurationRecord.
 */
export function mp4({ chunks, size, fps, description }) {
  const scale = Math.round(fps * 1000); // units a second, 1000 of them a frame
  const start = box("ftyp", text("isom"), u32(512), text("isomiso2avc1mp41"));
  const length = chunks.reduce((sum, { data }) => sum + data.length, 0);
  const offset = start.length + 8; // of the first frame
  const moov = header({ chunks, size, scale, description, offset });
  const parts = [start, [...u32(8 + length), ...text("mdat")]].map((bytes) => new Uint8Array(bytes));
  return new Blob([...parts, ...chunks.map(({ data }) => data), new Uint8Array(moov)], { type: "video/mp4" });
}

function header({ chunks, size: [width, height], scale, description, offset }) {
  const duration = 1000 * chunks.length;
  const keys = chunks.flatMap(({ isKey }, index) => (isKey ? [index + 1] : []));
  const avc1 = box(
    "avc1",
    [zeros(6), u16(1), zeros(16), u16(width, height), u32(0x480000, 0x480000, 0), u16(1)].flat(),
    [zeros(32), u16(24, 0xffff)].flat(),
    box("avcC", [...description]),
  );
  const table = box(
    "stbl",
    full("stsd", 0, u32(1), avc1),
    full("stts", 0, u32(1, chunks.length, 1000)),
    full("stss", 0, u32(keys.length, ...keys)),
    full("stsc", 0, u32(1, 1, chunks.length, 1)),
    full("stsz", 0, u32(0, chunks.length), chunks.flatMap(({ data }) => u32(data.length))),
    full("stco", 0, u32(1, offset)),
  );
  const media = box(
    "mdia",
    full("mdhd", 0, u32(0, 0, scale, duration), u16(0x55c4, 0)), // language: und
    full("hdlr", 0, u32(0), text("vide"), zeros(12), text("video"), [0]),
    box("minf", full("vmhd", 1, zeros(8)), box("dinf", full("dref", 0, u32(1), full("url ", 1))), table),
  );
  const track = full("tkhd", 3, u32(0, 0, 1, 0, duration), zeros(16), MATRIX, u32(width * 65536, height * 65536));
  const movie = full("mvhd", 0, u32(0, 0, scale, duration, 0x10000), u16(0x100), zeros(10), MATRIX, zeros(24), u32(2));
  return box("moov", movie, box("trak", track, media));
}
