#include "session.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "onnx_file.h"

namespace ort_trainer {
namespace {

// The members of an object whose values are graph names.
using Names = std::vector<Json::Member>;

template <typename T>
const T* DataOf(const OrtValue* value) {
  void* data = nullptr;
  Check(ort->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  return static_cast<const T*>(data);
}

std::vector<std::string> NamesOf(const Json& specs) {
  std::vector<std::string> names;
  for (const Json& spec : specs.items) names.push_back(spec.at("name").string());
  return names;
}

std::string Listed(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "'" : ", '") + name + "'";
  return text;
}

void CheckRate(const std::string& what, double rate) {
  if (rate >= 0 && rate <= std::numeric_limits<float>::max()) return;
  Invalid(what + " must be finite, at most 3.4e+38, and not negative, but " + std::to_string(rate) + " was given");
}

std::size_t SizeOfParameters(State& state, bool trainable_only) {
  std::size_t size = 0;
  for (const auto& name : state.names(trainable_only)) size += state.value(name).count();
  return size;
}

// The value of a number or an expression that is a size.
std::int64_t SizeFrom(const Json& expression, const Sizes& sizes) {
  const std::int64_t size = Evaluate(expression, sizes);
  if (size < 0) throw std::runtime_error("the size " + ToText(expression) + " is " + std::to_string(size));
  return size;
}

// Checks that the state that an optimizer model describes is of a plausible size before it takes memory.
void CheckStateSize(const Names& slots, State& state) {
  constexpr std::size_t kLargest = 16;  // for each element of the parameters, as in ort_trainer/api/live_state.py
  const std::size_t allowed = kLargest * (SizeOfParameters(state, false) + slots.size());
  std::size_t size = 0;
  for (const auto& [key, slot] : slots) {
    size += ElementCount(ShapeOf(slot.at("shape")));
    if (size > allowed) {
      throw std::runtime_error("the optimizer model asks for more than " + std::to_string(allowed) + " elements of state: it is "
                               "damaged or from another export");
    }
  }
}

// Makes missing tensors of a group, each like the parameter of its name.
void MakeZeros(const Names& members, State& state, Tensors& group) {
  for (const auto& [name, unused] : members) {
    const Tensor& like = state.value(name);
    if (group.find(name) == nullptr) group.Add(name, Tensor(like.dtype(), like.shape()));
  }
}

}  // namespace

Model::Model(State& state, const char* kind, Bytes bytes, const OrtEnv* env, const OrtSessionOptions* options)
    : bytes_(std::move(bytes)), said_(Describe(bytes_, kind)) {
  const std::string& from = said_.at("export").string();
  if (from != state.export_id()) {
    Invalid("the " + std::string(kind) + " model and " + state.name() + " come from different exports ('" +
            from.substr(0, 12) + "' and '" + state.export_id().substr(0, 12) +
            "'): use the models and the checkpoint that were written together");
  }
  OrtSession* session = nullptr;
  Check(ort->CreateSessionFromArray(env, bytes_.data(), bytes_.size(), options, &session));
  session_.reset(session);
}

Step::Step(State& state, const char* kind, Bytes bytes, const OrtEnv* env, const OrtSessionOptions* options)
    : state_(state),
      model_(state, kind, std::move(bytes), env, options),
      training_(kind == std::string("training")),
      inputs_(NamesOf(model_.said().at("inputs"))),
      outputs_(NamesOf(model_.said().at("outputs"))) {
  const std::lock_guard<std::mutex> lock(state.mutex);
  for (const char* members : {"state", "gradients", "buffer_updates"}) {
    for (const auto& [name, unused] : model_.said().at(members).members) state.value(name);
  }
  for (const Json& spec : model_.said().at("random").items) {
    const std::string& random = spec.at("kind").string();
    if (random != "mask" && random != "bernoulli" && random != "uniform") {
      throw std::runtime_error("the model draws " + random + " numbers, which this library can't: train it in Python");
    }
    for (const Json& size : spec.at("shape").items) CheckExpression(size);
  }
  for (const Json& guard : model_.said().at("guards").items) CheckExpression(guard);
  if (const Json* ranges = model_.said().find("index_ranges")) {
    for (const Json& range : ranges->items) CheckExpression(range.at("size"));
  }
  MakeZeros(model_.said().at("gradients").members, state, state.gradients);
  MakeZeros(model_.said().at("gradients").members, state, other_gradients_);
  MakeZeros(model_.said().at("buffer_updates").members, state, other_buffers_);
}

void Step::Run(const OrtRunOptions* options, const std::vector<const OrtValue*>& given, std::vector<OrtValue*>& outputs) {
  const std::lock_guard<std::mutex> lock(state_.mutex);
  state_.RequireValues();
  const Json& said = model_.said();
  const Names& gradients = said.at("gradients").members;
  const Names& updates = said.at("buffer_updates").members;
  const Sizes sizes = Checked(given);
  CheckOutputs(outputs, sizes);
  const bool draws = !said.at("random").items.empty();
  MersenneTwister random = draws ? state_.random() : MersenneTwister({});
  const std::vector<Tensor> drawn = Drawn(sizes, random);
  Tensor reset(DTypeNamed("bool"), {1});
  reset.Fill(state_.reset);

  Values taken, made;
  for (std::size_t i = 0; i < given.size(); ++i) taken.Add(inputs_[i], const_cast<OrtValue*>(given[i]));
  for (const auto& [name, input] : said.at("state").members) taken.Add(input.string(), state_.value(name).value());
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    taken.Add(said.at("random").items[i].at("name").string(), drawn[i].value());
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) made.Add(outputs_[i], outputs[i]);
  for (const auto& [name, names] : gradients) {
    taken.Add(names.items.at(0).string(), state_.gradients.find(name)->value());
    made.Add(names.items.at(1).string(), other_gradients_.find(name)->value());
  }
  if (!gradients.empty()) taken.Add(said.at("reset").string(), reset.value());
  for (const auto& [name, output] : updates) made.Add(output.string(), other_buffers_.find(name)->value());
  ort_trainer::Run(model_.session(), options, taken, made);
  if (draws) state_.set_random(random);
  std::copy_n(made.values.begin(), outputs.size(), outputs.begin());
  if (!training_) return;
  for (const auto& [name, unused] : gradients) state_.gradients.Swap(name, other_gradients_);
  for (const auto& [name, unused] : updates) state_.group_of(name).Swap(name, other_buffers_);
  state_.SetCount("micro_batches", state_.reset ? 1 : state_.micro_batches() + 1);
  state_.reset = false;
}

