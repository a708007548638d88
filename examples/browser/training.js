// The training itself, for reuse in your own page.

import * as ort from "onnxruntime-web/wasm";
import { Checkpoint, Module, Optimizer } from "ort-trainer";

// More threads would need an isolated page (COOP and COEP headers), and this small network gains nothing from them.
ort.env.wasm.numThreads = 1;

const PIXELS = 64;

/** Returns what trains the artifacts; they are the contents of the four files. */
export async function createSession({ checkpoint, training, evaluation, optimizer }) {
  const state = await Checkpoint.load(ort, checkpoint);
  const module = await Module.create(state, training, evaluation);
  return { state, module, optimizer: await Optimizer.create(state, optimizer) };
}

/** Frees the engine's memory. */
export async function release({ module, optimizer }) {
  await module.release();
  await optimizer.release();
}

/** Returns the inputs for the chosen rows of the digits: pixels from 0 to 1, labels as int64. */
export function inputsOf(digits, rows) {
  const images = new Float32Array(rows.length * PIXELS);
  const labels = new BigInt64Array(rows.length);
  rows.forEach((row, place) => {
    for (let pixel = 0; pixel < PIXELS; pixel += 1) {
      images[place * PIXELS + pixel] = digits.pixels[row * PIXELS + pixel] / 16;
    }
    labels[place] = BigInt(digits.labels[row]);
  });
  return {
    image: new ort.Tensor("float32", images, [rows.length, PIXELS]),
    label: new ort.Tensor("int64", labels, [rows.length]),
  };
}

/** Runs one step, forward, backward and update, and returns the loss before the update. */
export async function trainStep({ module, optimizer }, digits, rows) {
  const { loss } = await module.trainStep(inputsOf(digits, rows));
  await optimizer.optimizerStep();
  module.lazyResetGrad();
  return loss.data[0];
}

/** Returns the share of the rows whose digit gets the largest logit. */
export async function accuracy({ module }, digits, rows) {
  const { logits } = await module.evalStep(inputsOf(digits, rows));
  const classes = logits.dims[1];
  const correct = rows.filter((row, place) => {
    const scores = logits.data.subarray(place * classes, (place + 1) * classes);
    return scores.indexOf(Math.max(...scores)) === digits.labels[row];
  });
  return correct.length / rows.length;
}
