// Trains in the page, in a real Chromium: `make test-browser`.

import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { mkdir, readFile } from "node:fs/promises";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { chromium } from "playwright-core";

const ROOT = new URL("../../", import.meta.url);
const FOLDER = fileURLToPath(new URL(".", import.meta.url));
// Containers have no sandbox; the other flags keep everything but the page off the network.
const FLAGS = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
const TOLERANCE = 1e-5; // relative

let server;
let browser;
let address;

/** Starts the server that `make browser` starts, on a free port, and returns its address. */
function serve() {
  return new Promise((resolve, reject) => {
    const command = ["-u", "-m", "http.server", "--bind", "127.0.0.1", "--directory", FOLDER, "0"];
    server = spawn(process.env.PYTHON ?? "python3", command, { stdio: ["ignore", "pipe", "ignore"] });
    server.on("error", reject);
    server.on("exit", (code) => reject(new Error(`the server ended with ${code}`)));
    server.stdout.on("data", (text) => {
      const port = /port (\d+)/.exec(text);
      if (port) resolve(`http://127.0.0.1:${port[1]}/`);
    });
  });
}

before(async () => {
  address = await serve();
  const executablePath = process.env.CHROMIUM ?? "/usr/bin/chromium";
  browser = await chromium.launch({ executablePath, args: FLAGS });
});

after(async () => {
  await browser?.close();
  server?.kill();
});

/** Returns a page and the list that its errors go to. */
async function newPage() {
  const page = await browser.newPage({ viewport: { width: 800, height: 1250 } });
  const errors = [];
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  page.on("pageerror", (error) => errors.push(error.message));
  return { page, errors };
}

/** Clicks on the button, waits for the end and returns the result. */
async function train(page, name) {
  await page.getByRole("button", { name, exact: true }).click();
  await page.waitForFunction(() => ["done", "failed"].includes(document.querySelector("main").dataset.state));
  assert.equal(await page.locator("#error").textContent(), "");
  return JSON.parse(await page.locator("main").getAttribute("data-result"));
}

/** Collects how many points the curve has whenever it changes. */
function watchCurve(page) {
  return page.evaluate(() => {
    window.lengths = [];
    const curve = document.querySelector("#chart .live");
    const note = () => window.lengths.push(curve.getAttribute("points").split(" ").length);
    new MutationObserver(note).observe(curve, { attributeFilter: ["points"] });
  });
}

/** The largest relative difference, over as many as there are of the first ones. */
const largestDifference = (some, others) =>
  Math.max(...some.map((value, place) => Math.abs(value - others[place]) / Math.abs(others[place])));
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

test("the page trains as ORTTrainer does", { timeout: 120_000 }, async () => {
  const plan = JSON.parse(await readFile(`${FOLDER}/build/plan.json`, "utf8"));
  const steps = plan.losses.length;
  const { page, errors } = await newPage();
  await page.goto(address);
  await page.waitForSelector("main[data-state=ready]");
  await watchCurve(page);
  const { losses, accuracies, millisecondsPerStep, loading } = await train(page, "Train");

  assert.equal(losses.length, steps);
  assert.equal(plan.orders.length * Math.ceil(plan.train_rows / plan.batch_size), steps);
  const difference = largestDifference(losses, plan.losses);
  assert.ok(difference < TOLERANCE, `some of the ${steps} losses differ from ORTTrainer's by ${difference}`);
  assert.ok(mean(losses.slice(-20)) < 0.1 * losses[0], `the loss went from ${losses[0]} to ${losses.at(-1)}`);
  assert.equal(accuracies.length, plan.orders.length);
  assert.ok(accuracies.at(-1) > 0.95, `test accuracy ${accuracies.at(-1)}`);
  const apart = Math.abs(accuracies.at(-1) - plan.accuracies.at(-1));
  assert.ok(apart < 0.01, `test accuracy ${accuracies.at(-1)}, in Python ${plan.accuracies.at(-1)}`);

  assert.equal(await page.locator("#accuracy").innerText(), percent(accuracies.at(-1)));
  assert.equal(await page.locator("#epochs tr").count(), plan.orders.length);
  const lengths = await page.evaluate(() => window.lengths);
  assert.ok(lengths.length > 3, `the curve was drawn ${lengths.length} times`);
  assert.equal(lengths.at(-1), steps);
  await mkdir(new URL("build/", ROOT), { recursive: true });
  await page.screenshot({ path: fileURLToPath(new URL("build/browser.png", ROOT)) });

  const again = await train(page, "Train again");
  assert.deepEqual(again.losses, losses);
  assert.deepEqual(errors, []);
  console.log(`${percent(accuracies.at(-1))} test accuracy, in Python ${percent(plan.accuracies.at(-1))}`);
  console.log(`losses within ${difference.toExponential(1)} of ORTTrainer's over ${steps} steps`);
  console.log(`${millisecondsPerStep.toFixed(2)} ms a step; ready after ${loading.milliseconds.toFixed(0)} ms`);
  console.log(`${loading.bytes.all} bytes loaded, ${loading.bytes.engine} of them the engine`);
});

