// What an artifact says of itself: JSON in the metadata of the ONNX model, as in Python's ort_trainer/step/contract.py.

import { contents, text } from "./protobuf.js";
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
const MODEL_METADATA = 14;
const [KEY, VALUE] = [1, 2];
const FORMATS = [1, 2];

/** Returns the description in a model of this kind. */
export function describe<Kind extends keyof Models>(kind: Kind, model: Uint8Array): Models[Kind] {
  let found: (Models[Kind] & { format: number }) | undefined;
  try {
    const entry = contents(model, MODEL_METADATA).find((data) => text(data, KEY) === ARTIFACT);
    found = entry && (JSON.parse(text(entry, VALUE)) as typeof found);
  } catch (error) {
    throw new Error(`the ${kind} model is damaged, or no ONNX model: ${(error as Error).message}`);
  }
  if (!found) throw new Error(`the ${kind} model is no artifact: write it with ORTTrainer.export_artifacts()`);
  if (!FORMATS.includes(found.format)) {
    throw new Error(`the ${kind} model has the format ${found.format}, and this package reads ${FORMATS.join(" and ")}`);
  }
  // The key of an entry of external_data, as protobuf writes it.
  if (new TextDecoder("latin1").decode(model).includes("\n\blocation")) {
    throw new Error(`the ${kind} model keeps tensors in another file, which artifacts never do: export it again`);
  }
  if (found.kind !== kind) throw new Error(`the ${kind} model was expected, but this is the ${found.kind} model`);
  return found;
}
