// The training itself, for reuse in your own page.

import * as ort from "onnxruntime-web/training";

// More threads would need an isolated page (COOP and COEP headers), and this small network gains nothing from them.
ort.env.wasm.numThreads = 1;

const PIXELS = 64;

/** Returns a session that starts from the artifacts' weights; they are the contents of the four files. */
export function createSession({ checkpoint, training, evaluation, optimizer }) {
  return ort.TrainingSession.create({
    checkpointState: checkpoint,
    trainModel: training,
    evalModel: evaluation,
    optimizerModel: optimizer,
  });
}

/** Returns the feeds for the chosen rows of the digits: pixels from 0 to 1, labels as int64. */
export function feedsOf(digits, rows) {
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
export async function trainStep(session, digits, rows) {
  const { loss } = await session.runTrainStep(feedsOf(digits, rows));
  await session.runOptimizerStep();
  await session.lazyResetGrad();
  return loss.data[0];
}

/** Returns the share of the rows whose digit gets the largest logit. */
export async function accuracy(session, digits, rows) {
  const { logits } = await session.runEvalStep(feedsOf(digits, rows));
  const classes = logits.dims[1];
  const correct = rows.filter((row, place) => {
    const scores = logits.data.subarray(place * classes, (place + 1) * classes);
    return scores.indexOf(Math.max(...scores)) === digits.labels[row];
  });
  return correct.length / rows.length;
}
