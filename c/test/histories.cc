// Does the actions that tests/api/test_histories.py draws: each line is a call in JSON, and is answered with a line.

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>

#include "../src/json.h"
#include "onnxruntime_training_cxx_api.h"

namespace {

using ort_trainer::Json;
using Bytes = std::vector<uint8_t>;

const std::map<std::string, std::pair<ONNXTensorElementDataType, size_t>> kTypes = {
    {"float32", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4}},
    {"float64", {ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8}},
    {"int64", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8}},
    {"int32", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4}},
};

Ort::Value Decoded(const Json& tensor) {
  std::vector<int64_t> shape;
  for (const Json& size : tensor.at("shape").items) shape.push_back(size.integer());
  const std::string& hex = tensor.at("data").string();
  Bytes bytes;
  for (size_t i = 0; i < hex.size(); i += 2) bytes.push_back(static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  auto value = Ort::Value::CreateTensor(Ort::CheckpointState::Allocator(), shape.data(), shape.size(),
                                        kTypes.at(tensor.at("dtype").string()).first);
  if (!bytes.empty()) std::memcpy(value.GetTensorMutableData<uint8_t>(), bytes.data(), bytes.size());
  return value;
}

Json Encoded(Ort::Value value) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  Ort::ThrowOnError(Ort::GetApi().GetTensorTypeAndShape(value, &info));
  size_t rank = 0, count = 0;
  ONNXTensorElementDataType type{};
  Ort::ThrowOnError(Ort::GetApi().GetTensorElementType(info, &type));
  Ort::ThrowOnError(Ort::GetApi().GetDimensionsCount(info, &rank));
  Ort::ThrowOnError(Ort::GetApi().GetTensorShapeElementCount(info, &count));
  std::vector<int64_t> shape(rank);
  Ort::ThrowOnError(Ort::GetApi().GetDimensions(info, shape.data(), rank));
  Ort::GetApi().ReleaseTensorTypeAndShapeInfo(info);
  Json tensor = Json::Object();
  for (const auto& [name, known] : kTypes) {
    if (known.first != type) continue;
    tensor["dtype"] = name;
    count *= known.second;
  }
  tensor["shape"] = Json::List();
  for (const int64_t size : shape) tensor["shape"].items.emplace_back(size);
  std::string hex;
  for (size_t i = 0; i < count; ++i) {
    const unsigned byte = value.GetTensorMutableData<uint8_t>()[i];
    for (const unsigned half : {byte >> 4, byte & 15}) hex += "0123456789abcdef"[half];
  }
  tensor["data"] = hex;
  return tensor;
}

Json Encoded(std::vector<Ort::Value> values) {
  Json list = Json::List();
  for (Ort::Value& value : values) list.items.push_back(Encoded(std::move(value)));
  return list;
}

Bytes Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!std::filesystem::is_regular_file(path)) return {};
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

class History {
 public:
  History() { options_.SetIntraOpNumThreads(1); }  // threads that wait for work would take time from others

