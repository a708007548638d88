// Trains what Python has trained, and compares: test FOLDER, which tests/portable/make_artifacts.py has written.

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>

#include "../src/expressions.h"
#include "../src/json.h"
#include "onnxruntime_training_cxx_api.h"

namespace {

using ort_trainer::Json;
namespace fs = std::filesystem;

constexpr double kTolerance = 1e-5;  // relative

void Expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

void ExpectNear(double found, double expected, const std::string& what) {
  Expect(std::fabs(found - expected) <= kTolerance * std::fabs(expected),
         what + " is " + std::to_string(found) + ", in Python " + std::to_string(expected));
}

// Checks that a function fails with a message that has a text in it.
void ExpectError(const std::function<void()>& function, const std::string& text) {
  try {
    function();
  } catch (const std::exception& error) {
    return Expect(std::string(error.what()).find(text) != std::string::npos, "'" + text + "' is not in: " + error.what());
  }
  Expect(false, "there is no error with '" + text + "'");
}

std::vector<uint8_t> Contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  Expect(file.good(), "there is no " + path.string());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// A batch, with the memory of its tensors.
class Batch {
 public:
  explicit Batch(const Json& inputs) {
    const auto info = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
    for (const Json& input : inputs.items) {
      std::vector<int64_t> shape;
      for (const Json& size : input.at("shape").items) shape.push_back(size.integer());
      const auto& values = input.at("values").items;
      if (input.at("dtype").string() == "float32") {
        auto& data = floats_.emplace_back();
        for (const Json& value : values) data.push_back(static_cast<float>(value.number()));
        tensors.push_back(Ort::Value::CreateTensor<float>(info, data.data(), data.size(), shape.data(), shape.size()));
      } else {
        auto& data = integers_.emplace_back();
        for (const Json& value : values) data.push_back(value.integer());
        tensors.push_back(Ort::Value::CreateTensor<int64_t>(info, data.data(), data.size(), shape.data(), shape.size()));
      }
    }
  }

  std::vector<int64_t>& integers(size_t index) { return integers_.at(index); }

  std::vector<Ort::Value> tensors;

 private:
  std::vector<std::vector<float>> floats_;
  std::vector<std::vector<int64_t>> integers_;
};

class Case {
 public:
  Case(const Ort::Env& env, const fs::path& folder) : env_(env), folder_(folder) {
    const auto text = Contents(folder / "plan.json");
    plan = ort_trainer::ParseJson({reinterpret_cast<const char*>(text.data()), text.size()});
  }

  fs::path path(const char* file) const { return folder_ / file; }
  Ort::CheckpointState State(const char* file) const { return Ort::CheckpointState::LoadCheckpoint(path(file).string()); }
  Ort::TrainingSession Session(Ort::CheckpointState& state) const {
    return {env_, options_, state, path("training_model.onnx").string(), path("eval_model.onnx").string(),
            path("optimizer_model.onnx").string()};
  }
  Json Inputs(size_t step) const { return plan.at("inputs").items.at(step); }

  // Trains the batches from `first` on, as Python has, and compares every loss and every rate.
  void Train(Ort::TrainingSession& session, size_t first) const {
    const auto& losses = plan.at("losses").items;
    for (size_t step = first; step < losses.size(); ++step) {
      ExpectNear(Loss(session.TrainStep(Batch(Inputs(step)).tensors)), losses[step].number(), "a loss");
      if (step % 2 == 0) continue;
      ExpectNear(static_cast<double>(session.GetLearningRate()), plan.at("rates").items.at(step / 2).number(), "a rate");
      session.OptimizerStep();
      session.LazyResetGrad();
    }
    ExpectNear(Loss(session.EvalStep(Batch(Inputs(0)).tensors)), plan.at("loss").number(), "the loss in the end");
  }

  static double Loss(std::vector<Ort::Value> outputs) {
    return static_cast<double>(*outputs.at(0).GetTensorMutableData<float>());
  }

  Json plan;

