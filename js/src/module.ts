// Training, evaluation and updates from the artifacts of an export.

import type * as common from "onnxruntime-common";

import type { Checkpoint } from "./checkpoint.js";
import { describe, type OptimizerModel, type RandomInput, type StepModel } from "./contract.js";
import { check, evaluate, holds } from "./expressions.js";
import { inferenceModel } from "./inference.js";
import { drawMask, MersenneTwister } from "./random.js";
import { CheckpointError } from "./sealed.js";
import { full, sizeOf, type Tensor } from "./tensors.js";

export type Tensors = Record<string, Tensor>;
type Options = common.InferenceSession.SessionOptions;
type Session = common.InferenceSession;

/** Trains and evaluates a model. */
export class Module {
  private constructor(
    private readonly state: Checkpoint,
    private readonly training: Step,
    private readonly evaluation: Step | null,
  ) {}

  /**
   * Loads the models.
   *
   * @param state The checkpoint to train; several modules may share one.
   * @param training The training model, the bytes of its file.
   * @param evaluation The evaluation model, for `evalStep` and `exportModelForInferencing`.
   * @param options Options of the engine's sessions, such as `{ executionProviders: ["webgpu"] }`.
   */
  static async create(
    state: Checkpoint,
    training: Uint8Array,
    evaluation: Uint8Array | null = null,
    options: Options = {},
  ): Promise<Module> {
    const trained = await Step.create(state, "training", training, options);
    try {
      return new Module(state, trained, evaluation && (await Step.create(state, "evaluation", evaluation, options)));
    } catch (error) {
      await trained.session.release();
      throw error;
    }
  }

  /** Runs a training step: adds to the gradients, and returns the outputs by name. */
  trainStep(inputs: Tensors): Promise<Tensors> {
    return this.state.exclusively(() => this.training.run(inputs));
  }

  /** Runs an evaluation step, and returns the outputs by name. */
  evalStep(inputs: Tensors): Promise<Tensors> {
    return this.state.exclusively(() => this.evaluating.run(inputs));
  }

  /** Makes the next training step overwrite the gradients; until then they stay. */
  lazyResetGrad(): Promise<void> {
    return this.state.exclusively(async () => void (this.state.reset = true));
  }

  /** Returns a copy of the parameters by name, after the steps before. */
  getParameters(trainableOnly = false): Promise<Map<string, Tensor>> {
    const { parameters, trainable, engine } = this.state;
    return this.state.exclusively(async () => {
      const found = new Map<string, Tensor>();
      for (const name of trainableOnly ? trainable : parameters.keys()) {
        const { type, dims } = this.state.known(name);
        found.set(name, new engine.Tensor(type as "float32", (await this.state.copyOf(name)) as Float32Array, dims));
      }
      return found;
    });
  }

  /**
   * Returns an ONNX model for inference with the weights in it, the bytes of a file.
   *
   * @param outputNames Its outputs: any values of the evaluation model. Inputs that they don't need are left out.
   */
  async exportModelForInferencing(outputNames: readonly string[]): Promise<Uint8Array> {
    const { bytes, model } = this.evaluating;
    return this.state.exclusively(async () => {
      const state = new Map<string, Tensor>();
      for (const [name, input] of Object.entries(model.state)) state.set(input, this.state.known(name));
      return inferenceModel(bytes, state, outputNames);
    });
  }

  /** Frees the engine's memory, after the steps before. */
  release(): Promise<void> {
    return this.state.exclusively(async () => {
      await this.training.session.release();
      await this.evaluation?.session.release();
    });
  }

  private get evaluating(): Step {
    if (!this.evaluation) throw new Error("this needs the evaluation model: give it to Module.create()");
    return this.evaluation;
  }
}

/** The most elements of optimizer state for each of the parameters, as in ort_trainer/api/live_state.py. */
const LARGEST_STATE = 16;