  Json Call(const Json& call) {
    const auto text = [&](size_t place) { return call.items.at(place).string(); };
    const auto holds = [&](size_t place) { return call.items.at(place).truthy(); };
    const auto tensors = [&] {
      std::vector<Ort::Value> values;
      for (size_t place = 1; place < call.items.size(); ++place) values.push_back(Decoded(call.items[place]));
      return values;
    };
    const std::string name = text(0);
    if (name == "load") {
      const std::string path = text(2);
      auto state = holds(3) ? Ort::CheckpointState::LoadCheckpointFromBuffer(Contents(path))
                            : Ort::CheckpointState::LoadCheckpoint(path);
      auto session = Session(state, text(1), holds(3));
      session_.emplace(std::move(session));  // before its state is released
      state_.emplace(std::move(state));
    } else if (name == "open") {
      session_.emplace(Session(*state_, text(1), holds(2)));
    } else if (name == "save") {
      Ort::CheckpointState::SaveCheckpoint(*state_, text(1), holds(2));
    } else if (name == "train") {
      return Encoded(session_->TrainStep(tensors()));
    } else if (name == "evaluate") {
      return Encoded(session_->EvalStep(tensors()));
    } else if (name == "train_into" || name == "evaluate_into") {
      return RunInto(name == "train_into", tensors());
    } else if (name == "step") {
      session_->OptimizerStep();
    } else if (name == "reset") {
      session_->LazyResetGrad();
    } else if (name == "rate") {
      return static_cast<double>(session_->GetLearningRate());
    } else if (name == "set_rate") {
      session_->SetLearningRate(static_cast<float>(call.items.at(1).number()));
    } else if (name == "schedule") {
      session_->RegisterLinearLRScheduler(call.items.at(1).integer(), call.items.at(2).integer(),
                                          static_cast<float>(call.items.at(3).number()));
    } else if (name == "step_schedule") {
      session_->SchedulerStep();
    } else if (name == "parameter") {
      return Encoded(state_->GetParameter(text(1)));
    } else if (name == "set_parameter") {
      state_->UpdateParameter(text(1), Decoded(call.items.at(2)));
    } else if (name == "buffer") {
      return Encoded(session_->ToBuffer(holds(1)));
    } else if (name == "set_buffer") {
      auto buffer = Decoded(call.items.at(1));
      Ort::ThrowOnError(Ort::GetTrainingApi().CopyBufferToParameters(*session_, buffer, holds(2)));
    } else if (name == "set_property") {
      const Json& value = call.items.at(2);
      Ort::Property property = value.text;
      if (value.is(Json::Kind::kInt)) property = value.integer();
      if (value.is(Json::Kind::kFloat)) property = static_cast<float>(value.number());
      state_->AddProperty(text(1), property);
    } else if (name == "property") {
      const Ort::Property property = state_->GetProperty(text(1));
      if (const auto* number = std::get_if<int64_t>(&property)) return *number;
      if (const auto* number = std::get_if<float>(&property)) return static_cast<double>(*number);
      return std::get<std::string>(property);
    } else if (name == "export") {
      std::vector<std::string> names;
      for (const Json& output : call.items.at(2).items) names.push_back(output.string());
      session_->ExportModelForInferencing(text(1), names);
    } else {
      throw std::runtime_error("unknown action " + name);
    }
    return {};
  }

 private:
  Ort::TrainingSession Session(Ort::CheckpointState& state, const std::string& folder, bool in_memory) const {
    const std::string training = folder + "/training_model.onnx", evaluation = folder + "/eval_model.onnx",
                      optimizer = folder + "/optimizer_model.onnx";
    if (!in_memory) return {env_, options_, state, training, evaluation, optimizer};
    return {env_, options_, state, Contents(training), Contents(evaluation), Contents(optimizer)};
  }

  // Runs a step that writes its outputs to tensors for a batch of four rows.
  Json RunInto(bool training, const std::vector<Ort::Value>& tensors) {
    const auto made = [](std::vector<int64_t> shape) {
      return Ort::Value::CreateTensor(Ort::CheckpointState::Allocator(), shape.data(), shape.size(),
                                      ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
    };
    std::vector<Ort::Value> kept;
    kept.push_back(made({}));
    kept.push_back(made({4, 3}));
    const std::vector<const OrtValue*> inputs(tensors.begin(), tensors.end());
    std::vector<OrtValue*> outputs(kept.begin(), kept.end());
    const OrtTrainingApi& api = Ort::GetTrainingApi();
    Ort::ThrowOnError(training ? api.TrainStep(*session_, nullptr, inputs.size(), inputs.data(), 2, outputs.data())
                               : api.EvalStep(*session_, nullptr, inputs.size(), inputs.data(), 2, outputs.data()));
    return Encoded(std::move(kept));
  }

  Ort::Env env_;
  Ort::SessionOptions options_;
  std::optional<Ort::CheckpointState> state_;
  std::optional<Ort::TrainingSession> session_;
};

}  // namespace

int main() {
  History history;
  for (std::string line; std::getline(std::cin, line);) {
    Json answer = Json::List();
    answer.items.resize(2);  // the error, or null, and the result
    try {
      answer.items[1] = history.Call(ort_trainer::ParseJson(line));
    } catch (const std::exception& error) {
      answer.items[0] = error.what();
    }
    std::cout << ort_trainer::ToText(answer) << std::endl;
  }
}