Sizes Step::Checked(const std::vector<const OrtValue*>& given) const {
  const Json& said = model_.said();
  if (given.size() != inputs_.size()) {
    Invalid(std::to_string(given.size()) + " inputs were given, but the model takes " + std::to_string(inputs_.size()) +
            ": " + Listed(inputs_));
  }
  Sizes sizes;
  for (const auto& [name, size] : said.at("fixed").members) sizes[name] = size.integer();
  for (std::size_t i = 0; i < given.size(); ++i) {
    const Json& spec = said.at("inputs").items[i];
    const TypeAndShape found = Described(given[i], "input '" + inputs_[i] + "'");
    const DType& expected = DTypeNamed(spec.at("dtype").string());
    if (found.type != expected.type) {
      Invalid("input '" + inputs_[i] + "' has another dtype, but the model takes " + std::string(expected.name));
    }
    const auto& described = spec.at("shape").items;
    bool fits = found.shape.size() == described.size();
    for (std::size_t axis = 0; fits && axis < described.size(); ++axis) {
      const bool fixed = described[axis].is(Json::Kind::kInt);
      const std::int64_t size = found.shape[axis];
      const std::int64_t wanted =
          fixed ? described[axis].integer() : sizes.try_emplace(described[axis].string(), size).first->second;
      fits = size == wanted && size > 0;
    }
    if (!fits) {
      std::string known;
      for (const auto& [name, size] : sizes) known += (known.empty() ? " with " : ", ") + name + " = " + std::to_string(size);
      Invalid("input '" + inputs_[i] + "' has shape " + Shown(found.shape) + ", but the model takes " +
              ToText(spec.at("shape")) + known);
    }
  }
  for (const Json& guard : said.at("guards").items) {
    if (!Holds(guard, sizes)) {
      Invalid("the model is valid only if " + guard.string() + ": export again with a batch of these sizes");
    }
  }
  CheckIndices(given, sizes);
  return sizes;
}

