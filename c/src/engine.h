// ONNX Runtime, through the functions that the program has given: values, sessions and errors.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "ort_trainer_c_api.h"
#include "sealed.h"

namespace ort_trainer {

// An error that becomes an OrtStatus with this code; all others become ORT_FAIL.
struct Error : std::runtime_error {
  Error(OrtErrorCode given, const std::string& message) : std::runtime_error(message), code(given) {}
  OrtErrorCode code;
};

[[noreturn]] inline void Invalid(const std::string& message) { throw Error(ORT_INVALID_ARGUMENT, message); }

// The table of functions; null before OrtTrainerGetApi() has been called.
extern const OrtApi* ort;

// Throws the error of a status that is not null.
void Check(OrtStatus* status);

struct Release {
  void operator()(OrtValue* value) const { ort->ReleaseValue(value); }
  void operator()(OrtSession* session) const { ort->ReleaseSession(session); }
  void operator()(OrtMemoryInfo* info) const { ort->ReleaseMemoryInfo(info); }
  void operator()(OrtTensorTypeAndShapeInfo* info) const { ort->ReleaseTensorTypeAndShapeInfo(info); }
};
template <typename T>
using Owned = std::unique_ptr<T, Release>;

// An element type: the engine's number, the format's code, and NumPy's name.
struct DType {
  ONNXTensorElementDataType type;
  std::string_view code;
  std::string_view name;
};
// Each throws std::runtime_error for a type that can't be trained.
const DType& DTypeOfCode(std::string_view code);
const DType& DTypeNamed(std::string_view name);

// A tensor in memory of its own, which the engine reads and writes in place.
class Tensor {
 public:
  Tensor(const DType& dtype, Shape shape, const std::uint8_t* data = nullptr);  // zeros without data

  const DType& dtype() const { return *dtype_; }
  const Shape& shape() const { return shape_; }
  Bytes& bytes() { return bytes_; }
  const Bytes& bytes() const { return bytes_; }
  std::size_t count() const { return bytes_.size() / SizeOf(dtype_->code); }
  StoredTensor stored() const { return {std::string(dtype_->code), shape_, bytes_.data(), bytes_.size()}; }
  OrtValue* value() const { return value_.get(); }
  // Sets the elements, or all of them to one number.
  void Set(const std::vector<double>& values);
  void Fill(double number) { Set(std::vector<double>(count(), number)); }

 private:
  const DType* dtype_;
  Shape shape_;
  Bytes bytes_;
  Owned<OrtValue> value_;
};

struct TypeAndShape {
  ONNXTensorElementDataType type;
  Shape shape;
};
// Throws ORT_INVALID_ARGUMENT if the value is no tensor.
TypeAndShape Described(const OrtValue* value, const std::string& name);
std::string Shown(const Shape& shape);

// What a run takes or gives: names in the graph, and values.
struct Values {
  std::vector<const char*> names;
  std::vector<OrtValue*> values;

  void Add(const std::string& name, OrtValue* value) {
    names.push_back(name.c_str());
    values.push_back(value);
  }
};

// Outputs that are null are made by the engine.
void Run(OrtSession* session, const OrtRunOptions* options, const Values& inputs, Values& outputs);

}  // namespace ort_trainer
