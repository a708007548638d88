// Trains the artifacts of ort_trainer on a stock ONNX Runtime, with the functions of its former training API.
//
// The names and signatures are those of ONNX Runtime's onnxruntime_training_c_api.h, a name that includes this header.
//
//     const OrtApi* api = OrtGetApiBase()->GetApi(ORT_API_VERSION);
//     const OrtTrainingApi* training = api->GetTrainingApi(ORT_API_VERSION);
//
// A function returns NULL, or a status with an error, which the caller releases; nothing has changed then, unless the
// engine fails in the middle of an OptimizerStep. Texts are UTF-8. Calls on one state take turns.
#pragma once

#include <stdbool.h>

#if __has_include(<onnxruntime_c_api.h>)
#include <onnxruntime_c_api.h>
#else
#include "ort_entries.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct OrtTrainingSession OrtTrainingSession;
// The parameters, and all else that training changes. It must outlive the sessions that use it.
typedef struct OrtCheckpointState OrtCheckpointState;

typedef enum OrtPropertyType {
  OrtIntProperty = 0,     // int64_t
  OrtFloatProperty = 1,   // float
  OrtStringProperty = 2,  // char, up to the first '\0'
} OrtPropertyType;

struct OrtTrainingApi {
  // Reads the checkpoint of an export, complete or nominal.
  OrtStatus* (*LoadCheckpoint)(const ORTCHAR_T* checkpoint_path, OrtCheckpointState** checkpoint_state);
  // Writes a file, which replaces an existing one only when it is complete. The optimizer's state, the number of updates
  // and gradients not applied yet are what going on needs.
  OrtStatus* (*SaveCheckpoint)(OrtCheckpointState* checkpoint_state, const ORTCHAR_T* checkpoint_path,
                               const bool include_optimizer_state);
  // The evaluation and the optimizer model may be NULL. A state may have several sessions.
  OrtStatus* (*CreateTrainingSession)(const OrtEnv* env, const OrtSessionOptions* options,
                                      OrtCheckpointState* checkpoint_state, const ORTCHAR_T* train_model_path,
                                      const ORTCHAR_T* eval_model_path, const ORTCHAR_T* optimizer_model_path,
                                      OrtTrainingSession** out);
  OrtStatus* (*CreateTrainingSessionFromBuffer)(const OrtEnv* env, const OrtSessionOptions* options,
                                                OrtCheckpointState* checkpoint_state, const void* train_model_data,
                                                size_t train_data_length, const void* eval_model_data,
                                                size_t eval_data_length, const void* optim_model_data,
                                                size_t optim_data_length, OrtTrainingSession** out);
  OrtStatus* (*TrainingSessionGetTrainingModelOutputCount)(const OrtTrainingSession* sess, size_t* out);
  OrtStatus* (*TrainingSessionGetEvalModelOutputCount)(const OrtTrainingSession* sess, size_t* out);
  // A name is freed with the allocator.
  OrtStatus* (*TrainingSessionGetTrainingModelOutputName)(const OrtTrainingSession* sess, size_t index,
                                                          OrtAllocator* allocator, char** output);
  OrtStatus* (*TrainingSessionGetEvalModelOutputName)(const OrtTrainingSession* sess, size_t index,
                                                      OrtAllocator* allocator, char** output);
  // The next training step overwrites the gradients; without it, they accumulate.
  OrtStatus* (*LazyResetGrad)(OrtTrainingSession* session);
  // Inputs and outputs are in the order of the names. Outputs that are NULL are made, and released by the caller.
  OrtStatus* (*TrainStep)(OrtTrainingSession* sess, const OrtRunOptions* run_options, size_t inputs_len,
                          const OrtValue* const* inputs, size_t outputs_len, OrtValue** outputs);
  OrtStatus* (*EvalStep)(const OrtTrainingSession* sess, const OrtRunOptions* run_options, size_t inputs_len,
                         const OrtValue* const* inputs, size_t outputs_len, OrtValue** outputs);
  // Sets a constant rate for all parameters, which replaces the schedule of the checkpoint.
  OrtStatus* (*SetLearningRate)(OrtTrainingSession* sess, float learning_rate);
  // Returns the rate of the next update, for the parameters outside any parameter group.
  OrtStatus* (*GetLearningRate)(OrtTrainingSession* sess, float* learning_rate);
  OrtStatus* (*OptimizerStep)(OrtTrainingSession* sess, const OrtRunOptions* run_options);
  // Sets the rate at once, and again at each SchedulerStep: up from 0, then down to 0.
  OrtStatus* (*RegisterLinearLRScheduler)(OrtTrainingSession* sess, const int64_t warmup_step_count,
                                          const int64_t total_step_count, const float initial_lr);
  OrtStatus* (*SchedulerStep)(OrtTrainingSession* sess);
  // In elements.
  OrtStatus* (*GetParametersSize)(OrtTrainingSession* sess, size_t* out, bool trainable_only);
  // The buffer is a tensor of one dimension.
  OrtStatus* (*CopyParametersToBuffer)(OrtTrainingSession* sess, OrtValue* parameters_buffer, bool trainable_only);
  OrtStatus* (*CopyBufferToParameters)(OrtTrainingSession* sess, OrtValue* parameters_buffer, bool trainable_only);
  void (*ReleaseTrainingSession)(OrtTrainingSession* input);
  void (*ReleaseCheckpointState)(OrtCheckpointState* input);
  // The outputs are any values of the evaluation model; inputs that they don't need are left out.
  OrtStatus* (*ExportModelForInferencing)(OrtTrainingSession* sess, const ORTCHAR_T* inference_model_path,
                                          size_t graph_outputs_len, const char* const* graph_output_names);
  // The numbers are those of torch.manual_seed(seed) in the trainer. Reseeds all states.
  OrtStatus* (*SetSeed)(const int64_t seed);
  OrtStatus* (*TrainingSessionGetTrainingModelInputCount)(const OrtTrainingSession* sess, size_t* out);
  OrtStatus* (*TrainingSessionGetEvalModelInputCount)(const OrtTrainingSession* sess, size_t* out);
  OrtStatus* (*TrainingSessionGetTrainingModelInputName)(const OrtTrainingSession* sess, size_t index,
                                                         OrtAllocator* allocator, char** output);
  OrtStatus* (*TrainingSessionGetEvalModelInputName)(const OrtTrainingSession* sess, size_t index,
                                                     OrtAllocator* allocator, char** output);
  OrtStatus* (*AddProperty)(OrtCheckpointState* checkpoint_state, const char* property_name,
                            enum OrtPropertyType property_type, void* property_value);
  // The value is freed with the allocator.
  OrtStatus* (*GetProperty)(const OrtCheckpointState* checkpoint_state, const char* property_name,
                            OrtAllocator* allocator, enum OrtPropertyType* property_type, void** property_value);
  OrtStatus* (*LoadCheckpointFromBuffer)(const void* checkpoint_buffer, const size_t num_bytes,
                                         OrtCheckpointState** checkpoint_state);
  OrtStatus* (*GetParameterTypeAndShape)(const OrtCheckpointState* checkpoint_state, const char* parameter_name,
                                         OrtTensorTypeAndShapeInfo** parameter_type_and_shape);
  OrtStatus* (*UpdateParameter)(OrtCheckpointState* checkpoint_state, const char* parameter_name, OrtValue* parameter);
  // A copy, released by the caller.
  OrtStatus* (*GetParameter)(const OrtCheckpointState* checkpoint_state, const char* parameter_name,
                             OrtAllocator* allocator, OrtValue** parameter);
};
typedef struct OrtTrainingApi OrtTrainingApi;

// Returns the functions, which call ONNX Runtime through `api`; NULL if that is NULL, as it is for an older library.
const OrtTrainingApi* OrtTrainerGetApi(const OrtApi* api);

// A stock ONNX Runtime's GetTrainingApi() returns NULL. With this macro, programs get a copy of its table, in which it
// returns the functions above.
#define OrtGetApiBase() OrtTrainerGetApiBase(OrtGetApiBase(), ORT_API_VERSION, sizeof(OrtApi))
// Takes the version of the program's headers, and the size of their table.
const OrtApiBase* OrtTrainerGetApiBase(const OrtApiBase* base, uint32_t version, size_t size);

#ifdef __cplusplus
}
#endif
