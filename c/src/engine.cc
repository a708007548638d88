#include "engine.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace ort_trainer {
namespace {

constexpr std::array<DType, 7> kDTypes = {{
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, "F32", "float32"},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, "F64", "float64"},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, "I64", "int64"},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, "I32", "int32"},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, "U8", "uint8"},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, "I8", "int8"},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, "BOOL", "bool"},
}};

template <typename Condition>
const DType& Found(Condition condition, const std::string& shown) {
  const auto found = std::find_if(kDTypes.begin(), kDTypes.end(), condition);
  if (found == kDTypes.end()) throw std::runtime_error("the element type " + shown + " is none that this library trains");
  return *found;
}

template <typename T>
void SetAs(Bytes& bytes, const std::vector<double>& values) {
  std::transform(values.begin(), values.end(), reinterpret_cast<T*>(bytes.data()), [](double value) {
    // Out of the range of T, the conversion is undefined.
    const bool fits = value >= static_cast<double>(std::numeric_limits<T>::min()) && value < std::ldexp(1.0, std::numeric_limits<T>::digits);
    if (std::is_integral_v<T> && !fits) throw std::runtime_error("the number " + std::to_string(value) + " does not fit its tensor");
    return static_cast<T>(value);
  });
}

}  // namespace

const OrtApi* ort = nullptr;

void Check(OrtStatus* status) {
  if (status == nullptr) return;
  const Error error(ort->GetErrorCode(status), ort->GetErrorMessage(status));
  ort->ReleaseStatus(status);
  throw error;
}

const DType& DTypeOfCode(std::string_view code) {
  return Found([&](const DType& known) { return known.code == code; }, std::string(code));
}

const DType& DTypeNamed(std::string_view name) {
  return Found([&](const DType& known) { return known.name == name; }, std::string(name));
}

Tensor::Tensor(const DType& dtype, Shape shape, const std::uint8_t* data)
    : dtype_(&dtype), shape_(std::move(shape)), bytes_(ElementCount(shape_) * SizeOf(dtype.code)) {
  if (data != nullptr && !bytes_.empty()) std::memcpy(bytes_.data(), data, bytes_.size());
  OrtMemoryInfo* info = nullptr;
  Check(ort->CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &info));
  const Owned<OrtMemoryInfo> owned(info);
  OrtValue* value = nullptr;
  Check(ort->CreateTensorWithDataAsOrtValue(info, bytes_.data(), bytes_.size(), shape_.data(), shape_.size(), dtype.type,
                                            &value));
  value_.reset(value);
}

void Tensor::Set(const std::vector<double>& values) {
  switch (dtype_->type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return SetAs<float>(bytes_, values);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
      return SetAs<double>(bytes_, values);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      return SetAs<std::int64_t>(bytes_, values);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return SetAs<std::int32_t>(bytes_, values);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
      return SetAs<std::int8_t>(bytes_, values);
    default:
      return SetAs<std::uint8_t>(bytes_, values);
  }
}

TypeAndShape Described(const OrtValue* value, const std::string& name) {
  int is_tensor = 0;
  if (value != nullptr) Check(ort->IsTensor(value, &is_tensor));
  if (!is_tensor) Invalid(name + " must be a tensor");
  OrtTensorTypeAndShapeInfo* info = nullptr;
  Check(ort->GetTensorTypeAndShape(value, &info));
  const Owned<OrtTensorTypeAndShapeInfo> owned(info);
  TypeAndShape found{};
  std::size_t rank = 0;
  Check(ort->GetTensorElementType(info, &found.type));
  Check(ort->GetDimensionsCount(info, &rank));
  found.shape.resize(rank);
  Check(ort->GetDimensions(info, found.shape.data(), rank));
  return found;
}

std::string Shown(const Shape& shape) {
  std::string text;
  for (const std::int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

void Run(OrtSession* session, const OrtRunOptions* options, const Values& inputs, Values& outputs) {
  Check(ort->Run(session, options, inputs.names.data(), inputs.values.data(), inputs.names.size(), outputs.names.data(),
                 outputs.names.size(), outputs.values.data()));
}

}  // namespace ort_trainer
