#include "json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace ort_trainer {
namespace {

constexpr int kDeepest = 100;

// Python and to_chars both write the shortest digits that give the number back, but choose exponents differently.
std::string FloatText(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  std::array<char, 64> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::scientific).ptr;
  std::string text(buffer.data(), end);
  const int power = std::atoi(text.c_str() + text.find('e') + 1);
  if (value != 0 && (power < -4 || power >= 16)) return text;
  const auto fixed = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::fixed).ptr;
  text.assign(buffer.data(), fixed);
  return text.find('.') == std::string::npos ? text + ".0" : text;
}

void AppendUtf8(std::string& text, unsigned point) {
  if (point < 0x80) {
    text += static_cast<char>(point);
  } else if (point < 0x800) {
    text += {static_cast<char>(0xC0 | point >> 6), static_cast<char>(0x80 | (point & 0x3F))};
  } else if (point < 0x10000) {
    text += {static_cast<char>(0xE0 | point >> 12), static_cast<char>(0x80 | (point >> 6 & 0x3F)),
             static_cast<char>(0x80 | (point & 0x3F))};
  } else {
    text += {static_cast<char>(0xF0 | point >> 18), static_cast<char>(0x80 | (point >> 12 & 0x3F)),
             static_cast<char>(0x80 | (point >> 6 & 0x3F)), static_cast<char>(0x80 | (point & 0x3F))};
  }
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json Whole() {
    Json value = Value(0);
    Peek();
    if (place_ != text_.size()) Fail();
    return value;
  }

 private:
  [[noreturn]] void Fail() const { throw std::runtime_error("invalid JSON at byte " + std::to_string(place_)); }

  char Peek() {
    while (place_ < text_.size() && std::string_view(" \t\r\n").find(text_[place_]) != std::string_view::npos) ++place_;
    return place_ < text_.size() ? text_[place_] : '\0';
  }

  bool Accept(std::string_view token) {
    Peek();
    if (text_.substr(place_, token.size()) != token) return false;
    place_ += token.size();
    return true;
  }

  Json Value(int depth) {
    if (depth > kDeepest) Fail();
    switch (Peek()) {
      case '{':
        return Object(depth);
      case '[':
        return List(depth);
      case '"':
        return String();
      default:
        break;
    }
    if (Accept("null")) return {};
    if (Accept("true")) return true;
    if (Accept("false")) return false;
    return Number();
  }

  Json List(int depth) {
    Json list = Json::List();
    ++place_;
    if (Accept("]")) return list;
    do list.items.push_back(Value(depth + 1));
    while (Accept(","));
    if (!Accept("]")) Fail();
    return list;
  }

  Json Object(int depth) {
    Json object = Json::Object();
    ++place_;
    if (Accept("}")) return object;
    do {
      if (Peek() != '"') Fail();
      std::string key = String();
      if (object.find(key) != nullptr || !Accept(":")) Fail();
      object.members.emplace_back(std::move(key), Value(depth + 1));
    } while (Accept(","));
    if (!Accept("}")) Fail();
    return object;
  }

  Json Number() {
    for (const char* word : {"NaN", "Infinity", "-Infinity"}) {
      if (Accept(word)) return Made(Json::Kind::kFloat, word);
    }
    const auto end = text_.find_first_not_of("+-.0123456789eE", place_);
    const std::string token(text_.substr(place_, end == std::string_view::npos ? end : end - place_));
    double value = 0;
    const auto [last, error] = std::from_chars(token.data(), token.data() + token.size(), value);
    if (error != std::errc() || last != token.data() + token.size()) Fail();
    place_ += token.size();
    const bool whole = token.find_first_of(".eE") == std::string::npos;
    return Made(whole ? Json::Kind::kInt : Json::Kind::kFloat, token);
  }

  static Json Made(Json::Kind kind, std::string text) {
    Json made;
    made.kind = kind;
    made.text = std::move(text);
    return made;
  }

  unsigned Hexadecimal() {
    unsigned value = 0;
    const char* begin = text_.data() + place_;
    if (place_ + 4 > text_.size() || std::from_chars(begin, begin + 4, value, 16).ptr != begin + 4) Fail();
    place_ += 4;
    return value;
  }

  std::string String() {
    std::string found;
    for (++place_; place_ < text_.size() && text_[place_] != '"';) {
      if (text_[place_] != '\\') {
        found += text_[place_++];
        continue;
      }
      if (++place_ == text_.size()) break;
      const char escape = text_[place_++];
      constexpr std::string_view kNames = "\"\\/bfnrt", kValues = "\"\\/\b\f\n\r\t";
      if (const auto index = kNames.find(escape); index != std::string_view::npos) {
        found += kValues[index];
      } else if (escape == 'u') {
        unsigned point = Hexadecimal();
        if (point >= 0xD800 && point < 0xDC00 && text_.substr(place_, 2) == "\\u") {
          place_ += 2;
          const unsigned low = Hexadecimal();
          if (low < 0xDC00 || low > 0xDFFF) Fail();
          point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
        }
        AppendUtf8(found, point);
      } else {
        Fail();
      }
    }
    if (place_ >= text_.size()) Fail();
    ++place_;
    return found;
  }

  std::string_view text_;
  std::size_t place_ = 0;
};

