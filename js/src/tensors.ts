// Tensors in a checkpoint and in the engine.

import type * as common from "onnxruntime-common";

import type { Stored } from "./sealed.js";

/** `onnxruntime-web` or `onnxruntime-node`. */
export type Engine = Pick<typeof common, "InferenceSession" | "Tensor">;
export type Tensor = common.Tensor;
export type Values = Exclude<common.Tensor.DataType, string[]>;
/** NumPy's name of an element type; the engine's is the same. */
export type DType = "float32" | "float64" | "int64" | "int32" | "uint8" | "int8" | "bool";

interface Kind {
  code: string;
  /** ONNX's number of it. */
  number: number;
  array: { new (buffer: ArrayBuffer): Values; new (length: number): Values };
}

const KINDS: Record<DType, Kind> = {
  float32: { code: "F32", number: 1, array: Float32Array },
  float64: { code: "F64", number: 11, array: Float64Array },
  int64: { code: "I64", number: 7, array: BigInt64Array },
  int32: { code: "I32", number: 6, array: Int32Array },
  uint8: { code: "U8", number: 2, array: Uint8Array },
  int8: { code: "I8", number: 3, array: Int8Array },
  bool: { code: "BOOL", number: 9, array: Uint8Array },
};

/** Returns the number of elements. */
export const sizeOf = (shape: readonly number[]): number => shape.reduce((product, size) => product * size, 1);

/** Returns a tensor of the engine with one value in all its elements. */
export function full(ort: Engine, dtype: string, shape: readonly number[], value: number): Tensor {
  const data = new (kindOf(dtype).array)(sizeOf(shape));
  if (data instanceof BigInt64Array) data.fill(BigInt(value));
  else (data as Float32Array).fill(value);
  return new ort.Tensor(dtype as "float32", data as Float32Array, shape);
}

/** Returns a tensor of a file as one of the engine, in memory of its own. */
export function fromStored(ort: Engine, { code, shape, bytes }: Stored): Tensor {
  const dtype = Object.keys(KINDS).find((name) => KINDS[name as DType].code === code) ?? code;
  const data = new (kindOf(dtype).array)(new Uint8Array(bytes).buffer); // a copy: slice() of Node's Buffer is none
  return new ort.Tensor(dtype as "float32", data as Float32Array, shape);
}

/** Returns a tensor of the engine as a file has it. */
export async function toStored(tensor: Tensor): Promise<Stored> {
  const data = (await tensor.getData()) as Values;
  const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  return { code: kindOf(tensor.type).code, shape: tensor.dims, bytes };
}

/** Returns ONNX's number of a tensor's type. */
export const elementType = (tensor: Tensor): number => kindOf(tensor.type).number;

function kindOf(dtype: string): Kind {
  const kind = KINDS[dtype as DType];
  if (!kind) throw new Error(`the dtype ${dtype} is none that this package trains: ${Object.keys(KINDS).join(", ")}`);
  return kind;
}
