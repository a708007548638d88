// Trains on onnxruntime-node what Python has trained, and compares: `make test-js`.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { readFileSync, readdirSync } from "node:fs";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import { buildSync } from "esbuild";
import * as ort from "onnxruntime-node";
import { Checkpoint, CheckpointError, Module, Optimizer } from "ort-trainer";

const BUILD = new URL("../../build/portable/", import.meta.url);
const TOLERANCE = 1e-5; // relative
const ARRAYS = { float32: Float32Array, int64: BigInt64Array };

const contents = (name, file) => readFileSync(new URL(`${name}/${file}`, BUILD));
const planOf = (name) => JSON.parse(new TextDecoder().decode(contents(name, "plan.json")));
const tensor = ({ dtype, shape, values }) =>
  new ort.Tensor(dtype, ARRAYS[dtype].from(dtype === "int64" ? values.map(BigInt) : values), shape);
const inputsOf = (batch) => Object.fromEntries(batch.map((input) => [input.name, tensor(input)]));
const near = (found, expected) => assert.ok(Math.abs(found - expected) <= TOLERANCE * Math.abs(expected), `${found} is not ${expected}`);

const SCRIPT = fileURLToPath(new URL("../../tests/portable/rewrite_checkpoint.py", import.meta.url));

function readAndWrittenByPython(bytes) {
  const done = spawnSync(process.env.PYTHON ?? "python3", [SCRIPT], { input: bytes, maxBuffer: 1 << 30 });
  assert.equal(done.status, 0, String(done.stderr));
  return done.stdout;
}

async function load(name, checkpoint = "checkpoint") {
  const state = await Checkpoint.load(ort, contents(name, checkpoint));
  const module = await Module.create(state, contents(name, "training_model.onnx"), contents(name, "eval_model.onnx"));
  return { state, module, optimizer: await Optimizer.create(state, contents(name, "optimizer_model.onnx")) };
}

/** Trains the batches from `first` on, as Python has, and compares every loss and every rate. */
async function train({ module, optimizer }, plan, first = 0) {
  for (let step = first; step < plan.inputs.length; step += 1) {
    near((await module.trainStep(inputsOf(plan.inputs[step]))).loss.data[0], plan.losses[step]);
    if (step % 2 === 0) continue;
    near(optimizer.getLearningRate(), plan.rates[(step - 1) / 2]);
    await optimizer.optimizerStep();
    module.lazyResetGrad();
  }
  near((await module.evalStep(inputsOf(plan.inputs[0]))).loss.data[0], plan.loss);
}

for (const name of readdirSync(BUILD)) {
  test(`${name} trains as in Python`, async () => train(await load(name), planOf(name)));
  test(`${name} goes on from Python's checkpoint`, async () => {
    const plan = planOf(name);
    const session = await load(name, "middle");
    assert.equal(session.state.getProperty("1"), 1);
    await train(session, plan, plan.inputs.length / 2 + 1);
    assert.equal(session.state.optimizationStep, plan.rates.length);
    const bytes = Buffer.from(await session.state.toBytes(true));
    assert.deepEqual(readAndWrittenByPython(bytes), bytes);
  });
  test(`${name}: a checkpoint goes round byte for byte`, async () => {
    for (const file of ["checkpoint", "middle"]) {
      const state = await Checkpoint.load(ort, contents(name, file));
      assert.deepEqual(Buffer.from(await state.toBytes(true)), contents(name, file));
    }
    const state = await Checkpoint.load(ort, contents(name, "middle"));
    assert.deepEqual(Buffer.from(await state.toBytes()), contents(name, "weights"));
  });
}

test("damage is found", async () => {
  const sound = contents("linear", "checkpoint");
  for (let place = 0; place < sound.length; place += 7) {
    const damaged = new Uint8Array(sound);
    damaged[place] ^= 1;
    await assert.rejects(Checkpoint.load(ort, damaged), CheckpointError, `byte ${place}`);
  }
  for (const length of [0, 7, 8, 100, sound.length - 1]) {
    await assert.rejects(Checkpoint.load(ort, sound.slice(0, length)), CheckpointError, `${length} bytes`);
  }
});

test("an inference model has the trained weights", async () => {
  const { module } = await load("net", "middle");
  const batch = inputsOf(planOf("net").inputs[0]);
  const session = await ort.InferenceSession.create(await module.exportModelForInferencing(["logits"]));
  assert.deepEqual([...session.inputNames], ["image", "words"]);
  const { image, words } = batch;
  const [some, others] = [await session.run({ image, words }), await module.evalStep(batch)].map(({ logits }) => logits.data);
  some.forEach((value, place) => assert.ok(Math.abs(value - others[place]) < 1e-5));
  await assert.rejects(module.exportModelForInferencing(["nothing"]), /any value of its graph/);
});

