// The page around the training: loading, the button, the figures.

import { LossChart } from "./chart.js";
import { accuracy, createSession, release, trainStep } from "./training.js";

const FOLDER = "build";
const ARTIFACTS = {
  checkpoint: "checkpoint",
  training: "training_model.onnx",
  evaluation: "eval_model.onnx",
  optimizer: "optimizer_model.onnx",
};
const FRAME_MILLISECONDS = 16;

const main = document.querySelector("main");
const element = (id) => document.getElementById(id);
const range = (start, end) => Array.from({ length: end - start }, (_, place) => start + place);
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function show(state, text) {
  main.dataset.state = state;
  element("status").textContent = text;
  element("train").disabled = state !== "ready" && state !== "done";
}

function fail(error) {
  show("failed", "");
  element("error").textContent = `It failed. ${error.message ?? error}`;
  element("error").hidden = false;
}

/** Returns the bytes of a file from make_artifacts.py, never an older version from the browser's cache. */
async function contents(name) {
  const answer = await fetch(`${FOLDER}/${name}`, { cache: "no-cache" });
  if (!answer.ok) throw new Error(`${FOLDER}/${name}: ${answer.status} ${answer.statusText}; make browser writes it`);
  return new Uint8Array(await answer.arrayBuffer());
}

/** Returns the artifacts, the plan of the training, and the digits, the training rows first. */
async function load() {
  const artifacts = {};
  for (const [role, name] of Object.entries(ARTIFACTS)) artifacts[role] = await contents(name);
  const plan = JSON.parse(new TextDecoder().decode(await contents("plan.json")));
  const bytes = await contents("digits.bin");
  const split = bytes.length - (plan.train_rows + plan.test_rows);
  return { artifacts, plan, digits: { pixels: bytes.subarray(0, split), labels: bytes.subarray(split) } };
}

/** Trains for the plan's epochs and returns the loss of every step and the test accuracy of every epoch. */
async function train(session, { plan, digits }, chart) {
  const testRows = range(plan.train_rows, plan.train_rows + plan.test_rows);
  const losses = [];
  const accuracies = [];
  let milliseconds = 0;
  let painted = performance.now();
  for (const order of plan.orders) {
    for (let start = 0; start < order.length; start += plan.batch_size) {
      const before = performance.now();
      losses.push(await trainStep(session, digits, order.slice(start, start + plan.batch_size)));
      const now = performance.now();
      milliseconds += now - before;
      if (now - painted > FRAME_MILLISECONDS) {
        showLosses(chart, losses);
        await new Promise((resolve) => setTimeout(resolve)); // the steps keep the page busy: let it paint
        painted = performance.now();
      }
    }
    accuracies.push(await accuracy(session, digits, testRows));
    reportEpoch(losses, accuracies, plan);
    element("time").textContent = `${(milliseconds / losses.length).toFixed(2)} ms`;
  }
  showLosses(chart, losses);
  return { losses, accuracies, millisecondsPerStep: milliseconds / losses.length };
}

function showLosses(chart, losses) {
  chart.update(losses);
  element("loss").textContent = losses.at(-1).toFixed(4);
}

function reportEpoch(losses, accuracies, plan) {
  const steps = Math.ceil(plan.train_rows / plan.batch_size);
  const mean = losses.slice(-steps).reduce((sum, loss) => sum + loss, 0) / steps;
  const texts = [accuracies.length, mean.toFixed(4), percent(accuracies.at(-1))];
  const row = element("epochs").insertRow();
  for (const text of texts) row.insertCell().textContent = text;
  element("accuracy").textContent = percent(accuracies.at(-1));
}

/** Returns how many bytes have been transferred: for the engine alone, and in all. */
function downloads() {
  const sizes = { engine: 0, all: 0 };
  for (const { name, transferSize } of performance.getEntriesByType("resource")) {
    sizes.all += transferSize;
    if (name.endsWith(".wasm")) sizes.engine += transferSize;
  }
  return sizes;
}

async function start() {
  const data = await load();
  let session = await createSession(data.artifacts);
  const loading = { milliseconds: performance.now(), bytes: downloads() };
  const chart = new LossChart(element("chart"), data.plan.losses);
  element("size").textContent = `${(loading.bytes.all / 1e6).toFixed(1)} MB`;
  element("train").addEventListener("click", async () => {
    show("training", "Training");
    element("epochs").replaceChildren();
    try {
      session ??= await createSession(data.artifacts);
      const result = await train(session, data, chart);
      await release(session);
      session = null;
      main.dataset.result = JSON.stringify({ ...result, loading });
      element("train").textContent = "Train again";
      show("done", `Trained for ${result.losses.length} steps: test accuracy ${percent(result.accuracies.at(-1))}`);
    } catch (error) {
      if (session) await release(session);
      session = null;
      fail(error);
    }
  });
  show("ready", "Ready");
}

start().catch(fail);
