// Arithmetic over the sizes of a batch, as models describe shapes and conditions: `dim('batch') * 4 >= 8`.

/** A number of Python: an int of 64 bits, or a finite float. */
type Value = bigint | number;
type Sizes = ReadonlyMap<string, number>;
type Formula = (sizes: Sizes) => Value;

// As in ort_trainer/core/dims.py.
const LONGEST = 10_000;
const MOST_OPERATIONS = 1_000;
const DEEPEST = 100;

const TOKEN =
  / *(dim *\( *(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)") *\)|\*\*|\/\/|[=!<>]=|[-+*/%<>(),]|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[A-Za-z_][\w.]*) */y;

class DivisionByZero extends Error {}

function checked(value: Value): Value {
  if (typeof value === "number" ? !Number.isFinite(value) : BigInt.asIntN(64, value) !== value) {
    throw new Error("a number in it is not finite, or has more than 64 bits");
  }
  return value;
}

/** Applies one function to two ints, and another one to floats. */
function arithmetic(whole: (a: bigint, b: bigint) => Value, real: (a: number, b: number) => number) {
  return (a: Value, b: Value): Value =>
    checked(typeof a === "bigint" && typeof b === "bigint" ? whole(a, b) : real(Number(a), Number(b)));
}

function division(whole: (a: bigint, b: bigint) => Value, real: (a: number, b: number) => number) {
  const divide = arithmetic(whole, real);
  return (a: Value, b: Value): Value => {
    if (!b) throw new DivisionByZero("it divides by zero");
    return divide(a, b);
  };
}

/** The rest of a division that rounds down: it has the sign of the divisor. */
const wholeRest = (a: bigint, b: bigint): bigint => (a % b && a % b < 0n !== b < 0n ? (a % b) + b : a % b);
const realRest = (a: number, b: number): number => (a % b && a % b < 0 !== b < 0 ? (a % b) + b : a % b);

function power(base: Value, exponent: Value): Value {
  if (!base && exponent < 0) throw new DivisionByZero("it divides by zero");
  if (typeof base !== "bigint" || typeof exponent !== "bigint" || exponent < 0n) {
    return checked(Number(base) ** Number(exponent));
  }
  // A base of 0, 1 or -1 has only two powers.
  if (base >= -1n && base <= 1n) return base ** (exponent ? 2n - (exponent % 2n) : 0n);
  if (exponent > 63n) throw new Error(`${base} ** ${exponent} is too large for a size`);
  return checked(base ** exponent);
}

// The first binds weakest.
const ARITHMETIC: Record<string, (a: Value, b: Value) => Value>[] = [
  { "+": arithmetic((a, b) => a + b, (a, b) => a + b), "-": arithmetic((a, b) => a - b, (a, b) => a - b) },
  {
    "*": arithmetic((a, b) => a * b, (a, b) => a * b),
    "//": division((a, b) => (a - wholeRest(a, b)) / b, (a, b) => Math.round((a - realRest(a, b)) / b)),
    "/": division((a, b) => Number(a) / Number(b), (a, b) => a / b),
    "%": division(wholeRest, realRest),
  },
];
// Comparisons of a bigint with a number are exact.
const COMPARISONS: Record<string, (a: Value, b: Value) => boolean> = {
  "==": (a, b) => a == b,
  "!=": (a, b) => a != b,
  "<": (a, b) => a < b,
  "<=": (a, b) => a <= b,
  ">": (a, b) => a > b,
  ">=": (a, b) => a >= b,
};
const EXTREMES: Record<string, (a: Value, b: Value) => Value> = {
  max: (a, b) => (b > a ? b : a),
  min: (a, b) => (b < a ? b : a),
};
const FUNCTIONS: Record<string, (value: Value) => Value> = {
  abs: (value) => checked(value < 0 ? -value : value),
  int: rounded(Math.trunc),
  float: Number,
  round: rounded((value) => (Math.abs(value % 1) === 0.5 ? 2 * Math.round(value / 2) : Math.round(value))),
  "math.floor": rounded(Math.floor),
  "math.ceil": rounded(Math.ceil),
  "math.trunc": rounded(Math.trunc),
};

function rounded(how: (value: number) => number): (value: Value) => Value {
  return (value) => (typeof value === "bigint" ? value : checked(BigInt(how(value))));
}

const own = <Found>(table: Record<string, Found>, key: string): Found | undefined =>
  Object.hasOwn(table, key) ? table[key] : undefined;
const unescaped = (name: string): string => name.replace(/\\(.)/g, "$1");
const truth = (value: unknown): bigint => (value ? 1n : 0n);
const shown = (expression: string): string => (expression.length > 200 ? `${expression.slice(0, 200)}...` : expression);

/** Returns an expression as a function, and the names of its dimensions. */
function parse(expression: string): { formula: Formula; names: string[] } {
  const fail = (reason: string): never => {
    throw new Error(`${shown(expression)} is not arithmetic over dimensions: ${reason}`);
  };
  if (expression.length > LONGEST) fail(`it has more than ${LONGEST} characters`);
  const tokens: RegExpExecArray[] = [];
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < expression.length) {
    const place = TOKEN.lastIndex;
    tokens.push(TOKEN.exec(expression) ?? fail(`character ${place} is not allowed`));
  }
  const names: string[] = [];
  let [place, operations, depth] = [0, 0, 0];
  const tooLarge = (): never =>
    fail(`it has more than ${MOST_OPERATIONS} operations, or is nested more than ${DEEPEST} deep`);
  const peek = (): string => tokens[place]?.[1] ?? "";
  const accept = (token: string): boolean => peek() === token && ++place > 0;
  const expect = (token: string): void => {
    if (!accept(token)) fail(`${token} is missing before ${peek() || "its end"}`);
  };
  const counted = (formula: Formula): Formula => (++operations > MOST_OPERATIONS ? tooLarge() : formula);
  const deeper = (part: () => Formula): Formula => {
    if (++depth > DEEPEST) tooLarge();
    const formula = part();
    depth -= 1;
    return formula;
  };
  const choice = (): Formula => {
    const value = disjunction();
    if (!accept("if")) return value;
    const condition = disjunction();
    expect("else");
    const other = deeper(choice);
    return counted((sizes) => (condition(sizes) ? value : other)(sizes));
  };
  const disjunction = (): Formula => {
    const parts = [conjunction()];
    while (accept("or")) parts.push(counted(conjunction()));
    return parts.length === 1 ? parts[0]! : (sizes) => truth(parts.some((part) => part(sizes)));
  };
  const conjunction = (): Formula => {
    const parts = [negation()];
    while (accept("and")) parts.push(counted(negation()));
    return parts.length === 1 ? parts[0]! : (sizes) => truth(parts.every((part) => part(sizes)));
  };
  const negation = (): Formula => {
    if (!accept("not")) return comparison();
    const value = deeper(negation);
    return counted((sizes) => truth(!value(sizes)));
  };
  const comparison = (): Formula => {
    const sides = [sum()];
    const compared: ((a: Value, b: Value) => boolean)[] = [];
    for (let compare = own(COMPARISONS, peek()); compare; compare = own(COMPARISONS, peek())) {
      place += 1;
      compared.push(compare);
      sides.push(counted(sum()));
    }
    if (!compared.length) return sides[0]!;
    return (sizes) => {
      const values = sides.map((side) => side(sizes));
      return truth(compared.every((compare, index) => compare(values[index]!, values[index + 1]!)));
    };
  };
  const chain = (level: number, operand: () => Formula): Formula => {
    const first = operand();
    const rest: [(a: Value, b: Value) => Value, Formula][] = [];
    for (let apply = own(ARITHMETIC[level]!, peek()); apply; apply = own(ARITHMETIC[level]!, peek())) {
      place += 1;
      rest.push([apply, counted(operand())]);
    }
    if (!rest.length) return first;
    return (sizes) => rest.reduce((value, [apply, next]) => apply(value, next(sizes)), first(sizes));
  };
  const sum = (): Formula => chain(0, () => chain(1, unary));
  const unary = (): Formula => {
    if (accept("-")) {
      const value = deeper(unary);
      return counted((sizes) => checked(-value(sizes)));
    }
    const base = atom();
    if (!accept("**")) return base;
    const exponent = deeper(unary);
    return counted((sizes) => power(base(sizes), exponent(sizes)));
  };
  const atom = (): Formula => {
    const token = tokens[place++];
    const [, text = "", single, double] = token ?? [];
    if (single !== undefined || double !== undefined) {
      const name = unescaped(single ?? double!);
      names.push(name);
      return (sizes) => BigInt(sizes.get(name)!);
    }
    if (text === "(") {
      const value = deeper(choice);
      expect(")");
      return value;
    }
    const [call, extreme] = [own(FUNCTIONS, text), own(EXTREMES, text)];
    if (call) {
      expect("(");
      const value = deeper(choice);
      expect(")");
      return counted((sizes) => call(value(sizes)));
    }
    if (extreme) {
      expect("(");
      const values = [deeper(choice)];
      do {
        expect(",");
        values.push(counted(deeper(choice)));
      } while (peek() === ",");
      expect(")");
      return (sizes) => values.map((value) => value(sizes)).reduce(extreme);
    }
    if (text === "True" || text === "False") return () => truth(text === "True");
    if (!/^[\d.]/.test(text)) fail(`${text || "its end"} is not allowed here`);
    let value: Value = 0n;
    try {
      value = checked(/^\d+$/.test(text) ? BigInt(text) : Number(text));
    } catch (error) {
      fail((error as Error).message);
    }
    return () => value;
  };
  const formula = choice();
  if (place < tokens.length) fail(`${peek()} is not allowed here`);
  return { formula, names };
}

function valueOf(expression: string, formula: Formula, sizes: Sizes): Value {
  try {
    return formula(sizes);
  } catch (error) {
    if (error instanceof DivisionByZero) throw error;
    throw new Error(`${shown(expression)} has no value: ${(error as Error).message}`);
  }
}

/** Throws an error if a text is no expression, before its sizes are known. */
export function check(expression: number | string): void {
  if (typeof expression === "string") parse(expression);
}

/** Returns whether a condition is true, or not all of its sizes are known; a division by zero makes it false. */
export function holds(condition: string, sizes: Sizes): boolean {
  const { formula, names } = parse(condition);
  if (!names.every((name) => sizes.has(name))) return true;
  try {
    return Boolean(valueOf(condition, formula, sizes));
  } catch (error) {
    if (error instanceof DivisionByZero) return false;
    throw error;
  }
}

/**
 * Returns the size that a number or an expression says, without its fraction. Throws an error if it has none, needs a size
 * that is not given, or a number in it is not finite or has more than 64 bits.
 */
export function evaluate(expression: number | string, sizes: Sizes): number {
  let value: Value = 0;
  if (typeof expression === "number") {
    value = expression;
  } else {
    const { formula, names } = parse(expression);
    const unknown = names.find((name) => !sizes.has(name));
    if (unknown !== undefined) throw new Error(`${shown(expression)} needs the size of ${unknown}, which is unknown`);
    try {
      value = valueOf(expression, formula, sizes);
    } catch (error) {
      throw error instanceof DivisionByZero ? new Error(`${shown(expression)} has no value: ${error.message}`) : error;
    }
  }
  const size = Math.trunc(Number(value));
  if (!Number.isSafeInteger(size) || size < 0) throw new Error(`${shown(String(expression))} is ${value}, which is no size`);
  return size;
}
