#include "onnx_file.h"

#include <algorithm>
#include <set>
#include <stdexcept>

namespace ort_trainer {
namespace {

// Numbers of fields in onnx.proto.
constexpr std::string_view kArtifact = "ort_trainer.artifact";
constexpr std::uint64_t kModelGraph = 7, kModelMetadata = 14, kModelTraining = 20, kEntryKey = 1, kEntryValue = 2;
constexpr std::uint64_t kNode = 1, kInitializer = 5, kInput = 11, kOutput = 12, kValueInfo = 13, kQuantization = 14;
constexpr std::uint64_t kNodeInput = 1, kNodeOutput = 2, kNodeAttribute = 5, kBody = 6, kBodies = 11, kName = 1;
constexpr std::uint64_t kTensorDims = 1, kTensorType = 2, kTensorName = 8, kTensorRaw = 9;
constexpr int kFormats = 2;  // the newest format of a description

using View = std::string_view;

struct Field {
  std::uint64_t number;
  View content;  // empty for a number
  View raw;      // with number and length
};

[[noreturn]] void Fail(const std::string& why) { throw std::runtime_error(why); }

std::uint64_t ReadVarint(View data, std::size_t& place) {
  std::uint64_t number = 0;
  for (int shift = 0; place < data.size() && shift < 64; shift += 7) {
    const auto byte = static_cast<unsigned char>(data[place++]);
    number |= std::uint64_t{byte & 0x7Fu} << shift;
    if (byte < 0x80) return number;
  }
  Fail("a number is truncated or too long");
}

std::vector<Field> Fields(View data) {
  std::vector<Field> found;
  for (std::size_t place = 0; place < data.size();) {
    const std::size_t start = place;
    const std::uint64_t key = ReadVarint(data, place);
    std::uint64_t size = 0;
    switch (key & 7) {
      case 0:
        ReadVarint(data, place);
        break;
      case 1:
        size = 8;
        break;
      case 2:
        size = ReadVarint(data, place);
        break;
      case 5:
        size = 4;
        break;
      default:
        size = data.size() + 1;
    }
    if (size > data.size() - place) Fail("invalid field at byte " + std::to_string(start));
    const View content = data.substr(place, size);
    place += size;
    found.push_back({key >> 3, content, data.substr(start, place - start)});
  }
  return found;
}

View Content(View data, std::uint64_t number) {
  View last;
  for (const Field& field : Fields(data)) {
    if (field.number == number) last = field.content;
  }
  return last;
}

void AppendVarint(std::string& out, std::uint64_t number) {
  for (; number > 0x7F; number >>= 7) out += static_cast<char>(0x80 | (number & 0x7F));
  out += static_cast<char>(number);
}

void AppendNumber(std::string& out, std::uint64_t number, std::uint64_t value) {
  AppendVarint(out, number << 3);
  AppendVarint(out, value);
}

void AppendBytes(std::string& out, std::uint64_t number, View content) {
  AppendVarint(out, number << 3 | 2);
  AppendVarint(out, content.size());
  out += content;
}

View ViewOf(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

struct Node {
  View raw;
  std::set<std::string> inputs;  // with what the bodies in its attributes take from around them
  std::vector<std::string> outputs;
};

Node ReadNode(const Field& field) {
  Node node{field.raw, {}, {}};
  for (const Field& part : Fields(field.content)) {
    if (part.number == kNodeInput) node.inputs.emplace(part.content);
    if (part.number == kNodeOutput && !part.content.empty()) node.outputs.emplace_back(part.content);
    if (part.number != kNodeAttribute) continue;
    for (const Field& body : Fields(part.content)) {
      if (body.number != kBody && body.number != kBodies) continue;
      for (const Field& inner : Fields(body.content)) {
        if (inner.number == kNode) node.inputs.merge(ReadNode(inner).inputs);
        if (inner.number == kOutput) node.inputs.emplace(Content(inner.content, kName));
      }
    }
  }
  return node;
}

std::string Tensor(const std::string& name, const Weight& weight) {
  std::string out;
  for (const std::int64_t size : weight.shape) AppendNumber(out, kTensorDims, static_cast<std::uint64_t>(size));
  AppendNumber(out, kTensorType, static_cast<std::uint64_t>(weight.type));
  AppendBytes(out, kTensorName, name);
  AppendBytes(out, kTensorRaw, {reinterpret_cast<const char*>(weight.data), weight.size});
  return out;
}

struct Graph {
  std::string bytes;
  std::vector<Field> fields;  // of the bytes
  std::vector<Node> nodes;
  std::map<View, Field> initializers, inputs, outputs, infos;
};

Graph ReadGraph(View model) {
  Graph graph;
  for (const Field& field : Fields(model)) {
    if (field.number == kModelGraph) graph.bytes += field.content;
  }
  graph.fields = Fields(graph.bytes);
  for (const Field& field : graph.fields) {
    if (field.number == kNode) graph.nodes.push_back(ReadNode(field));
    if (field.number == kInitializer) graph.initializers.emplace(Content(field.content, kTensorName), field);
    if (field.number == kInput) graph.inputs.emplace(Content(field.content, kName), field);
    if (field.number == kOutput) graph.outputs.emplace(Content(field.content, kName), field);
    if (field.number == kValueInfo) graph.infos.emplace(Content(field.content, kName), field);
  }
  return graph;
}

void CheckNames(const Graph& graph, const std::vector<std::string>& outputs) {
  std::set<View> known;
  for (const auto& entry : graph.inputs) known.insert(entry.first);
  for (const auto& entry : graph.initializers) known.insert(entry.first);
  for (const Node& node : graph.nodes) known.insert(node.outputs.begin(), node.outputs.end());
  const bool unknown = std::any_of(outputs.begin(), outputs.end(), [&](const auto& name) { return !known.count(name); });
  if (!unknown && !outputs.empty() && std::set<std::string>(outputs.begin(), outputs.end()).size() == outputs.size()) return;
  std::string given, there;
  for (const auto& name : outputs) given += (given.empty() ? "" : ", ") + name;
  for (const auto& entry : graph.outputs) there += (there.empty() ? "" : ", ") + std::string(entry.first);
  Fail("an inference model needs outputs, each once, but [" + given + "] was given: the evaluation model has [" + there +
       "], and any value of its graph is allowed");
}

}  // namespace

Json Describe(const Bytes& model, std::string_view kind) {
  const std::string name = "the " + std::string(kind) + " model ";
  View said;
  try {
    for (const Field& field : Fields(ViewOf(model))) {
      if (field.number == kModelMetadata && Content(field.content, kEntryKey) == kArtifact) {
        said = Content(field.content, kEntryValue);
      }
    }
  } catch (const std::exception& error) {
    Fail(name + "is damaged, or no ONNX model: " + error.what());
  }
  if (said.empty()) Fail(name + "is not an ort_trainer artifact: write artifacts with ORTTrainer.export_artifacts(), or "
                               "convert those of onnxruntime-training with 'ort-trainer convert SOURCE TARGET'");
  Json found = ParseJson(said);
  // The key of an entry of external_data, as protobuf writes it.
  if (ViewOf(model).find("\n\blocation") != View::npos) {
    Fail(name + "keeps tensors in another file, which artifacts never do: export it again");
  }
  const std::int64_t format = found.at("format").integer();
  if (format < 1 || format > kFormats) {
    Fail(name + "has artifact format " + std::to_string(format) + ", but this library reads 1 to " + std::to_string(kFormats));
  }
  const std::string& is = found.at("kind").string();
  if (is != kind) Fail("expected " + name + "of an export, but this is the " + is + " model");
  return found;
}

Bytes InferenceModel(const Bytes& model, const std::map<std::string, Weight>& state,
                     const std::vector<std::string>& outputs) {
  const Graph graph = ReadGraph(ViewOf(model));
  CheckNames(graph, outputs);
  std::set<std::string> needed(outputs.begin(), outputs.end());
  std::vector<const Node*> nodes;
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    const auto is_needed = [&](const std::string& name) { return needed.count(name) > 0; };
    if (!std::any_of(node->outputs.begin(), node->outputs.end(), is_needed)) continue;
    nodes.push_back(&*node);
    needed.insert(node->inputs.begin(), node->inputs.end());
  }
  const auto kept = [&](View name) { return needed.count(std::string(name)) && !state.count(std::string(name)); };
  std::string made;
  for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) made += (*node)->raw;
  for (const auto& [name, field] : graph.initializers) made += kept(name) ? field.raw : View();
  for (const auto& [name, weight] : state) {
    if (needed.count(name)) AppendBytes(made, kInitializer, Tensor(name, weight));
  }
  for (const Field& field : graph.fields) {  // in the order of the model
    if (field.number == kInput && kept(Content(field.content, kName))) made += field.raw;
  }
  for (const std::string& name : outputs) {
    std::string only_name;
    AppendBytes(only_name, kName, name);
    View described = only_name;
    for (const auto* known : {&graph.inputs, &graph.infos, &graph.outputs}) {
      if (const auto found = known->find(name); found != known->end()) described = found->second.content;
    }
    AppendBytes(made, kOutput, described);
  }
  for (const Field& field : graph.fields) {
    const auto handled = {kNode, kInitializer, kInput, kOutput, kValueInfo, kQuantization};
    if (std::find(handled.begin(), handled.end(), field.number) == handled.end()) made += field.raw;
  }
  std::string whole;
  for (const Field& field : Fields(ViewOf(model))) {
    const bool artifact = field.number == kModelMetadata && Content(field.content, kEntryKey) == kArtifact;
    if (field.number != kModelGraph && field.number != kModelTraining && !artifact) whole += field.raw;
  }
  AppendBytes(whole, kModelGraph, made);
  return Bytes(whole.begin(), whole.end());
}

}  // namespace ort_trainer
