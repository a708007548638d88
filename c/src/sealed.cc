#include "sealed.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ort_trainer {
namespace {

constexpr std::string_view kMark = "\"header_checksum\":\"";
constexpr std::string_view kNoChecksum = "0000000000000000";
constexpr std::size_t kPrefix = 8;  // bytes of the length of the header

std::string Checksum(const void* data, std::size_t size) {
  std::array<char, 17> text;
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(XXH3_64bits(data, size)));
  return text.data();
}

void ReplaceAll(std::string& text, std::string_view old, std::string_view replacement) {
  for (auto at = text.find(old); at != std::string::npos; at = text.find(old, at + replacement.size())) {
    text.replace(at, old.size(), replacement);
  }
}

std::string Joined(std::string_view some, std::string_view other) { return std::string(some).append(other); }

[[noreturn]] void Fail(const std::string& why) { throw std::runtime_error(why); }

// Removes the checksums from the metadata, and returns those of the tensors, after checking that of the header.
Json TakeChecksums(Json& metadata, std::string header) {
  const Json *own = metadata.find("header_checksum"), *others = metadata.find("checksums");
  if (own == nullptr || others == nullptr) Fail("it has no checksums: an earlier ort_trainer wrote it");
  ReplaceAll(header, Joined(kMark, own->string()), Joined(kMark, kNoChecksum));
  if (own->string() != Checksum(header.data(), header.size())) Fail("its header does not match its checksum");
  Json checksums = ParseJson(others->string());
  auto& members = metadata.members;
  members.erase(std::remove_if(members.begin(), members.end(),
                               [](const auto& m) { return m.first == "header_checksum" || m.first == "checksums"; }),
                members.end());
  return checksums;
}

}  // namespace

std::size_t ElementCount(const Shape& shape) {
  std::size_t count = 1;
  for (const std::int64_t size : shape) {
    if (size < 0 || (size > 0 && count > (std::size_t{1} << 59) / static_cast<std::size_t>(size))) {
      throw std::overflow_error("a shape is invalid");
    }
    count *= static_cast<std::size_t>(size);
  }
  return count;
}

Shape ShapeOf(const Json& list) {
  Shape shape;
  for (const Json& size : list.items) shape.push_back(size.integer());
  return shape;
}

const StoredTensor& SealedFile::tensor(std::string_view name) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const auto& entry) { return entry.first == name; });
  if (found == tensors.end()) Fail("the tensor " + std::string(name) + " is missing");
  return found->second;
}

std::size_t SizeOf(std::string_view code) {
  if (code == "BOOL") return 1;
  if (code == "BF16") return 2;
  const bool known = code == "U8" || code == "I8" || code == "U16" || code == "I16" || code == "F16" || code == "U32" ||
                     code == "I32" || code == "F32" || code == "U64" || code == "I64" || code == "F64";
  return known ? static_cast<std::size_t>(std::stoi(std::string(code.substr(1)))) / 8 : 0;
}

SealedFile ReadSealed(const std::uint8_t* data, std::size_t size) {
  std::uint64_t length = 0;  // little-endian, as every machine that this builds for
  if (size >= kPrefix) std::memcpy(&length, data, kPrefix);
  if (length < 2 || size < kPrefix || length > size - kPrefix) Fail("its first 8 bytes are not the length of a header");
  const std::string header(reinterpret_cast<const char*>(data), kPrefix + length);
  Json entries = ParseJson(std::string_view(header).substr(kPrefix));
  SealedFile file;
  file.metadata = entries.at("__metadata__");
  const Json checksums = TakeChecksums(file.metadata, header);
  std::size_t end = kPrefix + length;
  for (const auto& [name, entry] : entries.members) {
    if (name == "__metadata__") continue;
    StoredTensor tensor{entry.at("dtype").string(), ShapeOf(entry.at("shape")), data + end, 0};
    const std::size_t count = ElementCount(tensor.shape), element = SizeOf(tensor.code);
    const auto& offsets = entry.at("data_offsets").items;
    const bool fits = element != 0 && count <= (size - end) / element;
    tensor.size = fits ? count * element : 0;
    const auto start = static_cast<std::int64_t>(end - kPrefix - length);
    if (!fits || offsets.size() != 2 || offsets[0].integer() != start ||
        offsets[1].integer() != start + static_cast<std::int64_t>(tensor.size)) {
      Fail("the entry of the tensor " + name + " is invalid");
    }
    if (checksums.at(name).string() != Checksum(tensor.data, tensor.size)) {
      Fail(name + " does not match the stored checksum");
    }
    end += tensor.size;
    file.tensors.emplace_back(name, std::move(tensor));
  }
  if (end != size) Fail("it has " + std::to_string(size) + " bytes, but its header says " + std::to_string(end));
  return file;
}

Bytes WriteSealed(std::vector<std::pair<std::string, StoredTensor>> tensors, const Json& metadata) {
  // Large elements first, so that each tensor is aligned. Bytes of UTF-8 sort as code points do.
  std::sort(tensors.begin(), tensors.end(), [](const auto& some, const auto& other) {
    const std::size_t a = SizeOf(some.second.code), b = SizeOf(other.second.code);
    return a != b ? a > b : some.first < other.first;
  });
  Json entries = Json::Object(), checksums = Json::Object();
  std::int64_t end = 0;
  entries["__metadata__"] = metadata;
  for (const auto& [name, tensor] : tensors) {
    checksums.members.emplace_back(name, Checksum(tensor.data, tensor.size));
    Json shape = Json::List(), offsets = Json::List(), entry = Json::Object();
    for (const std::int64_t part : tensor.shape) shape.items.emplace_back(part);
    offsets.items.emplace_back(end);
    end += static_cast<std::int64_t>(tensor.size);
    offsets.items.emplace_back(end);
    entry["dtype"] = tensor.code;
    entry["shape"] = shape;
    entry["data_offsets"] = offsets;
    entries.members.emplace_back(name, std::move(entry));
  }
  Json& said = entries["__metadata__"];
  said["checksums"] = ToText(checksums);
  said["header_checksum"] = kNoChecksum;
  std::string text = ToText(entries, true);
  text.append((8 - text.size() % 8) % 8, ' ');
  const std::uint64_t length = text.size();
  std::string header(kPrefix, '\0');
  std::memcpy(header.data(), &length, kPrefix);
  header += text;
  const std::string checksum = Checksum(header.data(), header.size());
  ReplaceAll(header, Joined(kMark, kNoChecksum), Joined(kMark, checksum));
  Bytes whole(header.begin(), header.end());
  whole.reserve(header.size() + static_cast<std::size_t>(end));
  for (const auto& entry : tensors) whole.insert(whole.end(), entry.second.data, entry.second.data + entry.second.size);
  return whole;
}

}  // namespace ort_trainer