// Checks the shapes of the caller's outputs, which the engine would find wrong in the middle of the run.
void Step::CheckOutputs(const std::vector<OrtValue*>& outputs, const Sizes& sizes) const {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Json& described = model_.said().at("outputs").items[i].at("shape");
    if (outputs[i] == nullptr || !described.is(Json::Kind::kList)) continue;
    Shape shape;
    for (const Json& size : described.items) shape.push_back(SizeFrom(size, sizes));
    const std::string name = "output '" + outputs_[i] + "'";
    const TypeAndShape found = Described(outputs[i], name);
    if (found.shape == shape) continue;
    Invalid(name + " is of shape " + Shown(shape) + ", but a tensor of shape " + Shown(found.shape) +
            " was given for it: with NULL, it is made");
  }
}

void Step::CheckIndices(const std::vector<const OrtValue*>& given, const Sizes& sizes) const {
  const Json* ranges = model_.said().find("index_ranges");
  if (ranges == nullptr) return;
  for (const Json& range : ranges->items) {
    const Json* steps = range.find("steps");
    if (steps != nullptr && !steps->items.empty()) continue;  // only some values are used, and the engine checks those
    const std::string& name = range.at("input").string();
    const auto place = std::find(inputs_.begin(), inputs_.end(), name) - inputs_.begin();
    const OrtValue* value = given.at(static_cast<std::size_t>(place));
    const std::int64_t size = SizeFrom(range.at("size"), sizes);
    const std::int64_t lowest = range.at("from_end").truthy() ? -size : 0;
    const Json& ignored = range.at("ignored");
    const TypeAndShape found = Described(value, name);
    const std::size_t count = ElementCount(found.shape);
    const void* data = DataOf<void>(value);
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t index =
          found.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64   ? static_cast<const std::int64_t*>(data)[i]
          : found.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 ? static_cast<const std::int32_t*>(data)[i]
                                                              : static_cast<const std::uint8_t*>(data)[i];
      if ((index >= lowest && index < size) || (ignored.is(Json::Kind::kInt) && index == ignored.integer())) continue;
      Invalid("input '" + name + "' has the value " + std::to_string(index) + ", but " + range.at("operator").string() +
              " uses it as an index, which must be from " + std::to_string(lowest) + " to " + std::to_string(size - 1));
    }
  }
}

std::vector<Tensor> Step::Drawn(const Sizes& sizes, MersenneTwister& random) const {
  std::vector<Tensor> drawn;
  std::optional<std::uint64_t> key;
  const auto& specs = model_.said().at("random").items;
  const bool masks = std::any_of(specs.begin(), specs.end(), [](const Json& s) { return s.at("kind").text == "mask"; });
  if (masks) key = random.Key();
  for (const Json& spec : specs) {
    Shape shape;
    for (const Json& size : spec.at("shape").items) shape.push_back(SizeFrom(size, sizes));
    Tensor tensor(DTypeNamed(spec.at("dtype").string()), shape);
    const auto& parameters = spec.at("parameters").items;
    const std::string& kind = spec.at("kind").string();
    if (kind == "mask") {
      const double number = parameters.at(1).number();
      if (!(number >= 0 && number <= std::numeric_limits<std::uint32_t>::max())) {
        throw std::runtime_error("the number " + ToText(parameters[1]) + " of a mask is invalid");
      }
      const auto mask = DrawMask(*key, tensor.count(), static_cast<std::uint32_t>(number), parameters.at(0).number());
      if (mask.size() == tensor.bytes().size()) {
        std::copy(mask.begin(), mask.end(), tensor.bytes().begin());
      } else {
        tensor.Set({mask.begin(), mask.end()});
      }
    } else {  // NumPy's numbers; uniform ones have as many bits as their dtype holds
      const double factor = kind == "bernoulli" && parameters.size() > 1 ? parameters[1].number() : 1.0;
      std::vector<double> values(tensor.count());
      for (double& value : values) {
        const bool wide = kind == "uniform" && tensor.dtype().type == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
        const double high = random.Next();
        value = wide ? (high * (1 << 21) + (random.Next() >> 11)) / 9007199254740992.0 : std::floor(high / 256) / (1 << 24);
        if (kind == "bernoulli") value = static_cast<float>(value) < static_cast<float>(parameters.at(0).number()) ? factor : 0.0;
      }
      tensor.Set(values);
    }
    drawn.push_back(std::move(tensor));
  }
  return drawn;
}

