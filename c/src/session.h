// Steps and updates from the artifacts of an export.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine.h"
#include "expressions.h"
#include "state.h"

namespace ort_trainer {

// A model of an export, with its session.
class Model {
 public:
  Model(State& state, const char* kind, Bytes bytes, const OrtEnv* env, const OrtSessionOptions* options);

  const Json& said() const { return said_; }
  const Bytes& bytes() const { return bytes_; }
  OrtSession* session() const { return session_.get(); }

 private:
  Bytes bytes_;
  Json said_;
  Owned<OrtSession> session_;
};

// A training or an evaluation model.
class Step {
 public:
  Step(State& state, const char* kind, Bytes bytes, const OrtEnv* env, const OrtSessionOptions* options);

  const std::vector<std::string>& inputs() const { return inputs_; }
  const std::vector<std::string>& outputs() const { return outputs_; }
  const Model& model() const { return model_; }
  // Outputs that are null are made by the engine; they are the caller's.
  void Run(const OrtRunOptions* options, const std::vector<const OrtValue*>& given, std::vector<OrtValue*>& outputs);

 private:
  Sizes Checked(const std::vector<const OrtValue*>& given) const;
  void CheckOutputs(const std::vector<OrtValue*>& outputs, const Sizes& sizes) const;
  void CheckIndices(const std::vector<const OrtValue*>& given, const Sizes& sizes) const;
  std::vector<Tensor> Drawn(const Sizes& sizes, MersenneTwister& random) const;

  State& state_;
  Model model_;
  bool training_;
  std::vector<std::string> inputs_, outputs_;
  Tensors other_gradients_, other_buffers_;  // what the next step writes
};

class Session {
 public:
  Session(State& state, const OrtEnv* env, const OrtSessionOptions* options, Bytes training,
          std::optional<Bytes> evaluation, std::optional<Bytes> optimizer);

  Step& step(bool training);
  void LazyResetGrad();
  void OptimizerStep(const OrtRunOptions* options);
  void SetLearningRate(double rate);
  double LearningRate();
  void RegisterLinearScheduler(std::int64_t warmup, std::int64_t total, double initial);
  void SchedulerStep();
  std::size_t ParametersSize(bool trainable_only);
  // Copies the parameters to a flat tensor, or from it.
  void CopyParameters(const OrtValue* buffer, bool trainable_only, bool from_buffer);
  Bytes InferenceModel(const std::vector<std::string>& outputs);

 private:
  const Model& optimizer() const;

  State& state_;
  Step training_;
  std::optional<Step> evaluation_;
  std::optional<Model> optimizer_;
  std::optional<Json> schedule_;
  double initial_rate_ = 0;
};

}  // namespace ort_trainer
