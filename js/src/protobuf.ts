// Protobuf messages as bytes: an ONNX model is read and edited without decoding its weights.

/** A field: its tag, its value (undefined for wire types that ONNX lacks), and the bytes of both. */
export interface Field {
  tag: number;
  value: Uint8Array | number | undefined;
  raw: Uint8Array;
}

const decoder = new TextDecoder("utf-8", { fatal: true });
const encoder = new TextEncoder();
const FIXED: Record<number, number> = { 1: 8, 5: 4 };
const [VARINT, BYTES, GROUP, GROUP_END] = [0, 2, 3, 4];
// Messages or groups in each other that protobuf allows.
export const DEEPEST = 100;

/** Returns the tag of a number; protobuf skips a field of a known number with another wire type. */
export const ofNumber = (number: number): number => number * 8 + VARINT;

/** Returns the tag of bytes, a text or a message. */
export const ofBytes = (number: number): number => number * 8 + BYTES;

/** Yields the fields of a message; throws an error if it is not one. */
export function* fields(data: Uint8Array): Generator<Field> {
  let position = 0;
  const varint = (): number => {
    let number = 0;
    for (let factor = 1; position < data.length && factor < 2 ** 70; factor *= 128) {
      const byte = data[position++]!;
      number += (byte & 127) * factor;
      if (byte < 128) return number;
    }
    throw new Error("a number is truncated or too long");
  };
  const ends: number[] = []; // tags that end the groups that are open
  let start = 0;
  while (position < data.length) {
    const tag = varint();
    let value: Uint8Array | number | undefined;
    const kind = tag & 7;
    // Protobuf would drop the bits of a tag above the 32nd.
    if (tag < 8 || tag >= 2 ** 32) throw new Error(`invalid field at byte ${start}`);
    if (kind === VARINT) {
      value = varint();
    } else if (kind === GROUP && ends.length < DEEPEST) {
      ends.push(tag + 1);
    } else if (kind === GROUP_END && ends.at(-1) === tag) {
      ends.pop();
    } else {
      const size = kind === BYTES ? varint() : FIXED[kind];
      if (size === undefined || position + size > data.length) throw new Error(`invalid field at byte ${start}`);
      if (kind === BYTES) value = data.subarray(position, position + size);
      position += size;
    }
    if (ends.length) continue;
    yield { tag, value, raw: data.subarray(start, position) };
    start = position;
  }
  if (ends.length) throw new Error(`the group at byte ${start} has no end`);
}

/** Returns the bytes of a field. */
export function content(field: Field): Uint8Array {
  if (!(field.value instanceof Uint8Array)) throw new Error(`the field with the tag ${field.tag} is not bytes`);
  return field.value;
}

/** Returns the contents of the fields of one tag. */
export function contents(data: Uint8Array, tag: number): Uint8Array[] {
  const found: Uint8Array[] = [];
  for (const field of fields(data)) if (field.tag === tag) found.push(content(field));
  return found;
}

/** Returns a text, the last if there are several, and "" if there is none. */
export function text(data: Uint8Array, tag: number): string {
  const last = contents(data, tag).at(-1);
  return last === undefined ? "" : decoder.decode(last);
}

/** Returns a field that holds a number, bytes or a text. */
export function field(tag: number, value: Uint8Array | number | string): Uint8Array {
  if (typeof value === "number") return joined([varint(tag), varint(value)]);
  const bytes = typeof value === "string" ? encoder.encode(value) : value;
  return joined([varint(tag), varint(bytes.length), bytes]);
}

/** Returns the bytes of all parts, one after the other. */
export function joined(parts: readonly Uint8Array[]): Uint8Array {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let end = 0;
  for (const part of parts) {
    whole.set(part, end);
    end += part.length;
  }
  return whole;
}

function varint(number: number): Uint8Array {
  const bytes: number[] = [];
  for (; number > 127; number = Math.floor(number / 128)) bytes.push((number % 128) | 128);
  return Uint8Array.from([...bytes, number]);
}
