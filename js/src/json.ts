// JSON as Python's json module writes it, so that a file goes round byte for byte.

/** A number that Python keeps as a float, even where it is integral: 3.0 must not come back as 3. */
export class Float {
  constructor(readonly value: number) {}
}

/** An object is a Map, as the order of its keys matters, and JavaScript moves keys that look like numbers. */
export type Json = null | boolean | number | bigint | string | Float | Json[] | JsonObject;
export type JsonObject = Map<string, Json>;

const TOKEN = /\s*([{}[\],:]|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|-?Infinity|NaN|true|false|null|")/y;
const WORDS: Record<string, null | boolean> = { true: true, false: false, null: null };

/** Returns the value of a text. Throws a SyntaxError if it is not JSON, or an object has a key twice. */
export function parse(text: string): Json {
  TOKEN.lastIndex = 0;
  const next = (): string => {
    const place = TOKEN.lastIndex;
    const token = TOKEN.exec(text)?.[1];
    if (token === undefined) throw new SyntaxError(`invalid JSON at character ${place}`);
    return token === '"' ? string() : token;
  };
  // Not a part of the expression, which would need memory for each character.
  const string = (): string => {
    const start = TOKEN.lastIndex - 1;
    let end = text.indexOf('"', start + 1);
    while (end > 0 && isEscaped(text, end)) end = text.indexOf('"', end + 1);
    if (end < 0) throw new SyntaxError(`invalid JSON at character ${start}`);
    TOKEN.lastIndex = end + 1;
    return text.slice(start, end + 1);
  };
  const list = (end: string, item: (token: string) => void): void => {
    let token = next();
    if (token === end) return;
    for (;;) {
      item(token);
      const after = next();
      if (after === end) return;
      if (after !== ",") throw new SyntaxError(`invalid JSON before character ${TOKEN.lastIndex}`);
      token = next();
    }
  };
  const value = (token: string): Json => {
    if (token === "[") {
      const items: Json[] = [];
      list("]", (first) => items.push(value(first)));
      return items;
    }
    if (token === "{") {
      const items: JsonObject = new Map();
      list("}", (first) => {
        const key = value(first);
        if (typeof key !== "string" || items.has(key) || next() !== ":") throw new SyntaxError(`invalid key ${first}`);
        items.set(key, value(next()));
      });
      return items;
    }
    return scalar(token);
  };
  const found = value(next());
  if (text.slice(TOKEN.lastIndex).trim()) throw new SyntaxError(`invalid JSON after character ${TOKEN.lastIndex}`);
  return found;
}

function isEscaped(text: string, place: number): boolean {
  let start = place;
  while (text[start - 1] === "\\") start -= 1;
  return (place - start) % 2 === 1;
}

function scalar(token: string): Json {
  if (token.startsWith('"')) return JSON.parse(token) as string;
  if (token in WORDS) return WORDS[token]!;
  if (!/^-?\d/.test(token)) {
    if (!/^(NaN|-?Infinity)$/.test(token)) throw new SyntaxError(`invalid JSON: ${token}`);
    return new Float(Number(token));
  }
  if (/[.eE]/.test(token)) return new Float(Number(token));
  return Number.isSafeInteger(Number(token)) ? Number(token) : BigInt(token);
}

/** Returns a value as text, with Python's separators, escapes and floats; `compact` leaves out the spaces. */
export function stringify(value: Json, compact = false): string {
  const [comma, colon] = compact ? [",", ":"] : [", ", ": "];
  if (value instanceof Float) return float(value.value);
  if (Array.isArray(value)) return `[${value.map((item) => stringify(item, compact)).join(comma)}]`;
  if (value instanceof Map) {
    const items = [...value].map(([key, item]) => quoted(key) + colon + stringify(item, compact));
    return `{${items.join(comma)}}`;
  }
  return typeof value === "string" ? quoted(value) : typeof value === "number" ? integer(value) : String(value);
}

function integer(value: number): string {
  return Number.isInteger(value) ? BigInt(value).toString() : float(value);
}

function quoted(value: string): string {
  const escaped = (char: string): string => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return JSON.stringify(value).replace(/[\u007f-\uffff]/g, escaped);
}

/** Both languages write the shortest digits that give the number back, but switch to exponents at other places. */
function float(value: number): string {
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return Object.is(value, -0) ? "-0.0" : "0.0";
  const [digits, exponent] = value.toExponential().split("e") as [string, string];
  const power = Number(exponent);
  if (power < -4 || power >= 16) {
    return `${digits}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  }
  return Number.isInteger(value) ? `${value}.0` : String(value);
}
