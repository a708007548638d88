#include "onnx_file.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <stdexcept>

namespace ort_trainer {
namespace {

// A tag is the number of a field and its wire type. Protobuf skips a field of a known number with another wire type.
constexpr std::uint64_t kVarint = 0, kFixed64 = 1, kDelimited = 2, kGroup = 3, kGroupEnd = 4, kFixed32 = 5;
constexpr std::uint64_t Delimited(std::uint64_t number) { return number << 3 | kDelimited; }

// Tags of fields in onnx.proto.
constexpr std::string_view kArtifact = "ort_trainer.artifact";
constexpr std::uint64_t kModelGraph = Delimited(7), kModelMetadata = Delimited(14), kModelTraining = Delimited(20);
constexpr std::uint64_t kEntryKey = Delimited(1), kEntryValue = Delimited(2);
constexpr std::uint64_t kNode = Delimited(1), kInitializer = Delimited(5), kInput = Delimited(11), kOutput = Delimited(12);
constexpr std::uint64_t kValueInfo = Delimited(13), kQuantization = Delimited(14);
constexpr std::uint64_t kNodeInput = Delimited(1), kNodeOutput = Delimited(2), kNodeAttribute = Delimited(5);
constexpr std::uint64_t kNodeOperator = Delimited(4), kNodeDomain = Delimited(7);
constexpr std::uint64_t kBody = Delimited(6), kBodies = Delimited(11), kName = Delimited(1);
constexpr std::uint64_t kTensorDims = 1 << 3, kTensorType = 2 << 3, kTensorName = Delimited(8), kTensorRaw = Delimited(9);
constexpr std::uint64_t kTensorExternal = Delimited(13), kTensorLocation = 14 << 3;
constexpr int kFormats = 2;    // the newest format of a description
constexpr int kDeepest = 100;  // messages in each other, as in protobuf

using View = std::string_view;

struct Field {
  std::uint64_t tag;
  std::uint64_t number;  // if it is a varint
  View content;
  View raw;  // with tag and length
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

// The end of a group is a field only within the group that it ends.
Field ReadField(View data, std::size_t& place, std::uint64_t end_of_group = 0, int depth = 0) {
  const std::size_t start = place;
  Field field{ReadVarint(data, place), 0, {}, {}};
  std::uint64_t size = 0;
  // Protobuf would drop the bits of a tag above the 32nd.
  bool valid = field.tag >> 3 > 0 && field.tag >> 32 == 0 && depth <= kDeepest;
  switch (field.tag & 7) {
    case kVarint:
      field.number = ReadVarint(data, place);
      break;
    case kFixed64:
      size = 8;
      break;
    case kDelimited:
      size = ReadVarint(data, place);
      break;
    case kGroup:
      while (valid && ReadField(data, place, field.tag + 1, depth + 1).tag != field.tag + 1) continue;
      break;
    case kGroupEnd:
      valid = valid && field.tag == end_of_group;
      break;
    case kFixed32:
      size = 4;
      break;
    default:
      valid = false;
  }
  if (!valid || size > data.size() - place) Fail("invalid field at byte " + std::to_string(start));
  field.content = data.substr(place, size);
  place += size;
  field.raw = data.substr(start, place - start);
  return field;
}

// The fields of a message, each read when it is asked for.
class Fields {
 public:
  class Iterator {
   public:
    explicit Iterator(View data) : data_(data) { ++*this; }
    const Field& operator*() const { return field_; }
    bool operator!=(std::nullptr_t) const { return !at_end_; }
    Iterator& operator++() {
      at_end_ = place_ == data_.size();
      if (!at_end_) field_ = ReadField(data_, place_);
      return *this;
    }

   private:
    View data_;
    std::size_t place_ = 0;
    Field field_{};
    bool at_end_ = false;
  };

  explicit Fields(View data) : data_(data) {}
  Iterator begin() const { return Iterator(data_); }
  std::nullptr_t end() const { return nullptr; }