/** Updates the parameters of a module from its gradients. */
export class Optimizer {
  private constructor(
    private readonly state: Checkpoint,
    private readonly model: OptimizerModel,
    private readonly session: Session,
  ) {}

  /** Loads an optimizer model, the bytes of its file. */
  static async create(state: Checkpoint, bytes: Uint8Array, options: Options = {}): Promise<Optimizer> {
    const model = describe("optimizer", bytes);
    checkExport(state, model);
    const slots = Object.entries(model.state);
    const allowed = LARGEST_STATE * ([...state.parameters.values()].reduce((n, { dims }) => n + sizeOf(dims), 0) + slots.length);
    if (!(slots.reduce((n, [, { shape }]) => n + sizeOf(shape), 0) <= allowed)) {
      throw new CheckpointError(`the optimizer model asks for more than ${allowed} elements of state: it is damaged or from another export`);
    }
    const kept = state.optimizer ?? new Map(
      slots.map(([key, slot]) => [key, full(state.engine, slot.dtype, slot.shape, slot.initial)]),
    );
    const differs = slots.find(([key, { dtype, shape }]) => {
      const tensor = kept.get(key);
      return tensor?.type !== dtype || String(tensor.dims) !== String(shape);
    });
    if (differs || kept.size !== slots.length || state.learningRates.length !== (model.rates ?? 1)) {
      throw new CheckpointError(`the checkpoint has the state of another optimizer: ${differs?.[0] ?? "it"} does not match`);
    }
    const inputs = [...Object.values(model.weights), ...Object.values(model.state).map(({ input }) => [input])].map(([name]) => name!);
    const outputs: [string, string][] = Object.entries(model.weights).map(([name, [, output]]) => [output, state.known(name).type]);
    outputs.push(...slots.map(([, slot]): [string, string] => [slot.output, slot.dtype]));
    const session = await createSession(state, bytes, options, [...inputs, ...Object.values(model.gradients)], outputs);
    state.optimizer ??= kept; // another optimizer may have been made and used meanwhile
    return new Optimizer(state, model, session);
  }

  /** Updates the parameters, and counts the update. Call `module.lazyResetGrad()` after it, to begin anew. */
  optimizerStep(): Promise<void> {
    const { state, model } = this;
    const { Tensor } = state.engine;
    return state.exclusively(async () => {
      const feeds: Tensors = {};
      for (const [name, [input]] of Object.entries(model.weights)) feeds[input] = state.known(name);
      for (const [name, input] of Object.entries(model.gradients)) {
        const gradient = state.gradients.get(name);
        if (!gradient) throw new Error("there are no gradients to update with: run trainStep() first");
        feeds[input] = gradient;
      }
      for (const [key, slot] of Object.entries(model.state)) feeds[slot.input] = state.optimizer!.get(key)!;
      const rates = Float32Array.from(state.learningRates);
      feeds[model.learning_rate] = new Tensor("float32", rates, [rates.length]);
      if (model.micro_batches) {
        feeds[model.micro_batches] = new Tensor("int64", BigInt64Array.of(BigInt(state.microBatches)), [1]);
      }
      const results = await this.session.run(feeds);
      for (const [name, [, output]] of Object.entries(model.weights)) state.replace(name, results[output]!);
      for (const [key, slot] of Object.entries(model.state)) {
        state.optimizer!.get(key)?.dispose();
        state.optimizer!.set(key, results[slot.output]!);
      }
      state.count("optimization_step", state.optimizationStep + 1);
    });
  }

  /** Returns the learning rate of the next update, for the parameters outside any parameter group. */
  getLearningRate(): number {
    return this.state.learningRates.at(-1)!;
  }

  /** Sets a constant learning rate for all parameters, which replaces the schedule. */
  setLearningRate(rate: number): Promise<void> {
    return this.state.setLearningRate(rate);
  }

  /** Frees the engine's memory, after the steps before. */
  release(): Promise<void> {
    return this.state.exclusively(() => this.session.release());
  }
}

