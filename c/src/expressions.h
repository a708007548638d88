// Arithmetic over the sizes of a batch, as models describe shapes and conditions: dim('batch') * 4 >= 8.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "json.h"

namespace ort_trainer {

using Sizes = std::map<std::string, std::int64_t>;

// Returns whether a condition is true, or not all of its sizes are known; a division by zero makes it false. Throws
// std::runtime_error if it is no condition, or a number in it is not finite or has more than 64 bits.
bool Holds(const Json& condition, const Sizes& sizes);
// Returns the value of a number or an expression without its fraction. Throws std::runtime_error if it has none.
std::int64_t Evaluate(const Json& expression, const Sizes& sizes);
// Throws std::runtime_error if a text is no expression, before its sizes are known.
void CheckExpression(const Json& expression);

}  // namespace ort_trainer
