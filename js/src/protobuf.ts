// Protobuf messages as bytes: an ONNX model is read and edited without decoding its weights.

/** A field: its number, its value, and the bytes of both. */
export interface Field {
  number: number;
  value: Uint8Array | number;
  raw: Uint8Array;
}

const decoder = new TextDecoder("utf-8", { fatal: true });
const encoder = new TextEncoder();
const FIXED: Record<number, number> = { 1: 8, 5: 4 };

/** Returns the fields of a message; throws an error if it is not one. */
export function fields(data: Uint8Array): Field[] {
  const found: Field[] = [];
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
  while (position < data.length) {
    const start = position;
    const key = varint();
    const kind = key & 7;
    let value: Uint8Array | number;
    if (kind === 0) {
      value = varint();
    } else {
      const size = kind === 2 ? varint() : FIXED[kind];
      if (size === undefined || position + size > data.length) throw new Error(`invalid field at byte ${start}`);
      value = data.subarray(position, position + size);
      position += size;
    }
    found.push({ number: Math.floor(key / 8), value, raw: data.subarray(start, position) });
  }
  return found;
}

/** Returns the bytes of a field. */
export function content(field: Field): Uint8Array {
  if (typeof field.value === "number") throw new Error(`field ${field.number} is a number, expected bytes`);
  return field.value;
}

/** Returns the contents of the fields of one number. */
export function contents(data: Uint8Array, number: number): Uint8Array[] {
  return fields(data).flatMap((field) => (field.number === number ? [content(field)] : []));
}

/** Returns a string field, the last if there are several, and "" if there is none. */
export function text(data: Uint8Array, number: number): string {
  const last = contents(data, number).at(-1);
  return last === undefined ? "" : decoder.decode(last);
}

/** Returns a field that holds a number, bytes or a text. */
export function field(number: number, value: Uint8Array | number | string): Uint8Array {
  if (typeof value === "number") return joined([varint(number * 8), varint(value)]);
  const bytes = typeof value === "string" ? encoder.encode(value) : value;
  return joined([varint(number * 8 + 2), varint(bytes.length), bytes]);
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