/** A training or an evaluation model, with its session. */
class Step {
  private constructor(
    private readonly state: Checkpoint,
    readonly model: StepModel,
    readonly bytes: Uint8Array,
    readonly session: Session,
  ) {}

  static async create(state: Checkpoint, kind: StepModel["kind"], bytes: Uint8Array, options: Options): Promise<Step> {
    const model = describe(kind, bytes);
    checkExport(state, model);
    for (const { kind: random } of model.random) {
      if (!(random in DRAWS)) throw new Error(`the model draws ${random} numbers, which this package can't: train in Python`);
    }
    const sizes = [...model.random.map(({ shape }) => shape), (model.index_ranges ?? []).map(({ size }) => size)];
    for (const expression of [...model.guards, ...sizes.flat()]) check(expression);
    const pairs = Object.entries(model.gradients).map(([name, [, output]]) => [name, output] as const);
    const outputs = [...pairs, ...Object.entries(model.buffer_updates)].map(([name, output]): [string, string] => [
      output,
      state.known(name).type,
    ]);
    const inputs = [...Object.values(model.state), ...Object.values(model.gradients).map(([sum]) => sum)];
    return new Step(state, model, bytes, await createSession(state, bytes, options, inputs, outputs));
  }

  async run(inputs: Tensors): Promise<Tensors> {
    const { model, state } = this;
    const sizes = this.check(inputs);
    const feeds: Tensors = {};
    for (const { name } of model.inputs) feeds[name] = inputs[name]!;
    for (const [name, input] of Object.entries(model.state)) feeds[input] = state.known(name);
    const sums = Object.entries(model.gradients);
    for (const [name, [sum]] of sums) {
      const { type, dims } = state.known(name);
      feeds[sum] = state.gradients.get(name) ?? full(state.engine, type, dims, 0);
    }
    if (sums.length) feeds[model.reset] = new state.engine.Tensor("bool", Uint8Array.of(Number(state.reset)), [1]);
    const random = model.random.length ? (state.random?.copy() ?? new MersenneTwister()) : null;
    if (random) Object.assign(feeds, this.draw(sizes, random));
    const results = await this.session.run(feeds);
    if (random) state.random = random;
    for (const [name, [, output]] of sums) {
      state.gradients.get(name)?.dispose();
      state.gradients.set(name, results[output]!);
    }
    for (const [name, output] of Object.entries(model.buffer_updates)) state.replace(name, results[output]!);
    if (model.kind === "training") {
      state.count("micro_batches", state.reset ? 1 : state.microBatches + 1);
      state.reset = false;
    }
    return Object.fromEntries(model.outputs.map(({ name }) => [name, results[name]!]));
  }

  /** Checks a batch, and returns the sizes of its dimensions. */
  private check(inputs: Tensors): Map<string, number> {
    const { model } = this;
    const names = model.inputs.map(({ name }) => name);
    const wrong = [...names.filter((name) => !inputs[name]), ...Object.keys(inputs).filter((name) => !names.includes(name))];
    if (wrong.length) throw new TypeError(`inputs ${wrong.join(", ")} are missing or unknown: the model takes ${names.join(", ")}`);
    const sizes = new Map<string, number>(Object.entries(model.fixed));
    for (const { name, dtype, shape } of model.inputs) {
      const { type, dims } = inputs[name]!;
      if (type !== dtype) throw new TypeError(`input ${name} has the type ${type}, but the model takes ${dtype}`);
      const fits = dims.length === shape!.length && dims.every((size, axis) => {
        const said = shape![axis]!;
        if (typeof said === "number") return size === said;
        if (!sizes.has(said)) sizes.set(said, size);
        return size > 0 && sizes.get(said) === size;
      });
      if (!fits) {
        const known = [...sizes].map(([dimension, size]) => `${dimension} = ${size}`).join(", ");
        throw new RangeError(`input ${name} has the shape [${dims}], but the model takes [${shape}] with ${known}`);
      }
    }
    for (const guard of model.guards) {
      if (!holds(guard, sizes)) throw new RangeError(`the model is valid only if ${guard}: export it with a batch of these sizes`);
    }
    for (const { input, size, from_end: fromEnd, ignored, operator, source, steps } of model.index_ranges ?? []) {
      if (steps?.length) continue; // the operator uses only some of the values, and the engine checks those
      const limit = evaluate(size, sizes);
      const lowest = fromEnd ? -limit : 0;
      for (const value of inputs[input]!.data as Iterable<bigint | number>) {
        const index = Number(value);
        if ((index < lowest || index >= limit) && index !== ignored) {
          throw new RangeError(`input ${input} has the value ${index}, but ${operator} takes ${lowest} to ${limit - 1}. ${source}`);
        }
      }
    }
    return sizes;
  }

