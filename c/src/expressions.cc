#include "expressions.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace ort_trainer {
namespace {

constexpr int kDeepest = 100;
// The operators by how strongly they bind, the weakest first; `not` binds as the comparisons do.
const std::vector<std::vector<std::string_view>> kLevels = {
    {"or"}, {"and"}, {"==", "!=", "<=", ">=", "<", ">"}, {"+", "-"}, {"//", "*", "/", "%"}};
constexpr std::size_t kComparisons = 2;

struct UnknownSize : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Evaluator {
 public:
  Evaluator(std::string_view text, const Sizes& sizes) : text_(text), sizes_(sizes) {}

  double Whole() {
    const double value = Binary(0);
    Skip();
    if (place_ != text_.size()) Fail();
    return value;
  }

 private:
  [[noreturn]] void Fail() const {
    throw std::runtime_error(std::string(text_) + " is not arithmetic over dimensions, at byte " + std::to_string(place_));
  }

  static bool IsWord(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.'; }

  void Skip() {
    while (place_ < text_.size() && text_[place_] == ' ') ++place_;
  }

  bool Accept(std::string_view token) {
    Skip();
    if (text_.substr(place_, token.size()) != token) return false;
    const std::string_view rest = text_.substr(place_ + token.size());
    if (IsWord(token.front()) && !rest.empty() && IsWord(rest.front())) return false;
    if (token == "*" && !rest.empty() && rest.front() == '*') return false;  // a power
    place_ += token.size();
    return true;
  }

  double Binary(std::size_t level) {
    if (level == kLevels.size()) return Unary();
    bool negated = false, any = false;
    while (level == kComparisons && Accept("not")) negated = !negated, any = true;
    if (any) return (Binary(level) != 0) != negated;
    double value = Binary(level + 1);
    for (;;) {
      const auto& operators = kLevels[level];
      const auto found = std::find_if(operators.begin(), operators.end(), [this](auto token) { return Accept(token); });
      if (found == operators.end()) return value;
      value = Applied(*found, value, Binary(level + 1));
    }
  }

  static double Applied(std::string_view token, double a, double b) {
    if (token == "or") return a != 0 ? a : b;
    if (token == "and") return a != 0 ? b : a;
    if (token == "==") return a == b;
    if (token == "!=") return a != b;
    if (token == "<=") return a <= b;
    if (token == ">=") return a >= b;
    if (token == "<") return a < b;
    if (token == ">") return a > b;
    if (token == "+") return a + b;
    if (token == "-") return a - b;
    if (token == "*") return a * b;
    if (b == 0) return NAN;
    if (token == "/") return a / b;
    const double quotient = std::floor(a / b);
    return token == "//" ? quotient : a - b * quotient;
  }

  double Unary() {
    if (++depth_ > kDeepest) Fail();
    double value = 0;
    if (Accept("-")) {
      value = -Unary();
    } else {
      value = Atom();
      if (Accept("**")) value = std::pow(value, Unary());
    }
    --depth_;
    return value;
  }

  double Atom() {
    if (Accept("(")) return Closed(Binary(0));
    if (Accept("dim")) return Dimension();
    if (Accept("True")) return 1;
    if (Accept("False")) return 0;
    for (const auto& [name, function] : kFunctions) {
      if (Accept(name)) {
        if (!Accept("(")) Fail();
        return Closed(function(Binary(0)));
      }
    }
    for (const std::string_view name : {"max", "min"}) {
      if (!Accept(name)) continue;
      if (!Accept("(")) Fail();
      double value = Binary(0);
      while (Accept(",")) value = name == "max" ? std::max(value, Binary(0)) : std::min(value, Binary(0));
      return Closed(value);
    }
    Skip();
    std::size_t end = place_;
    while (end < text_.size() && IsWord(text_[end])) ++end;
    const std::string token(text_.substr(place_, end - place_));
    double value = 0;
    const auto [last, error] = std::from_chars(token.data(), token.data() + token.size(), value);
    if (error != std::errc() || last != token.data() + token.size()) Fail();
    place_ = end;
    return value;
  }

  double Closed(double value) {
    if (!Accept(")")) Fail();
    return value;
  }

  double Dimension() {
    if (!Accept("(")) Fail();
    Skip();
    const char quote = place_ < text_.size() ? text_[place_++] : '\0';
    if (quote != '\'' && quote != '"') Fail();
    std::string name;
    while (place_ < text_.size() && text_[place_] != quote) {
      if (text_[place_] == '\\' && place_ + 1 < text_.size()) ++place_;
      name += text_[place_++];
    }
    if (place_ == text_.size()) Fail();
    ++place_;
    const auto found = sizes_.find(name);
    if (found == sizes_.end()) throw UnknownSize("the size of " + name + " is unknown");
    return Closed(static_cast<double>(found->second));
  }

  using Function = double (*)(double);
  static inline const std::vector<std::pair<std::string_view, Function>> kFunctions = {
      {"abs", std::fabs},        {"int", std::trunc},      {"round", std::nearbyint},      {"float", [](double value) { return value; }},
      {"math.floor", std::floor}, {"math.ceil", std::ceil}, {"math.trunc", std::trunc}};

  std::string_view text_;
  const Sizes& sizes_;
  std::size_t place_ = 0;
  int depth_ = 0;
};

}  // namespace

bool Holds(const Json& condition, const Sizes& sizes) {
  try {
    const double value = Evaluate(condition, sizes);
    return value != 0 && !std::isnan(value);
  } catch (const UnknownSize&) {
    return true;
  }
}

double Evaluate(const Json& expression, const Sizes& sizes) {
  return expression.is(Json::Kind::kString) ? Evaluator(expression.text, sizes).Whole() : expression.number();
}

}  // namespace ort_trainer