Session::Session(State& state, const OrtEnv* env, const OrtSessionOptions* options, Bytes training,
                 std::optional<Bytes> evaluation, std::optional<Bytes> optimizer)
    : state_(state), training_(state, "training", std::move(training), env, options) {
  if (evaluation) evaluation_.emplace(state, "evaluation", std::move(*evaluation), env, options);
  if (!optimizer) return;
  optimizer_.emplace(state, "optimizer", std::move(*optimizer), env, options);
  const std::lock_guard<std::mutex> lock(state.mutex);
  const Json& said = optimizer_->said();
  for (const auto& [name, unused] : said.at("weights").members) state.parameter(name);
  const Json* rates = said.find("rates");
  const Names& slots = said.at("state").members;
  CheckStateSize(slots, state);
  Tensors made;
  bool fits = static_cast<std::int64_t>(state.rates().size()) == (rates == nullptr ? 1 : rates->integer()) &&
              (!state.optimizer || state.optimizer->names().size() == slots.size());
  for (const auto& [key, slot] : slots) {
    const Shape shape = ShapeOf(slot.at("shape"));
    const DType& dtype = DTypeNamed(slot.at("dtype").string());
    if (const Tensor* kept = state.optimizer ? state.optimizer->find(key) : nullptr) {
      fits = fits && kept->dtype().type == dtype.type && kept->shape() == shape;
    } else {
      fits = fits && !state.optimizer;
      made.Add(key, Tensor(dtype, shape)).Fill(slot.at("initial").number());
    }
  }
  if (!fits) throw std::runtime_error(state.name() + " holds the state of another optimizer than the model's");
  MakeZeros(said.at("gradients").members, state, state.gradients);
  if (!state.optimizer) state.optimizer = std::move(made);
}

Step& Session::step(bool training) {
  if (training) return training_;
  if (!evaluation_) throw std::runtime_error("evaluation needs the evaluation model: pass it as eval_model_path");
  return *evaluation_;
}

void Session::LazyResetGrad() {
  const std::lock_guard<std::mutex> lock(state_.mutex);
  state_.reset = true;
}

const Model& Session::optimizer() const {
  if (!optimizer_) throw std::runtime_error("there is no optimizer: pass the optimizer model as optimizer_model_path");
  return *optimizer_;
}

void Session::OptimizerStep(const OrtRunOptions* options) {
  const Model& model = optimizer();
  const std::lock_guard<std::mutex> lock(state_.mutex);
  state_.RequireValues();
  const Json& said = model.said();
  const std::vector<double> given = state_.rates();
  Tensor rates(DTypeNamed("float32"), {static_cast<std::int64_t>(given.size())}), micro_batches(DTypeNamed("int64"), {1});
  rates.Set(given);
  micro_batches.Fill(static_cast<double>(state_.micro_batches()));
  Values taken, made;  // the new values overwrite the old ones in place
  for (const auto& [name, names] : said.at("weights").members) {
    taken.Add(names.items.at(0).string(), state_.value(name).value());
    made.Add(names.items.at(1).string(), state_.value(name).value());
  }
  for (const auto& [name, input] : said.at("gradients").members) {
    taken.Add(input.string(), state_.gradients.find(name)->value());
  }
  for (const auto& [key, slot] : said.at("state").members) {
    taken.Add(slot.at("input").string(), state_.optimizer->find(key)->value());
    made.Add(slot.at("output").string(), state_.optimizer->find(key)->value());
  }
  taken.Add(said.at("learning_rate").string(), rates.value());
  if (const Json* input = said.find("micro_batches"); input != nullptr && input->truthy()) {
    taken.Add(input->string(), micro_batches.value());
  }
  Run(model.session(), options, taken, made);
  state_.SetCount("optimization_step", state_.optimization_step() + 1);
}

