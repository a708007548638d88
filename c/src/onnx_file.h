// ONNX models as bytes of protobuf: the description in an artifact, and inference models.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sealed.h"

namespace ort_trainer {

// Returns what an artifact says of itself (ort_trainer/step/contract.py), a model of this kind: "training",
// "evaluation" or "optimizer". Throws std::runtime_error if it is none.
Json Describe(const Bytes& model, std::string_view kind);

struct Weight {
  int type;  // ONNX's number of the element type
  Shape shape;
  const std::uint8_t* data;
  std::size_t size;
};

// Returns a model with the nodes, inputs and weights that some values of an evaluation model need.
Bytes InferenceModel(const Bytes& model, const std::map<std::string, Weight>& state,
                     const std::vector<std::string>& outputs);

}  // namespace ort_trainer
