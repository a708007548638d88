// The random numbers of a training step, those of Python: PyTorch's Mersenne Twister, and NumPy's SFC64 for masks.

const WORDS = 624;
const SHIFT = 397;
// As many words as one stream of a mask draws.
const BLOCK = 1 << 16;
const LEVELS = 1 << 16;

/** The generator of a checkpoint: its 624 words and the position, uint32 [625]. */
export class MersenneTwister {
  readonly state: Uint32Array;

  /** Takes a state; without one, the generator is seeded by the platform. */
  constructor(state?: Uint32Array) {
    this.state = state?.slice() ?? crypto.getRandomValues(new Uint32Array(WORDS + 1));
    if (!state) this.state[WORDS] = WORDS;
  }

  /** Returns the state after `torch.manual_seed(seed)`. */
  static seeded(seed: number): MersenneTwister {
    const state = new Uint32Array(WORDS + 1);
    state[0] = seed;
    for (let i = 1; i < WORDS; i += 1) state[i] = Math.imul(1812433253, state[i - 1]! ^ (state[i - 1]! >>> 30)) + i;
    state[WORDS] = WORDS;
    return new MersenneTwister(state);
  }

  /** Returns the next 32 bits. */
  next(): number {
    const state = this.state;
    if (state[WORDS]! >= WORDS) this.refill();
    let word = state[state[WORDS]!]!;
    state[WORDS]! += 1;
    word ^= word >>> 11;
    word ^= (word << 7) & 0x9d2c5680;
    word ^= (word << 15) & 0xefc60000;
    return (word ^ (word >>> 18)) >>> 0;
  }

  private refill(): void {
    const state = this.state;
    for (let i = 0; i < WORDS; i += 1) {
      const mixed = (state[i]! & 0x80000000) | (state[(i + 1) % WORDS]! & 0x7fffffff);
      state[i] = state[(i + SHIFT) % WORDS]! ^ (mixed >>> 1) ^ (mixed & 1 ? 0x9908b0df : 0);
    }
    state[WORDS] = 0;
  }

  /** Returns a copy, which draws the same numbers. */
  copy(): MersenneTwister {
    return new MersenneTwister(this.state);
  }

  /** Returns the key of a step's masks: `torch.randint(2**62, ())`, as its lower and its upper word. */
  key(): [number, number] {
    const high = this.next() & 0x3fffffff;
    return [this.next(), high];
  }
}

/** Returns a mask: 1 for an element that is kept, which it is with the probability `kept`, otherwise 0. */
export function drawMask(key: readonly [number, number], count: number, number: number, kept: number): Uint8Array {
  const words = Math.ceil(count / 4);
  const mask = new Uint8Array(4 * words);
  const scaled = (1 - kept) * LEVELS;
  const rounded = scaled % 1 === 0.5 ? 2 * Math.round(scaled / 2) : Math.round(scaled);
  const lowest = rounded - LEVELS / 2;
  if (lowest >= LEVELS / 2) return mask.subarray(0, count); // above every 16-bit number
  const raw = new Uint32Array(2 * words);
  for (let block = 0; block < words; block += BLOCK) {
    fill(raw.subarray(2 * block, 2 * Math.min(block + BLOCK, words)), [...wordsOf(key), number, block]);
  }
  const levels = new Int16Array(raw.buffer);
  for (let word = 0; word < words; word += 1) {
    mask[word] = Number(levels[2 * word]! >= lowest);
    mask[words + word] = Number(levels[2 * (words + word)]! >= lowest);
    mask[2 * words + word] = Number(levels[2 * word + 1]! >= lowest);
    mask[3 * words + word] = Number(levels[2 * (words + word) + 1]! >= lowest);
  }
  return mask.subarray(0, count);
}

/** NumPy leaves out upper words that are 0. */
function wordsOf([low, high]: readonly [number, number]): number[] {
  return high ? [low, high] : [low];
}

/** Fills an array with the numbers of `SFC64(SeedSequence(entropy))`, the lower word of each first. */
function fill(raw: Uint32Array, entropy: readonly number[]): void {
  let [al, ah, bl, bh, cl, ch] = seeds(entropy) as [number, number, number, number, number, number];
  let counter = 1;
  for (let i = -24; i < raw.length; i += 2) {
    // a + b + counter; the counter has one word, as no stream is longer.
    const low = (al >>> 0) + (bl >>> 0) + counter;
    const tl = low | 0;
    const th = (ah + bh + Math.floor(low / 2 ** 32)) | 0;
    counter += 1;
    al = bl ^ ((bl >>> 11) | (bh << 21));
    ah = bh ^ (bh >>> 11);
    const shifted = (cl >>> 0) + ((cl << 3) >>> 0);
    bl = shifted | 0;
    bh = (ch + ((ch << 3) | (cl >>> 29)) + Math.floor(shifted / 2 ** 32)) | 0;
    const rotated = (cl << 24) | (ch >>> 8);
    const sum = (rotated >>> 0) + (tl >>> 0);
    ch = (((ch << 24) | (cl >>> 8)) + th + Math.floor(sum / 2 ** 32)) | 0;
    cl = sum | 0;
    if (i >= 0) {
      raw[i] = tl;
      raw[i + 1] = th;
    }
  }
}

/** Returns six words of NumPy's SeedSequence. */
function seeds(entropy: readonly number[]): number[] {
  const hashing = (start: number, factor: number): ((value: number) => number) => {
    let constant = start;
    return (value) => {
      const mixed = value ^ constant;
      constant = Math.imul(constant, factor);
      const product = Math.imul(mixed, constant);
      return product ^ (product >>> 16);
    };
  };
  const mix = (some: number, other: number): number => {
    const mixed = Math.imul(0xca01f9dd, some) - Math.imul(0x4973f715, other) | 0;
    return mixed ^ (mixed >>> 16);
  };
  const hash = hashing(0x43b0d7e5, 0x931e8875);
  const pool = [0, 1, 2, 3].map((i) => hash(entropy[i] ?? 0));
  for (let from = 0; from < Math.max(4, entropy.length); from += 1) {
    for (let to = 0; to < 4; to += 1) {
      if (from !== to) pool[to] = mix(pool[to]!, hash(from < 4 ? pool[from]! : entropy[from]!));
    }
  }
  const drawn = hashing(0x8b51f9dd, 0x58f38ded);
  return [0, 1, 2, 3, 0, 1].map((i) => drawn(pool[i]!));
}