void Session::SetLearningRate(double rate) {
  optimizer();
  CheckRate("learning_rate", rate);
  const std::lock_guard<std::mutex> lock(state_.mutex);
  state_.SetRate(rate);
}

double Session::LearningRate() {
  optimizer();
  const std::lock_guard<std::mutex> lock(state_.mutex);
  return state_.rates().back();
}

void Session::RegisterLinearScheduler(std::int64_t warmup, std::int64_t total, double initial) {
  optimizer();
  if (warmup < 0 || warmup > total || total <= 0) {
    Invalid("0 <= warmup_step_count <= total_step_count and total_step_count > 0 are required, but warmup_step_count is " +
            std::to_string(warmup) + " and total_step_count is " + std::to_string(total));
  }
  CheckRate("initial_lr", initial);
  Json schedule = Json::Object();
  schedule["kind"] = "linear";
  schedule["total_steps"] = total;
  schedule["warmup_steps"] = warmup;
  {
    const std::lock_guard<std::mutex> lock(state_.mutex);
    schedule_ = schedule;
    initial_rate_ = initial;
  }
  SchedulerStep();
}

void Session::SchedulerStep() {
  const std::lock_guard<std::mutex> lock(state_.mutex);
  if (!schedule_) throw std::runtime_error("there is no scheduler to step: call RegisterLinearLRScheduler first");
  state_.SetRate(ort_trainer::LearningRate(*schedule_, state_.optimization_step(), initial_rate_));
}

std::size_t Session::ParametersSize(bool trainable_only) {
  const std::lock_guard<std::mutex> lock(state_.mutex);
  return SizeOfParameters(state_, trainable_only);
}

void Session::CopyParameters(const OrtValue* buffer, bool trainable_only, bool from_buffer) {
  const std::lock_guard<std::mutex> lock(state_.mutex);
  if (!from_buffer) state_.RequireValues();
  const TypeAndShape found = Described(buffer, "the buffer");
  const std::size_t size = SizeOfParameters(state_, trainable_only);
  if (found.shape.size() != 1 || static_cast<std::size_t>(found.shape[0]) != size) {
    Invalid("the buffer has shape " + Shown(found.shape) + ", but the parameters have " + std::to_string(size) +
            " elements with trainable_only = " + (trainable_only ? "true" : "false"));
  }
  for (const auto& name : state_.names(trainable_only)) {
    if (state_.value(name).dtype().type == found.type) continue;
    Invalid("the buffer has another dtype than the parameter '" + name + "', " +
            std::string(state_.value(name).dtype().name));
  }
  auto* data = const_cast<std::uint8_t*>(DataOf<std::uint8_t>(buffer));
  for (const auto& name : state_.names(trainable_only)) {
    Bytes& bytes = state_.value(name).bytes();
    if (from_buffer) {
      std::copy_n(data, bytes.size(), bytes.begin());
      state_.MarkFilled(name);
    } else {
      std::copy(bytes.begin(), bytes.end(), data);
    }
    data += bytes.size();
  }
}

Bytes Session::InferenceModel(const std::vector<std::string>& outputs) {
  const Model& model = step(false).model();
  const std::lock_guard<std::mutex> lock(state_.mutex);
  state_.RequireValues();
  std::map<std::string, Weight> state;
  for (const auto& [name, input] : model.said().at("state").members) {
    const Tensor& tensor = state_.value(name);
    state[input.string()] = {tensor.dtype().type, tensor.shape(), tensor.bytes().data(), tensor.bytes().size()};
  }
  return ort_trainer::InferenceModel(model.bytes(), state, outputs);
}

}  // namespace ort_trainer
