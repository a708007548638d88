// The C++ classes of ONNX Runtime's former training API, over ort_trainer_c_api.h; header only.
//
// Ort::CheckpointState and Ort::TrainingSession are those of ONNX Runtime's onnxruntime_training_cxx_api.h, a name that
// includes this header. Ort::Env, Ort::SessionOptions, Ort::Value and Ort::Exception come from ONNX Runtime's own header
// if it is in the path; otherwise this one has what the two classes need of them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#if __has_include(<onnxruntime_cxx_api.h>)
#include <onnxruntime_cxx_api.h>  // before the macro OrtGetApiBase(), which would change an inline variable of it
#include "ort_trainer_c_api.h"
#else
#include "ort_trainer_c_api.h"

namespace Ort {

inline const OrtApi& GetApi() {
  static const OrtApi* const api = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  if (api == nullptr) throw std::runtime_error("this ONNX Runtime is older than 1.19");
  return *api;
}

struct Exception : std::runtime_error {
  Exception(std::string message, OrtErrorCode code) : std::runtime_error(message), code_(code) {}
  OrtErrorCode GetOrtErrorCode() const { return code_; }

 private:
  OrtErrorCode code_;
};

inline void ThrowOnError(OrtStatus* status) {
  if (status == nullptr) return;
  const Exception error(GetApi().GetErrorMessage(status), GetApi().GetErrorCode(status));
  GetApi().ReleaseStatus(status);
  throw error;
}

namespace detail {

inline void OrtRelease(OrtEnv* env) { GetApi().ReleaseEnv(env); }
inline void OrtRelease(OrtSessionOptions* options) { GetApi().ReleaseSessionOptions(options); }
inline void OrtRelease(OrtMemoryInfo* info) { GetApi().ReleaseMemoryInfo(info); }
inline void OrtRelease(OrtValue* value) { GetApi().ReleaseValue(value); }

// Owns an object of the C API.
template <typename T>
class Base {
 public:
  using contained_type = T;

  constexpr Base() = default;
  constexpr explicit Base(contained_type* p) noexcept : p_(p) {}
  Base(const Base&) = delete;
  Base& operator=(const Base&) = delete;
  Base(Base&& other) noexcept : p_(other.release()) {}
  Base& operator=(Base&& other) noexcept {
    OrtRelease(std::exchange(p_, other.release()));
    return *this;
  }
  ~Base() { OrtRelease(p_); }

  constexpr operator contained_type*() const noexcept { return p_; }
  contained_type* release() noexcept { return std::exchange(p_, nullptr); }

 protected:
  contained_type* p_ = nullptr;
};

}  // namespace detail

struct Env : detail::Base<OrtEnv> {
  explicit Env(OrtLoggingLevel level = ORT_LOGGING_LEVEL_WARNING, const char* log_id = "") {
    ThrowOnError(GetApi().CreateEnv(level, log_id, &p_));
  }
};

struct SessionOptions : detail::Base<OrtSessionOptions> {
  SessionOptions() { ThrowOnError(GetApi().CreateSessionOptions(&p_)); }
  SessionOptions& SetIntraOpNumThreads(int threads) {
    ThrowOnError(GetApi().SetIntraOpNumThreads(p_, threads));
    return *this;
  }
};

struct MemoryInfo : detail::Base<OrtMemoryInfo> {
  static MemoryInfo CreateCpu(OrtAllocatorType type, OrtMemType memory) {
    OrtMemoryInfo* made = nullptr;
    ThrowOnError(GetApi().CreateCpuMemoryInfo(type, memory, &made));
    return MemoryInfo(made);
  }

 private:
  using Base::Base;
};

template <typename T>
inline constexpr ONNXTensorElementDataType kElementType =
    std::is_same_v<T, float>          ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
    : std::is_same_v<T, double>       ? ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE
    : std::is_same_v<T, std::int64_t> ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
    : std::is_same_v<T, std::int32_t> ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32
    : std::is_same_v<T, std::uint8_t> ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8
    : std::is_same_v<T, bool>         ? ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL
                                      : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;

struct Value : detail::Base<OrtValue> {
  explicit Value(std::nullptr_t) {}
  explicit Value(OrtValue* value) : Base(value) {}

  // A tensor over the caller's memory, which must outlive it.
  template <typename T>
  static Value CreateTensor(const OrtMemoryInfo* info, T* data, size_t count, const int64_t* shape, size_t rank) {
    OrtValue* made = nullptr;
    ThrowOnError(GetApi().CreateTensorWithDataAsOrtValue(info, data, count * sizeof(T), shape, rank, kElementType<T>, &made));
    return Value(made);
  }

  static Value CreateTensor(OrtAllocator* allocator, const int64_t* shape, size_t rank, ONNXTensorElementDataType type) {
    OrtValue* made = nullptr;
    ThrowOnError(GetApi().CreateTensorAsOrtValue(allocator, shape, rank, type, &made));
    return Value(made);
  }