  private draw(sizes: ReadonlyMap<string, number>, random: MersenneTwister): Tensors {
    const { model, state } = this;
    const key = model.random.some(({ kind }) => kind === "mask") ? random.key() : null;
    const drawn = model.random.map((spec): [string, Tensor] => {
      const shape = spec.shape.map((size) => evaluate(size, sizes));
      const tensor = full(state.engine, spec.dtype, shape, 0);
      const values = DRAWS[spec.kind]!(spec, sizeOf(shape), random, key!);
      (tensor.data as Float32Array).set(values);
      return [spec.name, tensor];
    });
    return Object.fromEntries(drawn);
  }
}

type Draw = (spec: RandomInput, count: number, random: MersenneTwister, key: [number, number]) => Uint8Array | Float64Array;

// The numbers of NumPy's generator: uniform ones have as many bits as their dtype holds.
const LEVELS = 2 ** 24;
const DRAWS: Record<string, Draw> = {
  mask: ({ parameters: [kept, number] }, count, _, key) => drawMask(key, count, number!, kept!),
  bernoulli: ({ parameters: [probability, factor = 1] }, count, random) =>
    Float64Array.from({ length: count }, () => (random.next() >>> 8 < Math.fround(probability!) * LEVELS ? factor : 0)),
  uniform: ({ dtype }, count, random) =>
    Float64Array.from({ length: count }, () =>
      dtype === "float64" ? (random.next() * 2 ** 21 + (random.next() >>> 11)) / 2 ** 53 : (random.next() >>> 8) / LEVELS,
    ),
};

function checkExport(state: Checkpoint, model: StepModel | OptimizerModel): void {
  if (model.export !== state.export) {
    throw new Error(`the ${model.kind} model and the checkpoint come from different exports: use files written together`);
  }
}

// What WebGPU can't hold.
const ON_CPU = ["float64", "int8"];

/** Makes a session; what training changes stays on the device, if that has memory of its own. */
async function createSession(
  { engine }: Checkpoint,
  bytes: Uint8Array,
  options: Options,
  inputs: readonly string[],
  outputs: readonly [name: string, type: string][],
): Promise<Session> {
  const { wasm } = (engine as { env?: { wasm?: { proxy?: boolean } } }).env ?? {};
  if (wasm?.proxy) throw new Error("env.wasm.proxy takes the weights away: set it to false, and train in a worker of your own");
  const names = options.executionProviders?.map((provider) => (typeof provider === "string" ? provider : provider.name));
  const kept = outputs.filter(([, type]) => !ON_CPU.includes(type)).map(([name]) => [name, "gpu-buffer" as const]);
  const given = names?.includes("webgpu") ? { preferredOutputLocation: Object.fromEntries(kept), ...options } : options;
  const session = await engine.InferenceSession.create(bytes, given);
  const missing = inputs.find((name) => !session.inputNames.includes(name));
  const lost = outputs.find(([name]) => !session.outputNames.includes(name))?.[0];
  if (missing ?? lost) throw new Error(`the model is damaged: it lacks ${missing ?? lost}, which its description names`);
  return session;
}
