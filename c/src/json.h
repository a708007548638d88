// JSON as Python's json module writes it. Numbers keep their text, so that a file goes round byte for byte.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ort_trainer {

struct Json {
  enum class Kind { kNull, kBool, kInt, kFloat, kString, kList, kObject };
  using Member = std::pair<std::string, Json>;

  Kind kind = Kind::kNull;
  std::string text;  // of a number as written, of a string without escapes, "true" or "false"
  std::vector<Json> items;
  std::vector<Member> members;  // in order

  Json() = default;
  Json(std::string_view value) : kind(Kind::kString), text(value) {}
  Json(const std::string& value) : Json(std::string_view(value)) {}
  Json(const char* value) : Json(std::string_view(value)) {}
  Json(std::int64_t value) : kind(Kind::kInt), text(std::to_string(value)) {}
  Json(bool value) : kind(Kind::kBool), text(value ? "true" : "false") {}
  Json(double value);
  static Json List() { return OfKind(Kind::kList); }
  static Json Object() { return OfKind(Kind::kObject); }

  bool is(Kind other) const { return kind == other; }
  bool truthy() const { return kind != Kind::kNull && text != "false"; }
  // These throw if the value has another kind, or the object lacks the key.
  double number() const;
  std::int64_t integer() const;
  const std::string& string() const;
  const Json& at(std::string_view key) const;
  // Returns null if there is no such member.
  const Json* find(std::string_view key) const;
  Json& operator[](std::string_view key);  // adds a member that is missing

 private:
  static Json OfKind(Kind kind) {
    Json made;
    made.kind = kind;
    return made;
  }
};

// Throws std::runtime_error if the text is not JSON, or an object has a key twice.
Json ParseJson(std::string_view text);
// `compact` leaves out the spaces after commas and colons.
std::string ToText(const Json& value, bool compact = false);

}  // namespace ort_trainer
