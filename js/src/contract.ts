// What an artifact says of itself: JSON in the metadata of the ONNX model, as in Python's ort_trainer/step/contract.py.

import { DEEPEST, contents, fields, ofBytes, ofNumber, text } from "./protobuf.js";
import type { DType } from "./tensors.js";

export type Dim = number | string;

/** An input or output that the user sees. */
export interface TensorSpec {
  name: string;
  dtype: DType;
  shape: Dim[] | null;
}

/** A random tensor that is sampled for every step. */
export interface RandomInput {
  name: string;
  kind: string;
  dtype: DType;
  shape: Dim[];
  parameters: number[];
}

/** The values that an operator allows in an integer input that it indexes with. */
export interface IndexRange {
  input: string;
  size: Dim;
  from_end: boolean;
  ignored: number | null;
  operator: string;
  source: string;
  steps: unknown[];
}

/** A training or an evaluation model. Maps lead from names of parameters and buffers to names in the graph. */
export interface StepModel {
  kind: "training" | "evaluation";
  export: string;
  inputs: TensorSpec[];
  outputs: TensorSpec[];
  state: Record<string, string>;
  gradients: Record<string, [sum: string, output: string]>;
  buffer_updates: Record<string, string>;
  reset: string;
  random: RandomInput[];
  guards: string[];
  fixed: Record<string, number>;
  index_ranges?: IndexRange[];
}

/** A tensor that the optimizer keeps. */
export interface Slot {
  input: string;
  output: string;
  dtype: DType;
  shape: number[];
  initial: number;
}

/** An optimizer model. */
export interface OptimizerModel {
  kind: "optimizer";
  export: string;
  weights: Record<string, [input: string, output: string]>;
  gradients: Record<string, string>;
  state: Record<string, Slot>;
  learning_rate: string;
  rates?: number;
  micro_batches?: string | null;
}

type Models = { training: StepModel; evaluation: StepModel; optimizer: OptimizerModel };

/** The key of the description in the metadata. */
export const ARTIFACT = "ort_trainer.artifact";
const MODEL_METADATA = ofBytes(14);
const [KEY, VALUE] = [ofBytes(1), ofBytes(2)];
const FORMATS = [1, 2];

// Numbers of fields in onnx.proto: kind of message -> field -> kind of the messages in it that have nodes and tensors.
const INSIDE: Record<string, Record<number, string>> = {
  model: { 7: "graph", 20: "training", 25: "function" },
  training: { 1: "graph", 2: "graph" },
  function: { 7: "node", 11: "attribute" },
  graph: { 1: "node", 5: "tensor", 15: "sparse" },
  node: { 5: "attribute" },
  attribute: { 5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse" },
  sparse: { 1: "tensor", 2: "tensor" },
  tensor: {},
};
const NODE = { operator: ofBytes(4), domain: ofBytes(7) };
const TENSOR = { external: ofBytes(13), location: ofNumber(14) };
// Operators that call Python, or that read files named in the model.
const CALLING_OUT = ["EPContext", "PythonOp", "PythonOpGrad"];

/** Returns what a message has that names a file or calls Python, for an error; undefined if nothing does. */
function reachesOut(data: Uint8Array, kind = "model", depth = 0): string | undefined {
  if (depth > DEEPEST) throw new Error("its graphs are nested too deeply");
  if (kind === "node") {
    const operator = text(data, NODE.operator);
    const calls = CALLING_OUT.includes(operator) || text(data, NODE.domain) === "org.pytorch.aten";
    if (calls) return `has the operator ${operator}`;
  }
  for (const part of fields(data)) {
    if (kind === "tensor" && (part.tag === TENSOR.external || (part.tag === TENSOR.location && part.value !== 0))) {
      return "keeps tensors in another file";
    }
    const inner = INSIDE[kind]![part.tag >>> 3];
    const found = inner && part.value instanceof Uint8Array && reachesOut(part.value, inner, depth + 1);
    if (found) return found;
  }
  return undefined;
}

/** Returns the description in a model of this kind. */
export function describe<Kind extends keyof Models>(kind: Kind, model: Uint8Array): Models[Kind] {
  // ONNX Runtime would not read it as protobuf.
  if (new TextDecoder("latin1").decode(model.subarray(4, 8)) === "ORTM") {
    throw new Error(`the ${kind} model is in ORT format (.ort), which can't be trained: use the .onnx file of the export`);
  }
  let found: (Models[Kind] & { format: number }) | undefined;
  let reaching: string | undefined;
  try {
    const entries = contents(model, MODEL_METADATA).filter((data) => text(data, KEY) === ARTIFACT);
    found = entries.length ? (JSON.parse(text(entries.at(-1)!, VALUE)) as typeof found) : undefined;
    reaching = reachesOut(model);
  } catch (error) {
    throw new Error(`the ${kind} model is damaged, or no ONNX model: ${(error as Error).message}`);
  }
  if (!found) throw new Error(`the ${kind} model is no artifact: write it with ORTTrainer.export_artifacts()`);
  if (!FORMATS.includes(found.format)) {
    throw new Error(`the ${kind} model has the format ${found.format}, and this package reads ${FORMATS.join(" and ")}`);
  }
  if (reaching) throw new Error(`the ${kind} model ${reaching}, which artifacts never do: export it again`);
  if (found.kind !== kind) throw new Error(`the ${kind} model was expected, but this is the ${found.kind} model`);
  return found;
}
