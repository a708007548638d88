// Makes an inference model from an evaluation model, by editing the bytes of the file.

import { ARTIFACT } from "./contract.js";
import { content, contents, field, fields, joined, text, type Field } from "./protobuf.js";
import { elementType, toStored, type Tensor } from "./tensors.js";

// Numbers of fields in onnx.proto.
const MODEL = { graph: 7, metadata: 14, training: 20 };
const GRAPH = { node: 1, initializer: 5, input: 11, output: 12, valueInfo: 13, quantization: 14, sparse: 15 };
const NODE = { input: 1, output: 2, attribute: 5 };
const BODIES = [6, 11];
const TENSOR = { dims: 1, type: 2, name: 8, raw: 9 };

/** Returns a model with the nodes, inputs and weights that some of its values need. */
export async function inferenceModel(
  model: Uint8Array,
  state: ReadonlyMap<string, Tensor>,
  outputNames: readonly string[],
): Promise<Uint8Array> {
  const graph = fields(joined(contents(model, MODEL.graph)));
  const nodes = graph.filter(({ number }) => number === GRAPH.node).map(readNode);
  const [inputs, outputs, infos] = [GRAPH.input, GRAPH.output, GRAPH.valueInfo].map((number) => named(graph, number, 1));
  const initializers = named(graph, GRAPH.initializer, TENSOR.name);
  const known = new Set([...inputs!.keys(), ...initializers.keys(), ...nodes.flatMap((node) => node.outputs)]);
  const unknown = outputNames.filter((name) => !known.has(name));
  if (unknown.length || !outputNames.length || new Set(outputNames).size < outputNames.length) {
    throw new Error(
      `an inference model needs outputs, each once, but [${outputNames.join(", ")}] was given: the evaluation model has ` +
        `[${[...outputs!.keys()].join(", ")}], and any value of its graph is allowed`,
    );
  }
  const needed = new Set(outputNames);
  const kept = nodes.reverse().filter((node) => {
    const used = node.outputs.some((name) => needed.has(name));
    if (used) node.inputs.forEach((name) => needed.add(name));
    return used;
  });
  const parts = kept.reverse().map((node) => node.raw);
  for (const [name, { raw }] of initializers) if (needed.has(name) && !state.has(name)) parts.push(raw);
  for (const [name, tensor] of state) {
    if (needed.has(name)) parts.push(field(GRAPH.initializer, await weight(name, tensor)));
  }
  for (const [name, { raw }] of inputs!) if (needed.has(name) && !state.has(name)) parts.push(raw);
  for (const name of outputNames) {
    const info = outputs!.get(name) ?? infos!.get(name) ?? inputs!.get(name);
    parts.push(field(GRAPH.output, info ? content(info) : field(1, name)));
  }
  const handled = Object.values(GRAPH).filter((number) => number !== GRAPH.sparse);
  parts.push(...graph.filter(({ number }) => !handled.includes(number)).map(({ raw }) => raw));
  const others = fields(model).filter(
    (part) => !(Object.values(MODEL).includes(part.number) && (part.number !== MODEL.metadata || isArtifact(part))),
  );
  return joined([...others.map(({ raw }) => raw), field(MODEL.graph, joined(parts))]);
}

const isArtifact = (part: Field): boolean => text(content(part), 1) === ARTIFACT;

function named(graph: readonly Field[], number: number, key: number): Map<string, Field> {
  return new Map(graph.filter((part) => part.number === number).map((part) => [text(content(part), key), part]));
}

/** Reads a node; its inputs include what the bodies in its attributes take from around them. */
function readNode(node: Field): { raw: Uint8Array; inputs: string[]; outputs: string[] } {
  const data = content(node);
  const names = (number: number): string[] => contents(data, number).map((name) => new TextDecoder().decode(name));
  const bodies = contents(data, NODE.attribute).flatMap((attribute) => BODIES.flatMap((body) => contents(attribute, body)));
  const captured = bodies.flatMap((body) => [
    ...contents(body, GRAPH.output).map((value) => text(value, 1)),
    ...fields(body).flatMap((part) => (part.number === GRAPH.node ? readNode(part).inputs : [])),
  ]);
  return { raw: node.raw, inputs: [...names(NODE.input), ...captured], outputs: names(NODE.output).filter(Boolean) };
}

async function weight(name: string, tensor: Tensor): Promise<Uint8Array> {
  const { shape, bytes } = await toStored(tensor);
  const dims = shape.map((size) => field(TENSOR.dims, size));
  return joined([...dims, field(TENSOR.type, elementType(tensor)), field(TENSOR.name, name), field(TENSOR.raw, bytes)]);
}
