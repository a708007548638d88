// The state of training, and its file, which Python reads and writes too (ort_trainer/state/training_api.py).
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine.h"
#include "json.h"
#include "random.h"

namespace ort_trainer {

// Tensors by name, in an order of their own; a tensor keeps its address.
class Tensors {
 public:
  Tensor& Add(const std::string& name, Tensor tensor);
  Tensor* find(const std::string& name);
  const std::vector<std::string>& names() const { return names_; }
  bool empty() const { return names_.empty(); }
  void Swap(const std::string& name, Tensors& other) { std::swap(tensors_.at(name), other.tensors_.at(name)); }

 private:
  std::vector<std::string> names_;
  std::map<std::string, Tensor> tensors_;
};

class State {
 public:
  // Throws ORT_FAIL for bytes that are damaged, or not the checkpoint of an export.
  State(const Bytes& file, const std::string& name);

  // Returns the bytes of a file: with all that is needed to continue, or the weights alone.
  Bytes ToFile(bool include_optimizer_state);

  const std::string& name() const { return name_; }
  const std::string& export_id() const { return said_.at("export").string(); }
  const std::vector<std::string>& names(bool trainable_only) const {
    return trainable_only ? trainable_ : parameters.names();
  }
  // Returns a parameter or buffer, or a parameter only; each throws if there is none.
  Tensor& value(const std::string& tensor);
  Tensor& parameter(const std::string& name);
  Tensors& group_of(const std::string& tensor) { return parameters.find(tensor) ? parameters : buffers; }
  // Throws unless all parameters have values.
  void RequireValues() const;
  void SetParameter(const std::string& name, const OrtValue* value);
  void MarkFilled(const std::string& name);

  std::int64_t optimization_step() const { return said_.at("optimization_step").integer(); }
  std::int64_t micro_batches() const { return said_.at("micro_batches").integer(); }
  void SetCount(const char* which, std::int64_t count) { said_[which] = count; }
  // Learning rates of the next update: one for each parameter group, then that of all other parameters.
  std::vector<double> rates() const;
  // Sets a constant rate for all parameters, which replaces the schedule.
  void SetRate(double rate);
  Json& properties() { return said_["properties"]; }
  // Returns a copy of the generator, seeded by SetSeed(), or by the platform, if the checkpoint has none.
  MersenneTwister random();
  void set_random(const MersenneTwister& random) { random_ = random; }

  Tensors parameters, buffers, gradients;
  std::optional<Tensors> optimizer;
  bool reset = false;  // whether the next gradients overwrite these
  std::mutex mutex;    // held to read or change tensors

 private:
  void Load(const SealedFile& file);
  void FollowSeed();

  std::string name_;
  Json said_;
  std::vector<std::string> trainable_, missing_;
  std::optional<MersenneTwister> random_;
  std::uint64_t seed_calls_ = 0;
};

// Returns the rate of a schedule after `step` updates (ort_trainer/core/schedules.py).
double LearningRate(const Json& schedule, std::int64_t step, double base);
// Sets the seed of all random numbers that training draws from now on.
void SetSeed(std::int64_t seed);

}  // namespace ort_trainer
