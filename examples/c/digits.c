/* Trains a classifier of handwritten digits in C: digits FOLDER [EPOCHS], with what make_artifacts.py wrote there. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "onnxruntime_training_c_api.h"

enum { PIXELS = 64, CLASSES = 10, BATCH = 64, TRAIN_ROWS = 1437 };

static const OrtApi* api;

/* Ends the program if a call has failed. */
static void check(OrtStatus* status) {
  if (status == NULL) return;
  fprintf(stderr, "%s\n", api->GetErrorMessage(status));
  exit(1);
}

static const char* in(const char* folder, const char* name) {
  static char paths[8][1024];
  static int next = 0;
  char* path = paths[next++ % 8];
  snprintf(path, sizeof paths[0], "%s/%s", folder, name);
  return path;
}

/* Reads pixels from 0 to 1 and labels, and returns the number of rows. */
static size_t read_digits(const char* path, float** pixels, int64_t** labels) {
  FILE* file = fopen(path, "rb");
  if (file == NULL) {
    fprintf(stderr, "there is no %s: write it with make_artifacts.py\n", path);
    exit(1);
  }
  fseek(file, 0, SEEK_END);
  const size_t rows = (size_t)ftell(file) / (PIXELS + 1);
  rewind(file);
  unsigned char* bytes = malloc(rows * (PIXELS + 1));
  *pixels = malloc(rows * PIXELS * sizeof **pixels);
  *labels = malloc(rows * sizeof **labels);
  if (rows <= TRAIN_ROWS || fread(bytes, PIXELS + 1, rows, file) != rows) exit(1);
  fclose(file);
  for (size_t i = 0; i < rows * PIXELS; ++i) (*pixels)[i] = (float)bytes[i] / 16.0f;
  for (size_t i = 0; i < rows; ++i) (*labels)[i] = bytes[rows * PIXELS + i];
  free(bytes);
  return rows;
}

/* A tensor over the caller's memory. */
static OrtValue* tensor(void* data, size_t bytes, ONNXTensorElementDataType type, int64_t rows, int64_t columns) {
  OrtMemoryInfo* info = NULL;
  OrtValue* value = NULL;
  const int64_t shape[] = {rows, columns};
  check(api->CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &info));
  check(api->CreateTensorWithDataAsOrtValue(info, data, bytes, shape, columns ? 2 : 1, type, &value));
  api->ReleaseMemoryInfo(info);
  return value;
}

static void batch_of(float* pixels, int64_t* labels, size_t start, size_t rows, OrtValue* inputs[2]) {
  inputs[0] = tensor(pixels + start * PIXELS, rows * PIXELS * sizeof *pixels, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
                     (int64_t)rows, PIXELS);
  inputs[1] = tensor(labels + start, rows * sizeof *labels, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, (int64_t)rows, 0);
}

static float* data_of(OrtValue* value) {
  void* data = NULL;
  check(api->GetTensorMutableData(value, &data));
  return data;
}

static void release(OrtValue* values[2]) {
  for (int i = 0; i < 2; ++i) api->ReleaseValue(values[i]);
}

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: %s FOLDER [EPOCHS]\n", argv[0]);
    return 2;
  }
  const char* folder = argv[1];
  const int epochs = argc > 2 ? atoi(argv[2]) : 10;
  api = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  if (api == NULL) {
    fprintf(stderr, "ONNX Runtime %s is too old\n", OrtGetApiBase()->GetVersionString());
    return 1;
  }
  const OrtTrainingApi* training = api->GetTrainingApi(ORT_API_VERSION);
  float* pixels;
  int64_t* labels;
  const size_t rows = read_digits(in(folder, "digits.bin"), &pixels, &labels);

  OrtEnv* env = NULL;
  OrtSessionOptions* options = NULL;
  OrtCheckpointState* state = NULL;
  OrtTrainingSession* session = NULL;
  check(api->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "digits", &env));
  check(api->CreateSessionOptions(&options));
  check(training->LoadCheckpoint(in(folder, "checkpoint"), &state));
  check(training->CreateTrainingSession(env, options, state, in(folder, "training_model.onnx"),
                                        in(folder, "eval_model.onnx"), in(folder, "optimizer_model.onnx"), &session));
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (size_t start = 0; start < TRAIN_ROWS; start += BATCH) {
      const size_t size = start + BATCH < TRAIN_ROWS ? BATCH : TRAIN_ROWS - start;
      OrtValue *inputs[2], *outputs[2] = {NULL, NULL}; /* the loss, and the logits */
      batch_of(pixels, labels, start, size, inputs);
      check(training->TrainStep(session, NULL, 2, (const OrtValue* const*)inputs, 2, outputs));
      check(training->OptimizerStep(session, NULL));
      check(training->LazyResetGrad(session));
      printf("%.9g\n", (double)*data_of(outputs[0]));
      release(inputs);
      release(outputs);
    }
  }
  OrtValue *inputs[2], *outputs[2] = {NULL, NULL};
  batch_of(pixels, labels, TRAIN_ROWS, rows - TRAIN_ROWS, inputs);
  check(training->EvalStep(session, NULL, 2, (const OrtValue* const*)inputs, 2, outputs));
  size_t correct = 0;
  for (size_t row = 0; row < rows - TRAIN_ROWS; ++row) {
    const float* logits = data_of(outputs[1]) + row * CLASSES;
    int best = 0;
    for (int i = 1; i < CLASSES; ++i) best = logits[i] > logits[best] ? i : best;
    correct += best == labels[TRAIN_ROWS + row];
  }
  fprintf(stderr, "test accuracy %.1f %%\n", 100.0 * (double)correct / (double)(rows - TRAIN_ROWS));
  release(inputs);
  release(outputs);

  const char* names[] = {"logits"};
  check(training->SaveCheckpoint(state, in(folder, "trained_c"), true));
  check(training->ExportModelForInferencing(session, in(folder, "digits_c.onnx"), 1, names));
  training->ReleaseTrainingSession(session);
  training->ReleaseCheckpointState(state);
  api->ReleaseSessionOptions(options);
  api->ReleaseEnv(env);
  free(pixels);
  free(labels);
  return 0;
}