 private:
  View data_;
};

View Content(View data, std::uint64_t tag) {
  View last;
  for (const Field& field : Fields(data)) {
    if (field.tag == tag) last = field.content;
  }
  return last;
}

enum class Kind { kModelProto, kTrainingInfo, kFunctionProto, kGraphProto, kNodeProto, kAttribute, kSparse, kTensorProto };

// Which fields of a message have nodes and tensors in them.
constexpr struct {
  Kind outer;
  std::uint64_t tag;
  Kind inner;
} kInside[] = {
    {Kind::kModelProto, kModelGraph, Kind::kGraphProto},
    {Kind::kModelProto, kModelTraining, Kind::kTrainingInfo},
    {Kind::kModelProto, Delimited(25), Kind::kFunctionProto},
    {Kind::kTrainingInfo, Delimited(1), Kind::kGraphProto},
    {Kind::kTrainingInfo, Delimited(2), Kind::kGraphProto},
    {Kind::kFunctionProto, Delimited(7), Kind::kNodeProto},
    {Kind::kFunctionProto, Delimited(11), Kind::kAttribute},
    {Kind::kGraphProto, kNode, Kind::kNodeProto},
    {Kind::kGraphProto, kInitializer, Kind::kTensorProto},
    {Kind::kGraphProto, Delimited(15), Kind::kSparse},
    {Kind::kNodeProto, kNodeAttribute, Kind::kAttribute},
    {Kind::kAttribute, Delimited(5), Kind::kTensorProto},
    {Kind::kAttribute, kBody, Kind::kGraphProto},
    {Kind::kAttribute, Delimited(10), Kind::kTensorProto},
    {Kind::kAttribute, kBodies, Kind::kGraphProto},
    {Kind::kAttribute, Delimited(22), Kind::kSparse},
    {Kind::kAttribute, Delimited(23), Kind::kSparse},
    {Kind::kSparse, Delimited(1), Kind::kTensorProto},
    {Kind::kSparse, Delimited(2), Kind::kTensorProto},
};

// Returns what a message has that names a file or calls Python, for an error; empty if nothing does.
std::string ReachesOut(View data, Kind kind = Kind::kModelProto, int depth = 0) {
  if (depth > kDeepest) Fail("its graphs are nested too deeply");
  if (kind == Kind::kNodeProto) {
    const View type = Content(data, kNodeOperator);
    const bool calls = type == "EPContext" || type == "PythonOp" || type == "PythonOpGrad";
    if (calls || Content(data, kNodeDomain) == "org.pytorch.aten") return "has the operator " + std::string(type);
  }
  for (const Field& field : Fields(data)) {
    if (kind == Kind::kTensorProto) {
      const bool external = field.tag == kTensorExternal || (field.tag == kTensorLocation && field.number != 0);
      if (external) return "keeps tensors in another file";
    }
    for (const auto& [outer, tag, inner] : kInside) {
      if (outer != kind || tag != field.tag) continue;
      if (std::string what = ReachesOut(field.content, inner, depth + 1); !what.empty()) return what;
    }
  }
  return {};
}

void AppendVarint(std::string& out, std::uint64_t number) {
  for (; number > 0x7F; number >>= 7) out += static_cast<char>(0x80 | (number & 0x7F));
  out += static_cast<char>(number);
}

void AppendNumber(std::string& out, std::uint64_t tag, std::uint64_t value) {
  AppendVarint(out, tag);
  AppendVarint(out, value);
}

void AppendBytes(std::string& out, std::uint64_t tag, View content) {
  AppendVarint(out, tag);
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
    if (part.tag == kNodeInput) node.inputs.emplace(part.content);
    if (part.tag == kNodeOutput && !part.content.empty()) node.outputs.emplace_back(part.content);
    if (part.tag != kNodeAttribute) continue;
    for (const Field& body : Fields(part.content)) {
      if (body.tag != kBody && body.tag != kBodies) continue;
      for (const Field& inner : Fields(body.content)) {
        if (inner.tag == kNode) node.inputs.merge(ReadNode(inner).inputs);
        if (inner.tag == kOutput) node.inputs.emplace(Content(inner.content, kName));
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
    if (field.tag == kModelGraph) graph.bytes += field.content;
  }
  for (const Field& field : Fields(graph.bytes)) {
    graph.fields.push_back(field);
    if (field.tag == kNode) graph.nodes.push_back(ReadNode(field));
    if (field.tag == kInitializer) graph.initializers.emplace(Content(field.content, kTensorName), field);
    if (field.tag == kInput) graph.inputs.emplace(Content(field.content, kName), field);
    if (field.tag == kOutput) graph.outputs.emplace(Content(field.content, kName), field);
    if (field.tag == kValueInfo) graph.infos.emplace(Content(field.content, kName), field);
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
  const View bytes = ViewOf(model);
  // ONNX Runtime would not read it as protobuf.
  if (bytes.size() > 8 && bytes.substr(4, 4) == "ORTM") {
    Fail(name + "is in ORT format (.ort), which can't be trained: use the .onnx file that it was made from");
  }
  View said;
  std::string reaches_out;
  try {
    for (const Field& field : Fields(bytes)) {
      if (field.tag == kModelMetadata && Content(field.content, kEntryKey) == kArtifact) {
        said = Content(field.content, kEntryValue);
      }
    }
    reaches_out = ReachesOut(bytes);
  } catch (const std::exception& error) {
    Fail(name + "is damaged, or no ONNX model: " + error.what());
  }
  if (said.empty()) Fail(name + "is not an ort_trainer artifact: write artifacts with ORTTrainer.export_artifacts(), or "
                               "convert those of onnxruntime-training with 'ort-trainer convert SOURCE TARGET'");
  Json found = ParseJson(said);
  if (!reaches_out.empty()) Fail(name + reaches_out + ", which artifacts never do: export it again");
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
    if (field.tag == kInput && kept(Content(field.content, kName))) made += field.raw;
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
    if (std::find(handled.begin(), handled.end(), field.tag) == handled.end()) made += field.raw;
  }
  std::string whole;
  for (const Field& field : Fields(ViewOf(model))) {
    const bool artifact = field.tag == kModelMetadata && Content(field.content, kEntryKey) == kArtifact;
    if (field.tag != kModelGraph && field.tag != kModelTraining && !artifact) whole += field.raw;
  }
  AppendBytes(whole, kModelGraph, made);
  return Bytes(whole.begin(), whole.end());
}

}  // namespace ort_trainer