/** Runs in the page: trains for a few steps, keeps the checkpoint, and goes on from what was kept. */
async function trainAndGoOn() {
  const { createSession, inputsOf, trainStep } = await import("./training.js");
  const { loadCheckpoint, saveCheckpoint } = await import("ort-trainer");
  const bytes = async (name) => new Uint8Array(await (await fetch(`build/${name}`)).arrayBuffer());
  const [checkpoint, training, evaluation, optimizer, all] = await Promise.all(
    ["checkpoint", "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "digits.bin"].map(bytes),
  );
  const split = (all.length * 64) / 65; // 64 pixels and a label each
  const digits = { pixels: all.subarray(0, split), labels: all.subarray(split) };
  const rows = Array.from({ length: 64 }, (_, row) => row);
  const models = { training, evaluation, optimizer };
  const session = await createSession({ checkpoint, ...models });
  const losses = [await trainStep(session, digits, rows)];
  await session.module.trainStep(inputsOf(digits, rows)); // whose gradients the checkpoint has
  await saveCheckpoint("digits", await session.state.toBytes(true));
  const kept = await loadCheckpoint("digits");
  const other = await createSession({ checkpoint: kept, ...models });
  for (const { module, optimizer } of [session, other]) {
    await optimizer.optimizerStep();
    losses.push((await module.evalStep(inputsOf(digits, rows))).loss.data[0]);
  }
  return { losses, kept: [...kept], missing: await loadCheckpoint("nothing") };
}

test("training goes on from a checkpoint that the browser keeps", { timeout: 60_000 }, async () => {
  const { page, errors } = await newPage();
  await page.goto(address);
  await page.waitForSelector("main[data-state=ready]");
  const { losses, kept, missing } = await page.evaluate(trainAndGoOn);
  assert.ok(losses[1] < losses[0]);
  assert.equal(losses[2], losses[1]);
  assert.equal(missing, undefined);
  assert.deepEqual(errors, []);
  // Python reads the checkpoint, and writes the same bytes.
  const script = fileURLToPath(new URL("tests/portable/rewrite_checkpoint.py", ROOT));
  const again = spawnSync(process.env.PYTHON ?? "python3", [script], { input: Buffer.from(kept) });
  assert.deepEqual([...again.stdout], kept, again.stderr.toString());
});

test("the page says what is missing", { timeout: 60_000 }, async () => {
  const { page } = await newPage();
  await page.route("**/build/checkpoint", (route) => route.fulfill({ status: 404 }));
  await page.goto(address);
  await page.waitForSelector("main[data-state=failed]");
  assert.match(await page.getByRole("alert").innerText(), /build\/checkpoint: 404 .*make browser/);
  assert.ok(await page.getByRole("button").isDisabled());
});

test("the page shows the errors of training", { timeout: 60_000 }, async () => {
  const { page } = await newPage();
  await page.route("**/build/checkpoint", (route) => route.fulfill({ body: "no checkpoint" }));
  await page.goto(address);
  await page.waitForSelector("main[data-state=failed]");
  assert.match(await page.getByRole("alert").innerText(), /checkpoint is damaged/);
});

/** Runs in the page: trains on WebGPU, and returns the losses and the names of the provider's adapter. */
async function trainOnGpu([steps, engine]) {
  const ort = await import(engine);
  const { Checkpoint, Module, Optimizer } = await import("ort-trainer");
  const { inputsOf } = await import("./training.js");
  ort.env.wasm.wasmPaths = new URL("./", engine).href;
  ort.env.wasm.numThreads = 1;
  const bytes = async (name) => new Uint8Array(await (await fetch(`build/${name}`)).arrayBuffer());
  const plan = await (await fetch("build/plan.json")).json();
  const all = await bytes("digits.bin");
  const pixels = 64 * (plan.train_rows + plan.test_rows);
  const digits = { pixels: all.subarray(0, pixels), labels: all.subarray(pixels) };
  const options = { executionProviders: ["webgpu"] };
  const state = await Checkpoint.load(ort, await bytes("checkpoint"));
  const module = await Module.create(state, await bytes("training_model.onnx"), undefined, options);
  const optimizer = await Optimizer.create(state, await bytes("optimizer_model.onnx"), options);
  const losses = [];
  for (let start = 0; losses.length < steps; start += plan.batch_size) {
    const { image, label } = inputsOf(digits, plan.orders[0].slice(start, start + plan.batch_size));
    const { loss } = await module.trainStep({
      image: new ort.Tensor("float32", image.data, image.dims),
      label: new ort.Tensor("int64", label.data, label.dims),
    });
    losses.push((await loss.getData())[0]);
    await optimizer.optimizerStep();
    module.lazyResetGrad();
  }
  return { losses, size: (await state.toBytes(true)).length, expected: plan.losses };
}

test("WebGPU trains, on an adapter of software", { timeout: 120_000 }, async (context) => {
  const flags = FLAGS.filter((flag) => flag !== "--disable-gpu");
  const executablePath = process.env.CHROMIUM ?? "/usr/bin/chromium";
  const args = [...flags, "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"];
  const other = await chromium.launch({ executablePath, args });
  try {
    const page = await other.newPage();
    await page.goto(address);
    await page.waitForSelector("main[data-state=ready]");
    if (!(await page.evaluate(async () => Boolean(await navigator.gpu?.requestAdapter())))) {
      context.skip("this Chromium has no adapter");
      return;
    }
    const engine = `${address}node_modules/onnxruntime-web/dist/ort.webgpu.bundle.min.mjs`;
    const { losses, size, expected } = await page.evaluate(trainOnGpu, [20, engine]);
    assert.equal(losses.length, 20);
    const difference = largestDifference(losses, expected);
    assert.ok(difference < TOLERANCE, `some of the losses differ from ORTTrainer's by ${difference}`);
    assert.ok(size > 50_000, `the checkpoint has ${size} bytes`);
  } finally {
    await other.close();
  }
});