test("parameters are copies, and can be set", async () => {
  const { state, module } = await load("none");
  const weight = (await module.getParameters(true)).get("weight");
  assert.deepEqual(weight.dims, [2, 4]);
  weight.data.fill(0);
  assert.notDeepEqual(await state.getParameter("weight"), weight.data);
  await state.setParameter("weight", weight.data);
  weight.data.fill(1);
  assert.deepEqual(await state.getParameter("weight"), new Float32Array(8));
  await assert.rejects(state.setParameter("weight", new Float32Array(7)), /takes 8 values/);
  await assert.rejects(state.setParameter("weight", new Float64Array(8)), /Float32Array/);
  await assert.rejects(state.getParameter("wait"), /weight, bias/);
  const { state: net } = await load("net");
  await assert.rejects(net.setParameter("layers.4.num_batches_tracked", BigInt64Array.of(1n)), /is a buffer/);
  assert.throws(() => net.setProperty("nothing", undefined), /a number or a text/);
});

test("a rate that is set replaces the schedule", async () => {
  const { optimizer } = await load("linear");
  assert.equal(optimizer.getLearningRate(), 0);
  await optimizer.setLearningRate(0.5);
  await optimizer.optimizerStep().then(assert.fail, (error) => assert.match(error.message, /no gradients/));
  assert.equal(optimizer.getLearningRate(), 0.5);
  for (const rate of [-1, NaN, Infinity, 1e39]) await assert.rejects(optimizer.setLearningRate(rate), RangeError);
});

test("steps that overlap run one after the other", async () => {
  const plan = planOf("net");
  const [some, other] = [await load("net"), await load("net")];
  const batches = plan.inputs.slice(0, 3).map(inputsOf);
  const together = await Promise.all(batches.map((batch) => some.module.trainStep(batch)));
  for (const [place, batch] of batches.entries()) {
    assert.deepEqual((await other.module.trainStep(batch)).loss.data, together[place].loss.data);
  }
  assert.deepEqual(await some.state.toBytes(true), await other.state.toBytes(true));
  // A reset waits for its turn, too.
  other.module.lazyResetGrad();
  const steps = [some.module.trainStep(batches[0]), some.module.lazyResetGrad(), some.module.trainStep(batches[1])];
  await Promise.all([...steps, other.module.trainStep(batches[0])]);
  other.module.lazyResetGrad();
  await other.module.trainStep(batches[1]);
  assert.deepEqual(await some.state.toBytes(true), await other.state.toBytes(true));
});

test("a release waits for the steps before it", async () => {
  const { module, optimizer } = await load("net");
  const batch = inputsOf(planOf("net").inputs[0]);
  const steps = [module.trainStep(batch), optimizer.optimizerStep(), module.evalStep(batch)];
  await Promise.all([...steps, module.release(), optimizer.release()]);
});

test("a file has the properties of the moment that it was asked for", async () => {
  const { state } = await load("none");
  const bytes = state.toBytes();
  state.setProperty("epoch", 1);
  assert.equal((await Checkpoint.load(ort, await bytes)).getProperty("epoch"), undefined);
});

test("an optimizer that is being made keeps what another one has changed", async () => {
  let goOn;
  const waits = [new Promise((resolve) => (goOn = resolve))];
  const create = async (...given) => {
    await waits.pop();
    return ort.InferenceSession.create(...given);
  };
  const state = await Checkpoint.load({ Tensor: ort.Tensor, InferenceSession: { create } }, contents("none", "weights"));
  const slow = Optimizer.create(state, contents("none", "optimizer_model.onnx"));
  const module = await Module.create(state, contents("none", "training_model.onnx"));
  const optimizer = await Optimizer.create(state, contents("none", "optimizer_model.onnx"));
  await module.trainStep(inputsOf(planOf("none").inputs[0]));
  await optimizer.optimizerStep();
  const before = await state.toBytes(true);
  goOn();
  await slow;
  assert.deepEqual(await state.toBytes(true), before);
});

