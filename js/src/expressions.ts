// Arithmetic over the sizes of a batch, as models describe shapes and conditions: `dim('batch') * 4 >= 8`.

const TOKEN = /\s*(dim\(\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")\s*\)|\*\*|\/\/|[=!<>]=|[-+*/%<>(),]|\d+(?:\.\d+)?(?:e[-+]?\d+)?|[A-Za-z_][\w.]*)\s*/y;
// The first binds weakest; `not` binds as the comparisons do.
const BINARY: Record<string, (a: number, b: number) => number>[] = [
  { or: (a, b) => a || b },
  { and: (a, b) => a && b },
  {
    "==": (a, b) => Number(a === b),
    "!=": (a, b) => Number(a !== b),
    "<": (a, b) => Number(a < b),
    "<=": (a, b) => Number(a <= b),
    ">": (a, b) => Number(a > b),
    ">=": (a, b) => Number(a >= b),
  },
  { "+": (a, b) => a + b, "-": (a, b) => a - b },
  {
    "*": (a, b) => a * b,
    "//": (a, b) => (b ? Math.floor(a / b) : NaN),
    "/": (a, b) => (b ? a / b : NaN),
    "%": (a, b) => a - b * Math.floor(a / b),
  },
];
const COMPARISONS = 2;
const FUNCTIONS: Record<string, (...values: number[]) => number> = {
  max: Math.max,
  min: Math.min,
  abs: Math.abs,
  int: Math.trunc,
  float: (value) => value,
  round: (value) => (Math.abs(value % 1) === 0.5 ? 2 * Math.round(value / 2) : Math.round(value)),
  "math.floor": Math.floor,
  "math.ceil": Math.ceil,
  "math.trunc": Math.trunc,
};

/** Returns whether a condition is true, or not all of its sizes are known; a division by zero makes it false. */
export function holds(condition: string, sizes: ReadonlyMap<string, number>): boolean {
  const names = [...condition.matchAll(new RegExp(TOKEN, "g"))].map(([, , single, double]) => single ?? double);
  return names.some((name) => name !== undefined && !sizes.has(unescaped(name))) || Boolean(evaluate(condition, sizes));
}

const unescaped = (name: string): string => name.replace(/\\(.)/g, "$1");

/** Returns the value of an expression; throws an error if it is none, or needs a size that is not given. */
export function evaluate(expression: number | string, sizes: ReadonlyMap<string, number>): number {
  if (typeof expression === "number") return expression;
  const tokens: RegExpExecArray[] = [];
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < expression.length) {
    const token = TOKEN.exec(expression);
    if (!token) throw new Error(`${expression} is not arithmetic over dimensions`);
    tokens.push(token);
  }
  let place = 0;
  const peek = (): string => tokens[place]?.[1] ?? "";
  const accept = (token: string): boolean => peek() === token && ++place > 0;
  const expect = (token: string): void => {
    if (!accept(token)) throw new Error(`${expression} is not arithmetic over dimensions, at ${peek() || "its end"}`);
  };
  const binary = (level: number): number => {
    if (level === BINARY.length) return unary();
    if (level === COMPARISONS && accept("not")) return Number(!binary(level));
    let value = binary(level + 1);
    for (let operator = BINARY[level]![peek()]; operator; operator = BINARY[level]![peek()]) {
      place += 1;
      value = operator(value, binary(level + 1));
    }
    return value;
  };
  const unary = (): number => {
    if (accept("-")) return -unary();
    const base = atom();
    return accept("**") ? base ** unary() : base;
  };
  const atom = (): number => {
    const token = tokens[place++];
    const [, text = "", single, double] = token ?? [];
    const name = single ?? double;
    if (name !== undefined) {
      const size = sizes.get(unescaped(name));
      if (size === undefined) throw new Error(`the size of ${name} is unknown`);
      return size;
    }
    if (text === "(") {
      const value = binary(0);
      expect(")");
      return value;
    }
    if (Object.hasOwn(FUNCTIONS, text)) {
      expect("(");
      const values = [binary(0)];
      while (accept(",")) values.push(binary(0));
      expect(")");
      return FUNCTIONS[text]!(...values);
    }
    if (text === "True" || text === "False") return Number(text === "True");
    if (!/^\d/.test(text)) throw new Error(`${expression} is not arithmetic over dimensions, at ${text || "its end"}`);
    return Number(text);
  };
  const value = binary(0);
  if (place < tokens.length) throw new Error(`${expression} is not arithmetic over dimensions, at ${peek()}`);
  return value;
}
