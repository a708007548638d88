// Makes an inference model from an evaluation model, by editing the bytes of the file.

import { ARTIFACT } from "./contract.js";
import { content, contents, field, fields, joined, ofBytes, ofNumber, text, type Field } from "./protobuf.js";
import { elementType, toStored, type Tensor } from "./tensors.js";

// Tags of fields in onnx.proto.
const MODEL = { graph: ofBytes(7), metadata: ofBytes(14), training: ofBytes(20) };
const GRAPH = { node: ofBytes(1), initializer: ofBytes(5), input: ofBytes(11), output: ofBytes(12), valueInfo: ofBytes(13) };
const [QUANTIZATION, NAME] = [ofBytes(14), ofBytes(1)];
const NODE = { input: ofBytes(1), output: ofBytes(2), attribute: ofBytes(5) };
const BODIES = [ofBytes(6), ofBytes(11)];
const TENSOR = { dims: ofNumber(1), type: ofNumber(2), name: ofBytes(8), raw: ofBytes(9) };

/** Returns a model with the nodes, inputs and weights that some of its values need. */
export async function inferenceModel(
  model: Uint8Array,
  state: ReadonlyMap<string, Tensor>,
  outputNames: readonly string[],
): Promise<Uint8Array> {
  const graph = [...fields(joined(contents(model, MODEL.graph)))];
  const nodes = graph.filter(({ tag }) => tag === GRAPH.node).map(readNode);
  const [inputs, outputs, infos] = [GRAPH.input, GRAPH.output, GRAPH.valueInfo].map((tag) => named(graph, tag, NAME));
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
    parts.push(field(GRAPH.output, info ? content(info) : field(NAME, name)));
  }
  const handled = [...Object.values(GRAPH), QUANTIZATION];
  parts.push(...graph.filter(({ tag }) => !handled.includes(tag)).map(({ raw }) => raw));
  const others = [...fields(model)].filter(
    (part) => !(Object.values(MODEL).includes(part.tag) && (part.tag !== MODEL.metadata || isArtifact(part))),
  );
  return joined([...others.map(({ raw }) => raw), field(MODEL.graph, joined(parts))]);
}

const isArtifact = (part: Field): boolean => text(content(part), NAME) === ARTIFACT;

function named(graph: readonly Field[], tag: number, key: number): Map<string, Field> {
  return new Map(graph.filter((part) => part.tag === tag).map((part) => [text(content(part), key), part]));
}

/** Reads a node; its inputs include what the bodies in its attributes take from around them. */
function readNode(node: Field): { raw: Uint8Array; inputs: string[]; outputs: string[] } {
  const data = content(node);
  const names = (tag: number): string[] => contents(data, tag).map((name) => new TextDecoder().decode(name));
  const bodies = contents(data, NODE.attribute).flatMap((attribute) => BODIES.flatMap((body) => contents(attribute, body)));
  const captured = bodies.flatMap((body) => [
    ...contents(body, GRAPH.output).map((value) => text(value, NAME)),
    ...[...fields(body)].flatMap((part) => (part.tag === GRAPH.node ? readNode(part).inputs : [])),
  ]);
  return { raw: node.raw, inputs: [...names(NODE.input), ...captured], outputs: names(NODE.output).filter(Boolean) };
}

async function weight(name: string, tensor: Tensor): Promise<Uint8Array> {
  const { shape, bytes } = await toStored(tensor);
  const dims = shape.map((size) => field(TENSOR.dims, size));
  return joined([...dims, field(TENSOR.type, elementType(tensor)), field(TENSOR.name, name), field(TENSOR.raw, bytes)]);
}
