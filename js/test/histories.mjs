// Does the actions that tests/api/test_histories.py draws: each line is a call in JSON, and is answered with a line.

import { readFileSync, writeFileSync } from "node:fs";
import { createInterface } from "node:readline";

import * as ort from "onnxruntime-node";
import { Checkpoint, Module, Optimizer } from "ort-trainer";

const NAMES = ["input", "label", "more"];
const ARRAYS = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array };

const OPTIONS = { intraOpNumThreads: 1 }; // threads that wait for work would take time from others

let state, module, optimizer;

function decoded({ dtype, shape, data }) {
  const bytes = Uint8Array.from(Buffer.from(data, "hex"));
  return new ort.Tensor(dtype, new ARRAYS[dtype](bytes.buffer), shape);
}

function encoded(values, shape) {
  const dtype = Object.keys(ARRAYS).find((name) => values instanceof ARRAYS[name]);
  return { dtype, shape, data: Buffer.from(values.buffer, values.byteOffset, values.byteLength).toString("hex") };
}

const inputs = (tensors) => Object.fromEntries(tensors.map((tensor, place) => [NAMES[place], decoded(tensor)]));
const outputs = (tensors) => Object.values(tensors).map(({ data, dims }) => encoded(data, dims));

const ACTIONS = {
  async load(folder, path) {
    await this.open(folder, false, await Checkpoint.load(ort, readFileSync(path)));
  },
  async open(folder, _, other = state) {
    const [training, evaluation, update] = ["training", "eval", "optimizer"].map((kind) => readFileSync(`${folder}/${kind}_model.onnx`));
    const sessions = [await Module.create(other, training, evaluation, OPTIONS), await Optimizer.create(other, update, OPTIONS)];
    const before = [module, optimizer];
    [module, optimizer] = sessions;
    state = other;
    for (const released of before) await released?.release();
  },
  save: async (path, complete) => writeFileSync(path, await state.toBytes(complete)),
  train: async (...batch) => outputs(await module.trainStep(inputs(batch))),
  evaluate: async (...batch) => outputs(await module.evalStep(inputs(batch))),
  step: () => optimizer.optimizerStep(),
  reset: () => module.lazyResetGrad(),
  rate: async () => optimizer.getLearningRate(),
  set_rate: (rate) => optimizer.setLearningRate(rate),
  async parameter(name) {
    const values = await state.getParameter(name);
    return encoded(values, (await module.getParameters()).get(name).dims);
  },
  set_parameter: (name, tensor) => state.setParameter(name, decoded(tensor).data),
  async buffer(trainableOnly) {
    const all = [...(await module.getParameters(trainableOnly)).values()].flatMap(({ data }) => [...data]);
    return encoded(Float32Array.from(all), [all.length]);
  },
  async set_buffer(buffer, trainableOnly) {
    const { data } = decoded(buffer);
    const parameters = [...(await module.getParameters(trainableOnly))];
    const total = parameters.reduce((sum, [, tensor]) => sum + tensor.size, 0);
    if (!(data instanceof Float32Array && data.length === total)) throw new TypeError(`${total} float32 are needed`);
    let start = 0;
    for (const [name, { size }] of parameters) {
      await state.setParameter(name, data.slice(start, start + size));
      start += size;
    }
  },
  set_property: async (name, value) => state.setProperty(name, value),
  property: async (name) => state.getProperty(name),
  export: async (path, names) => writeFileSync(path, await module.exportModelForInferencing(names)),
};

// Calls that come together overlap; their answers keep the order.
let last = Promise.resolve();
for await (const line of createInterface({ input: process.stdin })) {
  const [name, ...given] = JSON.parse(line);
  const answer = ACTIONS[name](...given).then((result) => [null, result ?? null], (error) => [error.message, null]);
  last = last.then(async () => console.log(JSON.stringify(await answer)));
}
await last;