 private:
  const Ort::Env& env_;
  Ort::SessionOptions options_;
  fs::path folder_;
};

void TrainsAsInPython(const Case& given) {
  auto state = given.State("checkpoint");
  auto session = given.Session(state);
  given.Train(session, 0);
}

void GoesOnFromACheckpoint(const Case& given) {
  auto state = given.State("middle");
  auto session = given.Session(state);
  given.Train(session, given.plan.at("losses").items.size() / 2 + 1);
  const std::string trained = given.path("trained").string();
  Ort::CheckpointState::SaveCheckpoint(state, trained, true);  // compare_digits.py reads it
  auto again = Ort::CheckpointState::LoadCheckpoint(trained);
  Ort::CheckpointState::SaveCheckpoint(again, trained + "_again", true);
  Expect(Contents(trained) == Contents(trained + "_again"), "a checkpoint changes on its way");
}

void GoesRoundByteForByte(const Case& given) {
  const std::string copy = given.path("copy").string();
  for (const char* file : {"checkpoint", "middle", "nominal_checkpoint"}) {
    Ort::CheckpointState::SaveCheckpoint(given.State(file), copy, true);
    Expect(Contents(copy) == Contents(given.path(file)), std::string(file) + " does not come back");
  }
  Ort::CheckpointState::SaveCheckpoint(given.State("middle"), copy, false);
  Expect(Contents(copy) == Contents(given.path("weights")), "the weights alone do not come back");
}

void FindsDamage(const Case& given) {
  const auto sound = Contents(given.path("checkpoint"));
  for (size_t place = 0; place < sound.size(); place += sound.size() / 500 + 1) {
    auto damaged = sound;
    damaged[place] ^= 1;
    ExpectError([&] { Ort::CheckpointState::LoadCheckpointFromBuffer(damaged); }, "is damaged");
  }
  for (const size_t size : {size_t{1}, size_t{8}, size_t{100}, sound.size() - 1}) {
    const std::vector<uint8_t> cut(sound.begin(), sound.begin() + static_cast<ptrdiff_t>(size));
    ExpectError([&] { Ort::CheckpointState::LoadCheckpointFromBuffer(cut); }, "is damaged");
  }
}

void KeepsProperties(const Case& given) {
  auto state = given.State("middle");
  Expect(std::get<int64_t>(state.GetProperty("3")) == 3, "an int property");
  Expect(std::get<float>(state.GetProperty("1")) == 1.0f, "a float property");
  state.AddProperty("epoch", int64_t{7});
  state.AddProperty("best", 0.5f);
  state.AddProperty("note", std::string("ü"));
  Expect(std::get<int64_t>(state.GetProperty("epoch")) == 7, "a new int property");
  Expect(std::get<float>(state.GetProperty("best")) == 0.5f, "a new float property");
  Expect(std::get<std::string>(state.GetProperty("note")) == "ü", "a new text property");
  ExpectError([&] { state.GetProperty("nothing"); }, "unknown property 'nothing'");
}

void MovesParameters(const Case& given) {
  auto trained = given.State("middle"), fresh = given.State("nominal_checkpoint");
  auto from = given.Session(trained), to = given.Session(fresh);
  const Batch batch(given.Inputs(0));
  ExpectError([&] { to.EvalStep(batch.tensors); }, "is a nominal checkpoint");
  auto buffer = from.ToBuffer(false);
  to.FromBuffer(buffer);
  if (given.path("").parent_path().filename() != "net") {  // whose batch norm has buffers of integers beside
    ExpectNear(Case::Loss(to.EvalStep(batch.tensors)), Case::Loss(from.EvalStep(batch.tensors)), "a copied model's loss");
  }
}

void OpensBytesAndFollowsSeeds(const Ort::Env& env, const Case& given) {
  const std::vector<std::string> inputs = {"image", "words", "label"}, outputs = {"loss", "logits"};
  const auto loss = [&](int64_t seed) {
    auto state = Ort::CheckpointState::LoadCheckpointFromBuffer(Contents(given.path("checkpoint")));
    Ort::TrainingSession session(env, Ort::SessionOptions(), state, Contents(given.path("training_model.onnx")),
                                 Contents(given.path("eval_model.onnx")), Contents(given.path("optimizer_model.onnx")));
    for (const bool training : {true, false}) {
      Expect(session.InputNames(training) == inputs && session.OutputNames(training) == outputs, "names");
    }
    Ort::SetSeed(seed);
    return Case::Loss(session.TrainStep(Batch(given.Inputs(0)).tensors));
  };
  Expect(loss(3) == loss(3) && loss(3) != loss(4), "dropout does not follow the seed");

  auto state = given.State("checkpoint");
  auto weight = state.GetParameter("embedding.weight");
  *weight.GetTensorMutableData<float>() = 7;
  state.UpdateParameter("embedding.weight", weight);
  Expect(*state.GetParameter("embedding.weight").GetTensorMutableData<float>() == 7, "a parameter is not changed");
}

void FollowsSchedules(const Case& given) {
  auto state = given.State("checkpoint");
  auto session = given.Session(state);
  ExpectError([&] { session.SchedulerStep(); }, "RegisterLinearLRScheduler");
  session.RegisterLinearLRScheduler(2, 6, 0.5f);
  for (const double expected : {0.0, 0.25, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0}) {
    ExpectNear(static_cast<double>(session.GetLearningRate()), expected, "a scheduled rate");
    session.TrainStep(Batch(given.Inputs(0)).tensors);
    session.OptimizerStep();
    session.SchedulerStep();
  }
  ExpectError([&] { session.RegisterLinearLRScheduler(3, 2, 0.5f); }, "warmup_step_count is 3");
  ExpectError([&] { session.SetLearningRate(-1.0f); }, "not negative");
}

void OwnsItsObjects(const Case& given) {
  using Base = Ort::detail::Base<OrtTrainingSession>;
  static_assert(std::is_base_of_v<Base, Ort::TrainingSession> && !std::is_copy_constructible_v<Ort::TrainingSession>);
  static_assert(std::is_same_v<Ort::TrainingSession::contained_type, OrtTrainingSession>);
  static_assert(std::is_same_v<Ort::CheckpointState::contained_type, OrtCheckpointState>);
  auto state = given.State("checkpoint");
  auto session = given.Session(state);
  const OrtTrainingSession* raw = session;
  Ort::TrainingSession moved(std::move(session));
  Expect(moved == raw && session == nullptr, "a session does not move");
  session = std::move(moved);
  Expect(session == raw && moved == nullptr, "a session is not assigned");
  moved = given.Session(state);
  moved = std::move(session);  // releases the one that it had
  OrtTrainingSession* released = moved.release();
  Expect(released == raw && moved == nullptr, "a session is not released");
  Base owner(released);
  // With the functions in C, whose table is that of the C++ classes.
  const OrtTrainingApi* training = OrtGetApiBase()->GetApi(ORT_API_VERSION)->GetTrainingApi(ORT_API_VERSION);
  Expect(training == &Ort::GetTrainingApi(), "GetTrainingApi() returns other functions");
  float rate = 0;
  Ort::ThrowOnError(training->SetLearningRate(owner, 0.5f));
  Ort::ThrowOnError(training->GetLearningRate(owner, &rate));
  Expect(rate == 0.5f, "the owner has another session");
  training->ReleaseCheckpointState(given.State("checkpoint").release());
}

void RefusesForeignArtifacts(const Ort::Env& env, const Case& given) {
  const std::vector<uint8_t> flatbuffer = {16, 0, 0, 0, 'O', 'D', 'T', 'C', 0, 0, 0, 0}, onnx = {8, 9};
  ExpectError([&] { Ort::CheckpointState::LoadCheckpointFromBuffer(flatbuffer); }, "is one of onnxruntime-training");
  ExpectError([&] { Ort::CheckpointState::LoadCheckpointFromBuffer(flatbuffer); }, "ort-trainer convert");
  auto state = given.State("checkpoint");
  ExpectError([&] { Ort::TrainingSession(env, Ort::SessionOptions(), state, onnx); }, "ort-trainer convert");
}

// Models are read as protobuf reads them, in any encoding.
void ReadsEncodings(const Ort::Env& env, const Case& given, const fs::path& folder) {
  auto state = given.State("checkpoint");
  const auto training = Contents(given.path("training_model.onnx"));
  const auto open = [&](const std::vector<uint8_t>& model) {
    return Ort::TrainingSession(env, Ort::SessionOptions(), state, training, model);
  };
  const auto refused = [&](const std::vector<uint8_t>& model, const std::string& text) {  // as the one that is read first
    ExpectError([&] { Ort::TrainingSession(env, Ort::SessionOptions(), state, model); }, text);
  };
  const Batch batch(given.Inputs(0));
  const double loss = Case::Loss(open(Contents(given.path("eval_model.onnx"))).EvalStep(batch.tensors));
  for (const auto& entry : fs::directory_iterator(folder / "sound")) {
    auto session = open(Contents(entry.path()));
    Expect(Case::Loss(session.EvalStep(batch.tensors)) == loss, entry.path().string() + " has another loss");
    session.ExportModelForInferencing(given.path("inference").string(), {"out"});
  }
  for (const auto& entry : fs::directory_iterator(folder / "reaching_out")) {
    refused(Contents(entry.path()), ", which artifacts never do");
  }
  for (const auto& entry : fs::directory_iterator(folder / "damaged")) {
    refused(Contents(entry.path()), "is damaged, or no ONNX model");
  }
  refused({24, 0, 0, 0, 'O', 'R', 'T', 'M', 0, 0, 0, 0}, "is in ORT format");
}

// Expressions over dimensions have the values that they have in Python, and what Python refuses is refused.
void EvaluatesAsPython(const fs::path& file) {
  const auto text = Contents(file);
  const Json known = ort_trainer::ParseJson({reinterpret_cast<const char*>(text.data()), text.size()});
  ort_trainer::Sizes sizes;
  for (const auto& [name, size] : known.at("sizes").members) sizes[name] = size.integer();
  for (const auto& [expression, value] : known.at("values").members) {
    Expect(ort_trainer::Evaluate(expression, sizes) == value.integer(), expression + " is not " + value.text);
    Expect(ort_trainer::Holds(expression, sizes) == (value.integer() != 0), expression + " holds, or not");
  }
  for (const Json& expression : known.at("refused").items) {
    const std::string start = "'" + expression.string().substr(0, 200);
    ExpectError([&] { ort_trainer::Evaluate(expression, sizes); }, start);
    ExpectError([&] { ort_trainer::Holds(expression, sizes); }, start);
  }
  for (const Json& expression : known.at("divisions").items) {
    ExpectError([&] { ort_trainer::Evaluate(expression, sizes); }, expression.string() + "' has no value: it divides by zero");
    Expect(!ort_trainer::Holds(expression, sizes), expression.string() + " holds");
  }
  ExpectError([&] { ort_trainer::Evaluate("dim('far')", sizes); }, "needs the size of far");
  Expect(ort_trainer::Holds("dim('far') > 1", sizes), "a condition over unknown sizes does not hold");
}

// A private file stays private, and a link a link.
void KeepsModesAndLinks(const Case& given) {
  const fs::path folder = given.path("access"), file = folder / "far" / "file";
  fs::remove_all(folder);
  fs::create_directories(folder / "far");
  fs::create_symlink("far/file", folder / "link");
  fs::create_symlink("link", folder / "second");
  fs::create_symlink("loop", folder / "loop");
  auto state = given.State("checkpoint");
  Ort::CheckpointState::SaveCheckpoint(state, (folder / "second").string(), true);
  const auto content = Contents(file);
  fs::permissions(file, fs::perms::owner_read | fs::perms::owner_write | fs::perms::group_read);
  Ort::CheckpointState::SaveCheckpoint(state, (folder / "link").string(), true);
  Expect(fs::is_symlink(folder / "link") && fs::is_symlink(folder / "second"), "a link was replaced by a file");
  Expect(Contents(file) == content, "a link leads to another file");
  Expect(fs::status(file).permissions() == static_cast<fs::perms>(0640), "a private file has become readable");
  ExpectError([&] { Ort::CheckpointState::SaveCheckpoint(state, (folder / "loop").string(), true); }, "leads back to itself");
  ExpectError([&] { Ort::CheckpointState::SaveCheckpoint(state, "/dev/null", true); }, "it is not a file");
}

void SaysWhatIsWrong(const Ort::Env& env, const Case& given, const Case& other) {
  auto state = given.State("checkpoint");
  auto session = given.Session(state);
  const auto before = given.path("before").string(), after = given.path("after").string();
  Ort::CheckpointState::SaveCheckpoint(state, before, true);
  Batch batch(given.Inputs(1));
  const std::vector<int64_t> words = batch.integers(0), labels = batch.integers(1);
  batch.integers(0)[0] = 11;
  ExpectError([&] { session.TrainStep(batch.tensors); }, "has the value 11");
  batch.integers(0) = words;
  batch.integers(1)[3] = 10;
  ExpectError([&] { session.TrainStep(batch.tensors); }, "has the value 10");
  batch.integers(1) = labels;
  std::swap(batch.tensors[0], batch.tensors[2]);
  ExpectError([&] { session.TrainStep(batch.tensors); }, "input 'image'");
  std::swap(batch.tensors[0], batch.tensors[2]);
  const int64_t shape[] = {3, 10};
  const auto logits = Ort::Value::CreateTensor(Ort::CheckpointState::Allocator(), shape, 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
  const std::vector<const OrtValue*> inputs(batch.tensors.begin(), batch.tensors.end());
  OrtValue* outputs[] = {nullptr, logits};
  const auto train = Ort::GetTrainingApi().TrainStep;
  ExpectError([&] { Ort::ThrowOnError(train(session, nullptr, inputs.size(), inputs.data(), 2, outputs)); }, "[17, 10]");
  batch.tensors.pop_back();
  ExpectError([&] { session.TrainStep(batch.tensors); }, "2 inputs were given");
  Batch longer(given.Inputs(0));
  std::swap(batch.tensors[1], longer.tensors[1]);
  batch.tensors.push_back(std::move(longer.tensors[2]));
  ExpectError([&] { session.TrainStep(batch.tensors); }, "batch = 17");
  Ort::CheckpointState::SaveCheckpoint(state, after, true);
  Expect(Contents(before) == Contents(after), "a refused step has changed something");

  ExpectError([&] { Ort::CheckpointState::LoadCheckpoint("nothing"); }, "there is no checkpoint 'nothing'");
  ExpectError([&] { Ort::CheckpointState::LoadCheckpoint(given.path("").string()); }, "there is no checkpoint");  // a folder
  ExpectError([&] { Ort::CheckpointState::LoadCheckpointFromBuffer({}); }, "is damaged");
  ExpectError([&] { session.TrainStep({}); }, "0 inputs were given");
  ExpectError([&] { session.ExportModelForInferencing(after, {}); }, "needs outputs, each once");
  ExpectError([&] { Ort::CheckpointState::SaveCheckpoint(state, "no/folder/x", true); }, "can't be written");
  ExpectError([&] { session->ExportModelForInferencing(after, {"nothing"}); }, "any value of its graph");
  const Ort::SessionOptions options;
  const std::string training = given.path("training_model.onnx").string();
  ExpectError([&] { Ort::TrainingSession(env, options, state, other.path("training_model.onnx").string()); },
              "come from different exports");
  ExpectError([&] { Ort::TrainingSession(env, options, state, given.path("eval_model.onnx").string()); },
              "this is the evaluation model");
  ExpectError([&] { Ort::TrainingSession(env, options, state, given.path("plan.json").string()); }, "the training model");
  ExpectError([&] { Ort::TrainingSession(env, options, state, std::vector<uint8_t>()); }, "the training model");
  Ort::TrainingSession alone(env, options, state, training);
  ExpectError([&] { alone.EvalStep(batch.tensors); }, "evaluation model");
  ExpectError([&] { alone.OptimizerStep(); }, "there is no optimizer");
}

}  // namespace

int main(int argc, char** argv) {
  const fs::path folder = argc > 1 ? argv[1] : "build/portable";
  const Ort::Env env;
  int failures = 0;
  const auto run = [&](const std::string& name, const std::function<void()>& test) {
    try {
      test();
      std::cout << "ok " << name << '\n';
    } catch (const std::exception& error) {
      std::cout << "not ok " << name << ": " << error.what() << '\n';
      ++failures;
    }
  };
  for (const auto& entry : fs::directory_iterator(folder)) {
    const Case given(env, entry.path());
    const std::string name = entry.path().filename().string();
    run(name + " trains as in Python", [&] { TrainsAsInPython(given); });
    run(name + " goes on from a checkpoint", [&] { GoesOnFromACheckpoint(given); });
    run(name + " goes round byte for byte", [&] { GoesRoundByteForByte(given); });
    run(name + " moves parameters", [&] { MovesParameters(given); });
  }
  const Case net(env, folder / "net"), linear(env, folder / "linear");
  run("damage is found", [&] { FindsDamage(linear); });
  run("properties are kept", [&] { KeepsProperties(net); });
  run("bytes are opened, and seeds followed", [&] { OpensBytesAndFollowsSeeds(env, net); });
  run("schedules are followed", [&] { FollowsSchedules(linear); });
  run("objects have one owner", [&] { OwnsItsObjects(linear); });
  run("artifacts of onnxruntime-training are refused", [&] { RefusesForeignArtifacts(env, linear); });
  run("encodings are read", [&] { ReadsEncodings(env, Case(env, folder / "none"), folder / ".." / "encodings"); });
  run("expressions are evaluated", [&] { EvaluatesAsPython(folder / ".." / "expressions.json"); });
  run("modes and links stay", [&] { KeepsModesAndLinks(net); });
  run("errors say what is wrong", [&] { SaysWhatIsWrong(env, net, linear); });
  return failures != 0;
}
