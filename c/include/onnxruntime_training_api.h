// The name in the samples of ONNX Runtime's documentation.
#pragma once

#include "ort_trainer_c_api.h"
