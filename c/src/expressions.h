// Arithmetic over the sizes of a batch, as models describe shapes and conditions: dim('batch') * 4 >= 8.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "json.h"

namespace ort_trainer {

using Sizes = std::map<std::string, std::int64_t>;

// Returns whether a condition is true, or not all of its sizes are known; a division by zero makes it false.
bool Holds(const Json& condition, const Sizes& sizes);
// Returns the value of a number or an expression. Throws std::runtime_error if it is none, or needs an unknown size.
double Evaluate(const Json& expression, const Sizes& sizes);

}  // namespace ort_trainer
