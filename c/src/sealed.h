// Sealed files: safetensors files in which the header and every tensor carry a checksum (ort_trainer/core/sealed.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "json.h"

namespace ort_trainer {

using Bytes = std::vector<std::uint8_t>;
using Shape = std::vector<std::int64_t>;

// Throws std::overflow_error for a shape whose number of elements has more than 59 bits, or with a negative size.
std::size_t ElementCount(const Shape& shape);

// Returns the sizes in a list.
Shape ShapeOf(const Json& list);

struct StoredTensor {
  std::string code;  // the format's name of the dtype, such as "F32"
  Shape shape;
  const std::uint8_t* data;
  std::size_t size;  // bytes
};

struct SealedFile {
  std::vector<std::pair<std::string, StoredTensor>> tensors;  // their data lie in the bytes that were read
  Json metadata;

  const StoredTensor& tensor(std::string_view name) const;
};

// Returns the size of an element; 0 if the code is unknown.
std::size_t SizeOf(std::string_view code);
// Throws std::runtime_error if the bytes are damaged, or no sealed file.
SealedFile ReadSealed(const std::uint8_t* data, std::size_t size);
Bytes WriteSealed(std::vector<std::pair<std::string, StoredTensor>> tensors, const Json& metadata);

}  // namespace ort_trainer