  template <typename T>
  T* GetTensorMutableData() {
    void* data = nullptr;
    ThrowOnError(GetApi().GetTensorMutableData(p_, &data));
    return static_cast<T*>(data);
  }
};

}  // namespace Ort
#endif

namespace Ort {

inline const OrtTrainingApi& GetTrainingApi() {
  static const OrtTrainingApi* const api = OrtTrainerGetApi(&GetApi());
  if (api == nullptr) throw std::runtime_error("this ONNX Runtime is older than its headers");
  return *api;
}

inline void SetSeed(const int64_t seed) { ThrowOnError(GetTrainingApi().SetSeed(seed)); }

}  // namespace Ort

// Ort::detail::Base finds them by the types of the arguments, which are in the global namespace.
inline void OrtRelease(OrtCheckpointState* state) { Ort::GetTrainingApi().ReleaseCheckpointState(state); }
inline void OrtRelease(OrtTrainingSession* session) { Ort::GetTrainingApi().ReleaseTrainingSession(session); }

namespace Ort {

using Property = std::variant<int64_t, float, std::string>;

class CheckpointState : public detail::Base<OrtCheckpointState> {
 public:
  static CheckpointState LoadCheckpoint(const std::string& path) {
    CheckpointState state;
    ThrowOnError(GetTrainingApi().LoadCheckpoint(path.c_str(), &state.p_));
    return state;
  }
  static CheckpointState LoadCheckpointFromBuffer(const std::vector<uint8_t>& buffer) {
    CheckpointState state;
    ThrowOnError(GetTrainingApi().LoadCheckpointFromBuffer(buffer.data(), buffer.size(), &state.p_));
    return state;
  }
  static void SaveCheckpoint(const CheckpointState& state, const std::string& path,
                             const bool include_optimizer_state = false) {
    ThrowOnError(GetTrainingApi().SaveCheckpoint(state, path.c_str(), include_optimizer_state));
  }

  void AddProperty(const std::string& name, const Property& property) {
    const auto add = [&](OrtPropertyType type, const void* value) {
      ThrowOnError(GetTrainingApi().AddProperty(*this, name.c_str(), type, const_cast<void*>(value)));
    };
    if (const auto* number = std::get_if<int64_t>(&property)) add(OrtIntProperty, number);
    if (const auto* number = std::get_if<float>(&property)) add(OrtFloatProperty, number);
    if (const auto* text = std::get_if<std::string>(&property)) add(OrtStringProperty, text->c_str());
  }

  Property GetProperty(const std::string& name) {
    OrtPropertyType type{};
    void* value = nullptr;
    OrtAllocator* allocator = Allocator();
    ThrowOnError(GetTrainingApi().GetProperty(*this, name.c_str(), allocator, &type, &value));
    Property found;
    if (type == OrtIntProperty) found = *static_cast<const int64_t*>(value);
    if (type == OrtFloatProperty) found = *static_cast<const float*>(value);
    if (type == OrtStringProperty) found = std::string(static_cast<const char*>(value));
    ThrowOnError(GetApi().AllocatorFree(allocator, value));
    return found;
  }

  void UpdateParameter(const std::string& name, const Value& parameter) {
    ThrowOnError(GetTrainingApi().UpdateParameter(*this, name.c_str(), const_cast<Value&>(parameter)));
  }

  Value GetParameter(const std::string& name) {
    OrtValue* value = nullptr;
    ThrowOnError(GetTrainingApi().GetParameter(*this, name.c_str(), Allocator(), &value));
    return Value(value);
  }

  static OrtAllocator* Allocator() {
    OrtAllocator* allocator = nullptr;
    ThrowOnError(GetApi().GetAllocatorWithDefaultOptions(&allocator));
    return allocator;
  }

 private:
  CheckpointState() = default;
};

class TrainingSession : public detail::Base<OrtTrainingSession> {
 public:
  TrainingSession(const Env& env, const SessionOptions& options, CheckpointState& state, const std::string& train_model_path,
                  const std::optional<std::string>& eval_model_path = std::nullopt,
                  const std::optional<std::string>& optimizer_model_path = std::nullopt) {
    const auto path = [](const std::optional<std::string>& given) { return given ? given->c_str() : nullptr; };
    ThrowOnError(GetTrainingApi().CreateTrainingSession(env, options, state, train_model_path.c_str(),
                                                        path(eval_model_path), path(optimizer_model_path), &p_));
  }

  TrainingSession(const Env& env, const SessionOptions& options, CheckpointState& state,
                  const std::vector<uint8_t>& train_model_data, const std::vector<uint8_t>& eval_model_data = {},
                  const std::vector<uint8_t>& optim_model_data = {}) {
    ThrowOnError(GetTrainingApi().CreateTrainingSessionFromBuffer(
        env, options, state, train_model_data.data(), train_model_data.size(), eval_model_data.data(),
        eval_model_data.size(), optim_model_data.data(), optim_model_data.size(), &p_));
  }