test("what is wrong with a batch or a model is said, and nothing changes", async () => {
  const { state, module } = await load("net");
  const before = await state.toBytes(true);
  const [image, words, label] = planOf("net").inputs[1];
  const cases = [
    [[image, words], /inputs label are missing/],
    [[image, words, label, { ...label, name: "more" }], /more are missing or unknown/],
    [[{ ...image, dtype: "int64", values: image.values.map(Math.round) }, words, label], /float32/],
    [[{ ...image, shape: [image.values.length] }, words, label], /\[batch,64\]/],
    [[image, words, { ...label, values: label.values.slice(1), shape: [16] }], /batch = 17/],
    [[image, { ...words, values: words.values.map(() => 11) }, label], /has the value 11, but .* takes -?\d+ to 10/],
    [[image, words, { ...label, values: label.values.map(() => 10) }], /has the value 10, but .* takes 0 to 9/],
  ];
  for (const [batch, message] of cases) await assert.rejects(module.trainStep(inputsOf(batch)), message);
  assert.deepEqual(await state.toBytes(true), before);
  await assert.rejects(Module.create(state, contents("none", "training_model.onnx")), /different exports/);
  await assert.rejects(Module.create(state, contents("net", "eval_model.onnx")), /this is the evaluation model/);
  await assert.rejects(Module.create(state, contents("net", "plan.json")), /damaged, or no ONNX model|no artifact/);
  const training = await Module.create(state, contents("net", "training_model.onnx"));
  await assert.rejects(training.evalStep({}), /Module.create/);
  await assert.rejects(Checkpoint.load(ort, contents("net", "nominal_checkpoint")), /no weights/);
});

test("models are read as protobuf reads them, in any encoding", async () => {
  const state = await Checkpoint.load(ort, contents("none", "checkpoint"));
  const create = (model) => Module.create(state, contents("none", "training_model.onnx"), model);
  const encodings = (kind) => {
    const folder = new URL(`../encodings/${kind}/`, BUILD);
    return readdirSync(folder).map((file) => [`${kind}/${file}`, readFileSync(new URL(file, folder))]);
  };
  const batch = inputsOf(planOf("none").inputs[0]);
  const { loss } = await (await create(contents("none", "eval_model.onnx"))).evalStep(batch);
  for (const [name, model] of encodings("sound")) {
    const module = await create(model);
    assert.deepEqual((await module.evalStep(batch)).loss.data, loss.data, name);
    await ort.InferenceSession.create(await module.exportModelForInferencing(["out"]));
  }
  const reaching = /keeps tensors in another file, which|has the operator (EPContext|PythonOp|PythonOpGrad|ATen), which/;
  // As training models, which are read first.
  const refused = (model, message, name) => assert.rejects(Module.create(state, model), message, name);
  for (const [name, model] of encodings("reaching_out")) await refused(model, reaching, name);
  for (const [name, model] of encodings("damaged")) await refused(model, /damaged, or no ONNX model/, name);
  await refused(Buffer.from("\x18\0\0\0ORTM\0\0\0\0", "latin1"), /is in ORT format/);
});

test("expressions are evaluated as in Python", async () => {
  const source = fileURLToPath(new URL("../src/expressions.ts", import.meta.url));
  const [{ text }] = buildSync({ entryPoints: [source], format: "esm", write: false }).outputFiles;
  const { evaluate, holds } = await import(`data:text/javascript,${encodeURIComponent(text)}`);
  const known = JSON.parse(readFileSync(new URL("../expressions.json", BUILD), "utf8"));
  const sizes = new Map(Object.entries(known.sizes));
  const named = (expression, reason) => ({ message }) => message.startsWith(expression.slice(0, 200)) && reason.test(message);
  for (const [expression, value] of Object.entries(known.values)) {
    if (value >= 0) assert.equal(evaluate(expression, sizes), value, expression);
    else assert.throws(() => evaluate(expression, sizes), named(expression, /which is no size/));
    assert.equal(holds(expression, sizes), Boolean(value), expression);
  }
  for (const expression of known.refused) {
    assert.throws(() => evaluate(expression, sizes), named(expression, /is not arithmetic|has no value/));
    assert.throws(() => holds(expression, sizes), named(expression, /is not arithmetic|has no value/));
  }
  for (const expression of known.divisions) {
    assert.throws(() => evaluate(expression, sizes), named(expression, /it divides by zero/));
    assert.equal(holds(expression, sizes), false, expression);
  }
  assert.throws(() => evaluate("dim('far')", sizes), /needs the size of far/);
  assert.throws(() => evaluate(2 ** 60, sizes), /which is no size/);
  assert.ok(holds("dim('far') > 1", sizes));
});
