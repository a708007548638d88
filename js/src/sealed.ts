// Sealed files, as in Python's ort_trainer/core/sealed.py: safetensors files in which the header and every tensor carry
// a checksum, the XXH3 (64 bits) of its bytes.

import { createXXHash3 } from "hash-wasm";

import { parse, stringify, type Json, type JsonObject } from "./json.js";
import { joined } from "./protobuf.js";

/** A tensor: the format's name of its dtype, such as "F32", its shape, and its bytes, little-endian. */
export interface Stored {
  code: string;
  shape: readonly number[];
  bytes: Uint8Array;
}

/** A checkpoint that is damaged, or is none. */
export class CheckpointError extends Error {
  override name = "CheckpointError";
}

const SIZES: Record<string, number> = {
  ...{ BOOL: 1, U8: 1, I8: 1 },
  ...{ U16: 2, I16: 2, F16: 2, BF16: 2 },
  ...{ U32: 4, I32: 4, F32: 4 },
  ...{ U64: 8, I64: 8, F64: 8 },
};
const MARK = '"header_checksum":"';
const NO_CHECKSUM = "0".repeat(16);
const encoder = new TextEncoder();

async function makeChecksum(): Promise<(bytes: Uint8Array) => string> {
  const hasher = await createXXHash3();
  return (bytes) => hasher.init().update(bytes).digest();
}

/** Returns the bytes of a file with these tensors and metadata. */
export async function write(tensors: ReadonlyMap<string, Stored>, metadata: JsonObject): Promise<Uint8Array> {
  const checksum = await makeChecksum();
  const bigger = (a: Stored, b: Stored): number => SIZES[b.code]! - SIZES[a.code]!;
  const sorted = [...tensors].sort((a, b) => bigger(a[1], b[1]) || byCodePoint(a[0], b[0]));
  const checksums: JsonObject = new Map(sorted.map(([name, { bytes }]) => [name, checksum(bytes)]));
  const own: [string, Json][] = [
    ["checksums", stringify(checksums)],
    ["header_checksum", NO_CHECKSUM],
  ];
  const entries: JsonObject = new Map([["__metadata__", new Map([...metadata, ...own])]]);
  let end = 0;
  for (const [name, { code, shape, bytes }] of sorted) {
    const offsets = [end, (end += bytes.length)];
    entries.set(name, new Map<string, Json>([["dtype", code], ["shape", [...shape]], ["data_offsets", offsets]]));
  }
  const text = stringify(entries, true);
  const whole = (said: string): Uint8Array => {
    const padded = encoder.encode(said.padEnd(Math.ceil(said.length / 8) * 8));
    const prefix = new Uint8Array(8);
    new DataView(prefix.buffer).setBigUint64(0, BigInt(padded.length), true);
    return joined([prefix, padded]);
  };
  const header = whole(text.replaceAll(MARK + NO_CHECKSUM, MARK + checksum(whole(text))));
  return joined([header, ...sorted.map(([, { bytes }]) => bytes)]);
}

/** Python sorts by code points, and JavaScript by halves of surrogate pairs. */
function byCodePoint(a: string, b: string): number {
  const [some, others] = [[...a], [...b]].map((chars) => chars.map((char) => char.codePointAt(0)!)) as [number[], number[]];
  const place = some.findIndex((point, index) => point !== others[index]);
  return place < 0 ? some.length - others.length : some[place]! - (others[place] ?? -1);
}

interface Contents {
  tensors: Map<string, Stored>;
  metadata: JsonObject;
}

/** Returns the tensors and the metadata in a file, after checking all of it; throws a CheckpointError. */
export async function read(data: Uint8Array): Promise<Contents> {
  const checksum = await makeChecksum();
  try {
    return readChecked(data, checksum);
  } catch (error) {
    const why = (error as Error).message;
    throw new CheckpointError(`the checkpoint is damaged, or none of ort_trainer's: ${why}. Load an earlier one, or a copy`);
  }
}

function readChecked(data: Uint8Array, checksum: (bytes: Uint8Array) => string): Contents {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const length = data.length < 8 ? 0 : Number(view.getBigUint64(0, true));
  if (length < 2 || length > data.length - 8) damaged("its first 8 bytes are not the length of a header");
  const header = data.subarray(0, 8 + length);
  const text = new TextDecoder("utf-8", { fatal: true }).decode(header.subarray(8));
  const entries = parse(text);
  const metadata = entries instanceof Map ? entries.get("__metadata__") : undefined;
  if (!(entries instanceof Map) || !(metadata instanceof Map)) damaged("its header is not that of a sealed file");
  const [said, own] = [metadata.get("checksums"), metadata.get("header_checksum")];
  const blank = encoder.encode(text.replaceAll(`${MARK}${String(own)}`, MARK + NO_CHECKSUM));
  if (typeof said !== "string" || own !== checksum(joined([header.subarray(0, 8), blank]))) {
    damaged("its header does not match its checksum");
  }
  const checksums = parse(said) as JsonObject;
  entries.delete("__metadata__");
  metadata.delete("checksums");
  metadata.delete("header_checksum");
  const tensors = new Map<string, Stored>();
  let last = 8 + length;
  for (const [name, entry] of entries) {
    const [code, shape, [start, end]] = ["dtype", "shape", "data_offsets"].map((key) => (entry as JsonObject).get(key)) as [
      string,
      number[],
      [number, number],
    ];
    const bytes = data.subarray(8 + length + start, 8 + length + end);
    const size = shape.reduce((product, part) => (part >= 0 ? product * part : NaN), SIZES[code] ?? NaN);
    const follows = bytes.byteOffset - data.byteOffset === last && bytes.length === size;
    if (!follows || shape.some((part) => typeof part !== "number")) damaged(`the entry of ${name} is invalid`);
    if (checksum(bytes) !== checksums.get(name)) damaged(`${name} does not match the stored checksum`);
    tensors.set(name, { code, shape, bytes });
    last += size;
  }
  if (last !== data.length) damaged(`it has ${data.length} bytes, but its header says ${last}`);
  return { tensors, metadata };
}

function damaged(why: string): never {
  throw new Error(why);
}