  // The sample of ONNX Runtime's documentation calls ExportModelForInferencing() through it.
  TrainingSession* operator->() { return this; }

  // Returns the outputs in the order of OutputNames(true).
  std::vector<Value> TrainStep(const std::vector<Value>& input_values) {
    return Run(GetTrainingApi().TrainStep, true, input_values);
  }
  std::vector<Value> EvalStep(const std::vector<Value>& input_values) {
    return Run(GetTrainingApi().EvalStep, false, input_values);
  }
  void LazyResetGrad() { ThrowOnError(GetTrainingApi().LazyResetGrad(p_)); }
  void OptimizerStep() { ThrowOnError(GetTrainingApi().OptimizerStep(p_, nullptr)); }

  void SetLearningRate(float learning_rate) {
    ThrowOnError(GetTrainingApi().SetLearningRate(p_, learning_rate));
  }
  float GetLearningRate() const {
    float rate = 0;
    ThrowOnError(GetTrainingApi().GetLearningRate(p_, &rate));
    return rate;
  }
  void RegisterLinearLRScheduler(int64_t warmup_step_count, int64_t total_step_count, float initial_lr) {
    ThrowOnError(GetTrainingApi().RegisterLinearLRScheduler(p_, warmup_step_count, total_step_count, initial_lr));
  }
  void SchedulerStep() { ThrowOnError(GetTrainingApi().SchedulerStep(p_)); }

  void ExportModelForInferencing(const std::string& inference_model_path,
                                 const std::vector<std::string>& graph_output_names) {
    std::vector<const char*> names;
    for (const auto& name : graph_output_names) names.push_back(name.c_str());
    ThrowOnError(GetTrainingApi().ExportModelForInferencing(p_, inference_model_path.c_str(), names.size(),
                                                            names.data()));
  }

  std::vector<std::string> InputNames(const bool training) {
    const OrtTrainingApi& api = GetTrainingApi();
    return training ? Names(api.TrainingSessionGetTrainingModelInputCount, api.TrainingSessionGetTrainingModelInputName)
                    : Names(api.TrainingSessionGetEvalModelInputCount, api.TrainingSessionGetEvalModelInputName);
  }
  std::vector<std::string> OutputNames(const bool training) {
    const OrtTrainingApi& api = GetTrainingApi();
    return training ? Names(api.TrainingSessionGetTrainingModelOutputCount, api.TrainingSessionGetTrainingModelOutputName)
                    : Names(api.TrainingSessionGetEvalModelOutputCount, api.TrainingSessionGetEvalModelOutputName);
  }

  // Returns a copy of the parameters as one flat tensor; all of them must be float32.
  Value ToBuffer(const bool only_trainable) {
    const auto size = static_cast<int64_t>(ParametersSize(only_trainable));
    Value buffer = Value::CreateTensor(CheckpointState::Allocator(), &size, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
    ThrowOnError(GetTrainingApi().CopyParametersToBuffer(p_, buffer, only_trainable));
    return buffer;
  }

  // Sets the parameters, all of them or the trained ones, as the size of the buffer says.
  void FromBuffer(Value& buffer) {
    const bool all = ElementCount(buffer) == ParametersSize(false);
    ThrowOnError(GetTrainingApi().CopyBufferToParameters(p_, buffer, !all));
  }

 private:
  static size_t ElementCount(const Value& value) {
    OrtTensorTypeAndShapeInfo* info = nullptr;
    ThrowOnError(GetApi().GetTensorTypeAndShape(value, &info));
    const std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> owned(
        info, GetApi().ReleaseTensorTypeAndShapeInfo);
    size_t count = 0;
    ThrowOnError(GetApi().GetTensorShapeElementCount(info, &count));
    return count;
  }

  size_t ParametersSize(bool only_trainable) {
    size_t size = 0;
    ThrowOnError(GetTrainingApi().GetParametersSize(p_, &size, only_trainable));
    return size;
  }

  template <typename Function>
  std::vector<Value> Run(Function function, bool training, const std::vector<Value>& input_values) {
    std::vector<const OrtValue*> inputs;
    for (const Value& value : input_values) inputs.push_back(value);
    std::vector<OrtValue*> outputs(OutputNames(training).size());
    ThrowOnError(function(p_, nullptr, inputs.size(), inputs.data(), outputs.size(), outputs.data()));
    std::vector<Value> values;
    for (OrtValue* output : outputs) values.emplace_back(output);
    return values;
  }

  template <typename Count, typename Name>
  std::vector<std::string> Names(Count count_of, Name name_of) {
    size_t count = 0;
    ThrowOnError(count_of(p_, &count));
    OrtAllocator* allocator = CheckpointState::Allocator();
    std::vector<std::string> names;
    for (size_t index = 0; index < count; ++index) {
      char* name = nullptr;
      ThrowOnError(name_of(p_, index, allocator, &name));
      names.emplace_back(name);
      ThrowOnError(GetApi().AllocatorFree(allocator, name));
    }
    return names;
  }
};

}  // namespace Ort
