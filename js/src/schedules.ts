// Learning-rate schedules, by the formulas of Python's ort_trainer/core/schedules.py.

/** A schedule; a rate climbs to `base` in `warmup_steps` updates, and then goes by its kind. */
export interface Schedule {
  kind: "constant" | "linear" | "cosine" | "poly";
  total_steps: number;
  warmup_steps: number;
  cycles?: number;
  lr_end?: number;
  power?: number;
}

/** Returns the learning rate of the next update, after `step` updates. */
export function learningRate(schedule: Schedule, step: number, base: number): number {
  const { kind, total_steps: total, warmup_steps: warmup, cycles = 0.5, lr_end: end = 0, power = 1 } = schedule;
  if (base === 0 || step < warmup) return (base * step) / Math.max(1, warmup);
  const left = Math.max(1, total - warmup);
  if (kind === "constant") return base;
  if (kind === "linear") return base * Math.max(0, (total - step) / left);
  if (kind === "cosine") {
    return base * Math.max(0, 0.5 * (1 + Math.cos(2 * Math.PI * cycles * Math.min(1, (step - warmup) / left))));
  }
  if (kind !== "poly") throw new Error(`unknown schedule ${String(kind)}: export the model again`);
  return step > total ? end : (base - end) * (1 - (step - warmup) / (total - warmup)) ** power + end;
}
