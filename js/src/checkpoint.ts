// The state of training, and its file, which Python reads and writes too.

import { Float, parse, stringify, type Json, type JsonObject } from "./json.js";
import { MersenneTwister } from "./random.js";
import { learningRate, type Schedule } from "./schedules.js";
import { CheckpointError, read, write, type Stored } from "./sealed.js";
import { fromStored, full, sizeOf, toStored, type Engine, type Tensor, type Values } from "./tensors.js";

const KEY = "ort_trainer.checkpoint";
const VERSION = 3;
const RANDOM_WORDS = 625;

/** Parameters, optimizer and the rest of what training changes; modules and optimizers share it. */
export class Checkpoint {
  /** @internal Steps replace the tensors. */ readonly parameters: Map<string, Tensor>;
  /** Names of the trained parameters. */
  readonly trainable: readonly string[];
  /** @internal */ readonly values: Map<string, Tensor>;
  /** @internal */ gradients: Map<string, Tensor>;
  /** @internal */ optimizer: Map<string, Tensor> | null;
  /** @internal */ random: MersenneTwister | null;
  /** @internal */ reset: boolean;
  private turn: Promise<unknown> = Promise.resolve();

  private constructor(
    /** The engine that the tensors are of. */
    readonly engine: Engine,
    private readonly said: JsonObject,
    tensors: ReadonlyMap<string, Stored>,
  ) {
    const group = (name: string): Map<string, Tensor> => {
      const names = (said.get("order") as Map<string, string[]>).get(name) ?? [];
      return new Map(names.map((key) => [key, fromStored(engine, tensors.get(`${name}:${key}`)!)]));
    };
    this.values = group("buffers");
    this.parameters = group("parameters");
    this.gradients = group("gradients");
    this.optimizer = said.get("has_optimizer") ? group("optimizer") : null;
    this.trainable = said.get("trainable") as string[];
    this.reset = this.gradients.size === 0;
    const random = tensors.get("random:state");
    this.random = random ? new MersenneTwister(new Uint32Array(new Uint8Array(random.bytes).buffer)) : null;
    this.check();
  }

  /**
   * Returns the state in the bytes of a file.
   *
   * @param engine The namespace of onnxruntime-web or onnxruntime-node.
   * @throws CheckpointError if the file is damaged, or not a complete checkpoint of an export.
   */
  static async load(engine: Engine, bytes: Uint8Array): Promise<Checkpoint> {
    const { tensors, metadata } = await read(bytes);
    const text = metadata.get(KEY);
    if (typeof text !== "string") {
      throw new CheckpointError("this is no checkpoint of an export: write one with ORTTrainer.export_artifacts()");
    }
    const said = parse(text) as JsonObject;
    if (said.get("version") !== VERSION) {
      throw new CheckpointError(`the checkpoint has version ${String(said.get("version"))}, and this reads ${VERSION}`);
    }
    if (said.get("nominal")) {
      throw new CheckpointError("a nominal checkpoint has no weights, so it can't be trained: use the complete one");
    }
    try {
      return new Checkpoint(engine, said, tensors);
    } catch (error) {
      throw new CheckpointError(`the checkpoint is damaged: ${(error as Error).message}`);
    }
  }

  /**
   * Returns the bytes of a file.
   *
   * @param includeOptimizerState Whether to write what is needed to continue, or the weights alone.
   */
  toBytes(includeOptimizerState = false): Promise<Uint8Array> {
    const properties = new Map(this.properties); // before those that are set while steps are waited for
    return this.exclusively(async () => {
      const groups = new Map<string, Map<string, Tensor>>([
        ["parameters", this.parameters],
        ["buffers", this.values],
        ["optimizer", (includeOptimizerState && this.optimizer) || new Map()],
        ["gradients", includeOptimizerState && !this.reset ? this.gradients : new Map()],
      ]);
      const order: JsonObject = new Map([...groups].map(([name, group]) => [name, [...group.keys()]]));
      const tensors = new Map<string, Stored>();
      for (const [name, group] of groups) {
        for (const [key, tensor] of group) tensors.set(`${name}:${key}`, await toStored(tensor));
      }
      order.set("random", this.random ? ["state"] : []);
      if (this.random) {
        const bytes = new Uint8Array(this.random.state.buffer);
        tensors.set("random:state", { code: "U32", shape: [this.random.state.length], bytes });
      }
      const said = new Map(this.said).set("order", order).set("properties", properties);
      said.set("has_optimizer", includeOptimizerState && this.optimizer !== null);
      if (!includeOptimizerState) said.set("optimization_step", 0).set("micro_batches", 0);
      else if (this.reset) said.set("micro_batches", 0);
      return write(tensors, new Map([[KEY, stringify(said)]]));
    });
  }

  /** The user's own values, which the file keeps: numbers and texts. */
  getProperty(name: string): number | string | undefined {
    const value = this.properties.get(name);
    return value instanceof Float ? value.value : typeof value === "bigint" ? Number(value) : (value as number | string);
  }

