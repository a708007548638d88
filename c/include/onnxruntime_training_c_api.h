// The name of ONNX Runtime's former header.
#pragma once

#include "ort_trainer_c_api.h"
