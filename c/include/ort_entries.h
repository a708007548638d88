// What ort_trainer uses of ONNX Runtime's C API, for machines with its library and without its headers.
//
// The library of a Python wheel brings no headers. OrtApi is a table of functions that only grows: an entry never moves
// or changes, so the entries below are declared at their places, and those between them are left out. With ONNX
// Runtime's own headers in the path, ort_trainer_c_api.h includes them instead of this file.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#define ORT_ENTRY(name) OrtStatus* (*name)

// GetApi() returns NULL from a library that lacks the version asked for. 19 is the oldest that runs the artifacts, and has
// all entries below.
#define ORT_API_VERSION 19
#define ORTCHAR_T char

typedef struct OrtEnv OrtEnv;
typedef struct OrtStatus OrtStatus;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtSession OrtSession;
typedef struct OrtValue OrtValue;
typedef struct OrtRunOptions OrtRunOptions;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtAllocator OrtAllocator;
typedef struct OrtTrainingApi OrtTrainingApi;

typedef enum OrtLoggingLevel { ORT_LOGGING_LEVEL_WARNING = 2 } OrtLoggingLevel;
typedef enum OrtAllocatorType { OrtDeviceAllocator = 0, OrtArenaAllocator = 1 } OrtAllocatorType;
typedef enum OrtMemType { OrtMemTypeDefault = 0 } OrtMemType;

typedef enum OrtErrorCode {
  ORT_OK = 0,
  ORT_FAIL = 1,
  ORT_INVALID_ARGUMENT = 2,
  ORT_NO_SUCHFILE = 3,
  ORT_RUNTIME_EXCEPTION = 6,
} OrtErrorCode;

typedef enum ONNXTensorElementDataType {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED = 0,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 = 2,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 = 3,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16 = 4,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16 = 5,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 = 6,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL = 9,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 = 10,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE = 11,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32 = 12,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64 = 13,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 = 16,
} ONNXTensorElementDataType;

// The number in a comment is the place of the next entry.
typedef struct OrtApi {
  ORT_ENTRY(CreateStatus)(OrtErrorCode code, const char* message);
  OrtErrorCode (*GetErrorCode)(const OrtStatus* status);
  const char* (*GetErrorMessage)(const OrtStatus* status);
  ORT_ENTRY(CreateEnv)(OrtLoggingLevel level, const char* log_id, OrtEnv** out);
  void* others_4[4];
  ORT_ENTRY(CreateSessionFromArray)(const OrtEnv*, const void* model, size_t, const OrtSessionOptions*,
                                    OrtSession** out);  // 8
  ORT_ENTRY(Run)(OrtSession*, const OrtRunOptions*, const char* const* input_names, const OrtValue* const* inputs,
                 size_t input_count, const char* const* output_names, size_t output_count, OrtValue** outputs);
  ORT_ENTRY(CreateSessionOptions)(OrtSessionOptions** out);
  void* others_11[13];
  ORT_ENTRY(SetIntraOpNumThreads)(OrtSessionOptions*, int threads);  // 24
  void* others_25[23];
  ORT_ENTRY(CreateTensorAsOrtValue)(OrtAllocator*, const int64_t* shape, size_t rank, ONNXTensorElementDataType,
                                    OrtValue** out);  // 48
  ORT_ENTRY(CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo*, void* data, size_t bytes, const int64_t* shape,
                                            size_t rank, ONNXTensorElementDataType, OrtValue** out);
  ORT_ENTRY(IsTensor)(const OrtValue*, int* out);
  ORT_ENTRY(GetTensorMutableData)(OrtValue*, void** out);
  void* others_52[8];
  ORT_ENTRY(GetTensorElementType)(const OrtTensorTypeAndShapeInfo*, ONNXTensorElementDataType* out);  // 60
  ORT_ENTRY(GetDimensionsCount)(const OrtTensorTypeAndShapeInfo*, size_t* out);
  ORT_ENTRY(GetDimensions)(const OrtTensorTypeAndShapeInfo*, int64_t* sizes, size_t rank);
  void* others_63[1];
  ORT_ENTRY(GetTensorShapeElementCount)(const OrtTensorTypeAndShapeInfo*, size_t* out);  // 64
  ORT_ENTRY(GetTensorTypeAndShape)(const OrtValue*, OrtTensorTypeAndShapeInfo** out);
  void* others_66[3];
  ORT_ENTRY(CreateCpuMemoryInfo)(OrtAllocatorType, OrtMemType, OrtMemoryInfo** out);  // 69
  void* others_70[5];
  ORT_ENTRY(AllocatorAlloc)(OrtAllocator*, size_t bytes, void** out);  // 75
  ORT_ENTRY(AllocatorFree)(OrtAllocator*, void* memory);
  void* others_77[1];
  ORT_ENTRY(GetAllocatorWithDefaultOptions)(OrtAllocator** out);  // 78
  void* others_79[13];
  void (*ReleaseEnv)(OrtEnv*);  // 92
  void (*ReleaseStatus)(OrtStatus*);
  void (*ReleaseMemoryInfo)(OrtMemoryInfo*);
  void (*ReleaseSession)(OrtSession*);
  void (*ReleaseValue)(OrtValue*);
  void* others_97[2];
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo*);  // 99
  void (*ReleaseSessionOptions)(OrtSessionOptions*);
  void* others_101[118];
  const OrtTrainingApi* (*GetTrainingApi)(uint32_t version);  // 219
} OrtApi;

typedef struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)(void);
} OrtApiBase;

const OrtApiBase* OrtGetApiBase(void);

#ifdef __cplusplus
static_assert(offsetof(OrtApi, GetTrainingApi) == 219 * sizeof(void*), "an entry is not at its place");
}
#endif
