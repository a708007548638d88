#include "state.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>

namespace ort_trainer {
namespace {

constexpr const char* kKey = "ort_trainer.checkpoint";
constexpr std::int64_t kVersion = 3;
constexpr std::int64_t kLargestCount = std::int64_t{1} << 62;

std::atomic<std::uint64_t> seed_calls{0};
std::atomic<std::uint32_t> seed{0};

std::vector<std::string> Strings(const Json& list) {
  std::vector<std::string> found;
  for (const Json& item : list.items) found.push_back(item.string());
  return found;
}

}  // namespace

Tensor& Tensors::Add(const std::string& name, Tensor tensor) {
  names_.push_back(name);
  return tensors_.insert_or_assign(name, std::move(tensor)).first->second;
}

Tensor* Tensors::find(const std::string& name) {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

State::State(const Bytes& file, const std::string& name) : name_(name), seed_calls_(seed_calls) {
  if (file.size() >= 8 && std::memcmp(file.data() + 4, "ODTC", 4) == 0) {  // the mark of its flatbuffers
    throw Error(ORT_FAIL, name + " is one of onnxruntime-training: convert the folder of its artifacts with "
                                 "'ort-trainer convert SOURCE TARGET', or this file alone with '--like CHECKPOINT'");
  }
  try {
    Load(ReadSealed(file.data(), file.size()));
  } catch (const std::exception& error) {
    throw Error(ORT_FAIL, name + " is damaged or not an ort_trainer.api checkpoint: " + error.what());
  }
}

void State::Load(const SealedFile& file) {
  said_ = ParseJson(file.metadata.at(kKey).string());
  if (said_.at("version").integer() != kVersion) {
    throw std::runtime_error("it has the checkpoint version " + said_.at("version").text + ", but this library reads 3: "
                             "load it in Python and save it again");
  }
  const Json& order = said_.at("order");
  const auto read = [&](const char* group, Tensors& tensors) {
    for (const std::string& key : Strings(order.at(group))) {
      const StoredTensor& stored = file.tensor(std::string(group) + ":" + key);
      tensors.Add(key, Tensor(DTypeOfCode(stored.code), stored.shape, stored.data));
    }
  };
  read("parameters", parameters);
  read("buffers", buffers);
  read("gradients", gradients);
  if (said_.at("has_optimizer").truthy()) read("optimizer", optimizer.emplace());
  if (said_.at("nominal").truthy()) {
    for (const auto& [key, entry] : said_.at("shapes").members) {
      parameters.Add(key, Tensor(DTypeNamed(entry.items.at(0).string()), ShapeOf(entry.items.at(1))));
      missing_.push_back(key);
    }
  }
  trainable_ = Strings(said_.at("trainable"));
  for (const std::string& key : trainable_) value(key);
  reset = gradients.empty();
  if (!order.at("random").items.empty()) {
    const StoredTensor& stored = file.tensor("random:state");
    MersenneTwister::State words;
    if (stored.code != "U32" || stored.size != sizeof(words)) throw std::runtime_error("its random state is invalid");
    std::memcpy(words.data(), stored.data, stored.size);
    random_.emplace(words);
  }
  for (const double rate : rates()) {
    if (!(rate >= 0 && std::isfinite(rate))) throw std::runtime_error("it has an invalid learning rate");
  }
  for (const std::int64_t count : {optimization_step(), micro_batches()}) {
    if (count < 0 || count >= kLargestCount) throw std::runtime_error("it has an invalid count");
  }
  if (!said_.at("properties").is(Json::Kind::kObject)) throw std::runtime_error("its properties are invalid");
  for (const std::string& key : gradients.names()) {
    if (gradients.find(key)->shape() != value(key).shape()) throw std::runtime_error("a gradient has another shape");
  }
}

Bytes State::ToFile(bool include_optimizer_state) {
  const std::lock_guard<std::mutex> lock(mutex);
  const bool nominal = !missing_.empty() && missing_.size() == parameters.names().size();
  if (!nominal) RequireValues();
  Json said = said_, order = Json::Object();
  std::vector<std::pair<std::string, StoredTensor>> tensors;
  const auto write = [&](const std::string& group, Tensors* found) {
    Json names = Json::List();
    for (const std::string& key : found ? found->names() : std::vector<std::string>()) {
      names.items.emplace_back(key);
      tensors.emplace_back(group + ":" + key, found->find(key)->stored());
    }
    order[group] = names;
  };
  write("parameters", nominal ? nullptr : &parameters);
  write("buffers", &buffers);
  write("optimizer", include_optimizer_state && optimizer ? &*optimizer : nullptr);
  write("gradients", include_optimizer_state && !reset ? &gradients : nullptr);
  order["random"] = Json::List();
  FollowSeed();
  if (random_) {
    const auto& words = random_->state();
    order["random"].items.emplace_back("state");
    const auto* data = reinterpret_cast<const std::uint8_t*>(words.data());
    tensors.emplace_back("random:state", StoredTensor{"U32", {static_cast<std::int64_t>(words.size())}, data, sizeof(words)});
  }
  if (!nominal && said.at("nominal").truthy()) {  // it has been filled
    auto& members = said.members;
    members.erase(std::remove_if(members.begin(), members.end(), [](const auto& m) { return m.first == "shapes"; }),
                  members.end());
    said["nominal"] = false;
  }
  if (!include_optimizer_state) said["optimization_step"] = std::int64_t{0};
  if (!include_optimizer_state || reset) said["micro_batches"] = std::int64_t{0};
  said["order"] = order;
  said["has_optimizer"] = include_optimizer_state && optimizer.has_value();
  Json metadata = Json::Object();
  metadata[kKey] = ToText(said);
  return WriteSealed(std::move(tensors), metadata);
}

Tensor& State::value(const std::string& tensor) {
  Tensor* found = parameters.find(tensor);
  if (found == nullptr) found = buffers.find(tensor);
  if (found == nullptr) Invalid("unknown parameter '" + tensor + "' of " + name_);
  return *found;
}

void State::RequireValues() const {
  if (missing_.empty()) return;
  throw Error(ORT_FAIL, name_ + " is a nominal checkpoint, and the parameter '" + missing_.front() +
                            "' does not have values yet: fill the parameters with CopyBufferToParameters, or set each of "
                            "them");
}

void State::MarkFilled(const std::string& name) {
  missing_.erase(std::remove(missing_.begin(), missing_.end(), name), missing_.end());
}

Tensor& State::parameter(const std::string& name) {
  Tensor* found = parameters.find(name);
  if (found == nullptr) Invalid("unknown parameter '" + name + "' of " + name_);
  return *found;
}

void State::SetParameter(const std::string& name, const OrtValue* given) {
  Tensor& tensor = parameter(name);
  const TypeAndShape found = Described(given, "the value of '" + name + "'");
  if (found.type != tensor.dtype().type || found.shape != tensor.shape()) {
    Invalid("parameter '" + name + "' is " + std::string(tensor.dtype().name) + " of shape " + Shown(tensor.shape()) +
            ", but a tensor of another type or of shape " + Shown(found.shape) + " was given");
  }
  void* data = nullptr;
  Check(ort->GetTensorMutableData(const_cast<OrtValue*>(given), &data));
  if (!tensor.bytes().empty()) std::memcpy(tensor.bytes().data(), data, tensor.bytes().size());
  MarkFilled(name);
}

std::vector<double> State::rates() const {
  std::vector<double> found;
  const Json& schedule = said_.at("schedule");
  for (const Json& rate : said_.at("learning_rates").items) {
    found.push_back(schedule.truthy() ? LearningRate(schedule, optimization_step(), rate.number()) : rate.number());
  }
  if (found.empty()) throw std::runtime_error("it has no learning rates");
  return found;
}

void State::SetRate(double rate) {
  for (Json& item : said_["learning_rates"].items) item = rate;
  said_["schedule"] = Json();
}

MersenneTwister State::random() {
  FollowSeed();
  return random_ ? *random_ : MersenneTwister::Seeded(seed_calls ? seed.load() : std::random_device()());
}

void State::FollowSeed() {
  if (seed_calls_ == seed_calls) return;
  seed_calls_ = seed_calls;
  random_.reset();
}

double LearningRate(const Json& schedule, std::int64_t done, double base) {
  if (base == 0) return 0;
  const double step = static_cast<double>(done), warmup = schedule.at("warmup_steps").number();
  if (step < warmup) return base * step / std::max(1.0, warmup);
  const std::string& kind = schedule.at("kind").string();
  const double total = schedule.at("total_steps").number(), left = std::max(1.0, total - warmup);
  if (kind == "constant") return base;
  if (kind == "linear") return base * std::max(0.0, (total - step) / left);
  if (kind == "cosine") {
    const double turns = schedule.at("cycles").number() * std::min(1.0, (step - warmup) / left);
    return base * std::max(0.0, 0.5 * (1.0 + std::cos(2.0 * 3.14159265358979323846 * turns)));
  }
  if (kind != "poly") throw std::runtime_error("unknown schedule " + kind);
  const double end = schedule.at("lr_end").number();
  if (base <= end) throw std::runtime_error("'lr_end' must be below the learning rate");
  if (step > total) return end;
  return (base - end) * std::pow(1.0 - (step - warmup) / (total - warmup), schedule.at("power").number()) + end;
}

void SetSeed(std::int64_t given) {
  seed = static_cast<std::uint32_t>(given);
  ++seed_calls;
}

}  // namespace ort_trainer
