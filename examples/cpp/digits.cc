// Trains a classifier of handwritten digits in C++: digits FOLDER [EPOCHS], with what make_artifacts.py wrote there.

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>

#include "onnxruntime_training_cxx_api.h"

namespace {

constexpr std::size_t kPixels = 64, kClasses = 10, kBatch = 64, kTrainRows = 1437;

struct Digits {
  explicit Digits(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("there is no " + path + ": write it with make_artifacts.py");
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const auto split = bytes.begin() + static_cast<std::ptrdiff_t>(bytes.size() / (kPixels + 1) * kPixels);
    std::transform(bytes.begin(), split, std::back_inserter(pixels), [](char pixel) { return static_cast<float>(pixel) / 16; });
    labels.assign(split, bytes.end());
    if (labels.size() <= kTrainRows) throw std::runtime_error(path + " has too few rows");
  }

  // Returns pixels and labels of some rows, as tensors over the memory here.
  std::vector<Ort::Value> Batch(std::size_t start, std::size_t end) {
    const auto rows = static_cast<std::int64_t>(end - start);
    const auto info = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
    const std::int64_t shape[] = {rows, kPixels};
    std::vector<Ort::Value> batch;
    batch.push_back(Ort::Value::CreateTensor<float>(info, &pixels[start * kPixels], (end - start) * kPixels, shape, 2));
    batch.push_back(Ort::Value::CreateTensor<std::int64_t>(info, &labels[start], end - start, shape, 1));
    return batch;
  }

  std::vector<float> pixels;
  std::vector<std::int64_t> labels;
};

void Train(const std::string& folder, int epochs) {
  Digits digits(folder + "/digits.bin");
  const Ort::Env env;
  const Ort::SessionOptions options;
  auto state = Ort::CheckpointState::LoadCheckpoint(folder + "/checkpoint");
  Ort::TrainingSession session(env, options, state, folder + "/training_model.onnx", folder + "/eval_model.onnx",
                               folder + "/optimizer_model.onnx");
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (std::size_t start = 0; start < kTrainRows; start += kBatch) {
      auto outputs = session.TrainStep(digits.Batch(start, std::min(start + kBatch, kTrainRows)));
      session.OptimizerStep();
      session.LazyResetGrad();
      std::printf("%.9g\n", static_cast<double>(*outputs[0].GetTensorMutableData<float>()));
    }
  }
  const std::size_t rows = digits.labels.size() - kTrainRows;
  auto outputs = session.EvalStep(digits.Batch(kTrainRows, digits.labels.size()));
  const float* logits = outputs[1].GetTensorMutableData<float>();
  std::size_t correct = 0;
  for (std::size_t row = 0; row < rows; ++row, logits += kClasses) {
    correct += std::max_element(logits, logits + kClasses) - logits == digits.labels[kTrainRows + row];
  }
  std::cerr << "test accuracy " << 100.0 * static_cast<double>(correct) / static_cast<double>(rows) << " %\n";
  Ort::CheckpointState::SaveCheckpoint(state, folder + "/trained_cpp", true);
  session.ExportModelForInferencing(folder + "/digits_cpp.onnx", {"logits"});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: " << argv[0] << " FOLDER [EPOCHS]\n";
    return 2;
  }
  try {
    Train(argv[1], argc > 2 ? std::atoi(argv[2]) : 10);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