  /** Sets a value of the user's own. */
  setProperty(name: string, value: number | string): void {
    if (typeof value !== "number" && typeof value !== "string") throw new TypeError(`${name} must be a number or a text`);
    this.properties.set(name, typeof value === "number" && !Number.isSafeInteger(value) ? new Float(value) : value);
  }

  /** Returns the values of a parameter, a copy. */
  getParameter(name: string): Promise<Values> {
    return this.exclusively(() => this.copyOf(name));
  }

  /** @internal */
  async copyOf(name: string): Promise<Values> {
    return ((await this.known(name).getData()) as Values).slice();
  }

  /** Sets the values of a parameter, of its type and number. */
  setParameter(name: string, values: Values): Promise<void> {
    return this.exclusively(async () => {
      if (this.values.has(name)) throw new TypeError(`${name} is a buffer, which only training changes`);
      const { type, dims } = this.known(name);
      const copy = full(this.engine, type, dims, 0);
      if (copy.data.constructor !== values.constructor || values.length !== sizeOf(dims)) {
        throw new TypeError(`${name} takes ${sizeOf(dims)} values in a ${copy.data.constructor.name}`);
      }
      (copy.data as Float32Array).set(values as Float32Array);
      this.replace(name, copy);
    });
  }

  /** Number of updates done. */
  get optimizationStep(): number {
    return this.said.get("optimization_step") as number;
  }

  /** The learning rates of the next update: one for each parameter group, then that of all other parameters. */
  get learningRates(): number[] {
    const schedule = this.said.get("schedule");
    const rates = (this.said.get("learning_rates") as Json[]).map(plain) as number[];
    if (!schedule) return rates;
    const known = Object.fromEntries([...(schedule as JsonObject)].map(([key, value]) => [key, plain(value)]));
    return rates.map((rate) => learningRate(known as unknown as Schedule, this.optimizationStep, rate));
  }

  /** Sets a constant learning rate for all parameters, which replaces the schedule. */
  setLearningRate(rate: number): Promise<void> {
    return this.exclusively(async () => {
      if (!(rate >= 0 && Math.fround(rate) < Infinity)) throw new RangeError(`a rate is finite and not negative, not ${rate}`);
      const { length } = this.said.get("learning_rates") as Json[];
      this.said.set("learning_rates", new Array<Json>(length).fill(new Float(rate))).set("schedule", null);
    });
  }

  /** Seeds the random numbers of training, as `torch.manual_seed(seed)` does. */
  setSeed(seed: number): Promise<void> {
    return this.exclusively(async () => void (this.random = MersenneTwister.seeded(seed)));
  }

  /** @internal */
  get export(): string {
    return this.said.get("export") as string;
  }

  /** @internal Number of training steps whose gradients have been added up. */
  get microBatches(): number {
    return this.said.get("micro_batches") as number;
  }

  /** @internal */
  count(what: "optimization_step" | "micro_batches", number: number): void {
    this.said.set(what, number);
  }

  /** @internal Returns a parameter or buffer. */
  known(name: string): Tensor {
    const tensor = this.parameters.get(name) ?? this.values.get(name);
    if (!tensor) throw new CheckpointError(`${name} is not in the checkpoint: it has ${[...this.parameters.keys()].join(", ")}`);
    return tensor;
  }

  /** @internal Replaces a parameter or buffer by what a step has computed. */
  replace(name: string, tensor: Tensor): void {
    const group = this.parameters.has(name) ? this.parameters : this.values;
    group.get(name)?.dispose();
    group.set(name, tensor);
  }

  /** @internal Runs a function after those before it: steps that overlap would lose each other's gradients. */
  exclusively<Result>(run: () => Promise<Result>): Promise<Result> {
    const result = this.turn.then(run);
    this.turn = result.catch(() => undefined);
    return result;
  }

  /** Throws an error if a value is invalid. */
  private check(): void {
    const counts = [this.optimizationStep, this.microBatches];
    const words = this.random?.state;
    const sound = {
      export: typeof this.export === "string",
      trainable: Array.isArray(this.trainable) && this.trainable.every((name) => this.parameters.has(name)),
      gradients: [...this.gradients.keys()].every((name) => this.parameters.has(name)),
      counts: counts.every((count) => Number.isSafeInteger(count) && count >= 0),
      learning_rates: this.learningRates.length > 0 && this.learningRates.every((rate) => rate >= 0 && rate < Infinity),
      properties: this.properties instanceof Map,
      random: words === undefined || (words.length === RANDOM_WORDS && words.at(-1)! < RANDOM_WORDS),
    };
    const wrong = Object.entries(sound).filter(([, isSound]) => !isSound);
    if (wrong.length) throw new Error(`invalid ${wrong.map(([name]) => name).join(", ")}`);
  }

  private get properties(): JsonObject {
    return this.said.get("properties") as JsonObject;
  }
}

function plain(value: Json): Json {
  return value instanceof Float ? value.value : value;
}