void AppendEscaped(std::string& out, unsigned unit) {
  std::array<char, 8> buffer;
  std::snprintf(buffer.data(), buffer.size(), "\\u%04x", unit);
  out += buffer.data();
}

void AppendString(std::string& out, const std::string& text) {
  out += '"';
  for (std::size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    constexpr std::string_view kValues = "\"\\\b\f\n\r\t", kNames = "\"\\bfnrt";
    if (const auto index = kValues.find(text[i]); index != std::string_view::npos) {
      out += {'\\', kNames[index]};
      ++i;
    } else if (byte >= 0x20 && byte < 0x7F) {
      out += text[i++];
    } else {
      const std::size_t size = byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
      unsigned point = size == 1 ? byte : byte & (0xFF >> (size + 1));
      for (std::size_t j = 1; j < size && i + j < text.size(); ++j) {
        point = point << 6 | (static_cast<unsigned char>(text[i + j]) & 0x3F);
      }
      i += size;
      if (point >= 0x10000) {
        AppendEscaped(out, 0xD800 + ((point - 0x10000) >> 10));
        point = 0xDC00 + (point & 0x3FF);
      }
      AppendEscaped(out, point);
    }
  }
  out += '"';
}

void Append(std::string& out, const Json& value, bool compact) {
  const char* comma = compact ? "," : ", ";
  switch (value.kind) {
    case Json::Kind::kNull:
      out += "null";
      break;
    case Json::Kind::kString:
      AppendString(out, value.text);
      break;
    case Json::Kind::kList:
      out += '[';
      for (const Json& item : value.items) {
        if (&item != &value.items.front()) out += comma;
        Append(out, item, compact);
      }
      out += ']';
      break;
    case Json::Kind::kObject:
      out += '{';
      for (const auto& member : value.members) {
        if (&member != &value.members.front()) out += comma;
        AppendString(out, member.first);
        out += compact ? ":" : ": ";
        Append(out, member.second, compact);
      }
      out += '}';
      break;
    default:
      out += value.text;
  }
}

}  // namespace

Json::Json(double value) : kind(Kind::kFloat), text(FloatText(value)) {}

double Json::number() const {
  if (!is(Kind::kInt) && !is(Kind::kFloat)) throw std::runtime_error("a number was expected, not " + ToText(*this));
  if (text.back() == 'N' || text.back() == 'y') return text[0] == 'N' ? NAN : text[0] == '-' ? -INFINITY : INFINITY;
  double value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);  // strtod() would depend on the locale
  return value;
}

std::int64_t Json::integer() const {
  if (!is(Kind::kInt)) throw std::runtime_error("an integer was expected, not " + ToText(*this));
  std::int64_t value = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc()) {
    throw std::runtime_error(text + " has more than 64 bits");
  }
  return value;
}

const std::string& Json::string() const {
  if (!is(Kind::kString)) throw std::runtime_error("a text was expected, not " + ToText(*this));
  return text;
}

const Json* Json::find(std::string_view key) const {
  const auto found = std::find_if(members.begin(), members.end(), [&](const Member& member) { return member.first == key; });
  return found == members.end() ? nullptr : &found->second;
}

const Json& Json::at(std::string_view key) const {
  const Json* found = find(key);
  if (found == nullptr) throw std::runtime_error(std::string(key) + " is missing");
  return *found;
}

Json& Json::operator[](std::string_view key) {
  if (const Json* found = find(key)) return const_cast<Json&>(*found);
  return members.emplace_back(std::string(key), Json()).second;
}

Json ParseJson(std::string_view text) { return Parser(text).Whole(); }

std::string ToText(const Json& value, bool compact) {
  std::string out;
  Append(out, value, compact);
  return out;
}

}  // namespace ort_trainer
