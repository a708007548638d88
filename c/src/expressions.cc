#include "expressions.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace ort_trainer {
namespace {

// As in ort_trainer/core/dims.py.
constexpr std::size_t kLongest = 10'000;
constexpr int kMostOperations = 1'000, kDeepest = 100;
constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
constexpr double kBeyond = 9223372036854775808.0;  // 2^63

using Tokens = std::vector<std::string_view>;
const Tokens kComparisons = {"==", "!=", "<=", ">=", "<", ">"};
// The operators of arithmetic by how strongly they bind, the weakest first.
const std::array<Tokens, 2> kArithmetic = {{{"+", "-"}, {"//", "*", "/", "%"}}};
const Tokens kFunctions = {"abs", "int", "float", "round", "math.floor", "math.ceil", "math.trunc"};
const Tokens kExtremes = {"max", "min"};

struct UnknownSize : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct DivisionByZero : std::runtime_error {
  DivisionByZero() : std::runtime_error("it divides by zero") {}
};

// A number of Python: an int of 64 bits, or a finite float.
class Number {
 public:
  Number(std::int64_t value) : whole_(true), integer_(value) {}  // NOLINT: converts
  explicit Number(bool value) : Number(std::int64_t{value}) {}
  explicit Number(double value) : whole_(false), real_(value) {
    if (!std::isfinite(value)) throw std::runtime_error("a number in it is complex or not finite");
  }

  // Without the fraction.
  static Number Whole(double value) {
    if (!(value >= -kBeyond && value < kBeyond)) TooLarge();
    return static_cast<std::int64_t>(value);
  }
  [[noreturn]] static void TooLarge() { throw std::runtime_error("a number in it has more than 64 bits"); }

  bool whole() const { return whole_; }
  std::int64_t integer() const { return whole_ ? integer_ : Whole(real_).integer_; }
  double real() const { return whole_ ? static_cast<double>(integer_) : real_; }
  bool truthy() const { return whole_ ? integer_ != 0 : real_ != 0; }

  // Below 0, 0 or above 0, as this is less than, equal to or more than another number; never rounds.
  int Compared(const Number& other) const {
    if (whole_ && other.whole_) return (integer_ > other.integer_) - (integer_ < other.integer_);
    if (!whole_ && !other.whole_) return (real_ > other.real_) - (real_ < other.real_);
    if (!whole_) return -other.Compared(*this);
    if (other.real_ >= kBeyond) return -1;
    if (other.real_ < -kBeyond) return 1;
    const double below = std::floor(other.real_);
    const auto floor = static_cast<std::int64_t>(below);
    return integer_ != floor ? (integer_ > floor) - (integer_ < floor) : -(below < other.real_);
  }

 private:
  bool whole_;
  std::int64_t integer_ = 0;
  double real_ = 0;
};

// An operation on operands, a number, or the size of a dimension.
struct Node {
  std::string_view what;
  std::vector<Node> operands;
  Tokens comparisons = {};  // of "compare": one between each two operands
  Number number = std::int64_t{0};
  std::string name = {};
};

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Node Whole() {
    if (text_.size() > kLongest) Fail("it has more than " + std::to_string(kLongest) + " bytes");
    Node node = Choice();
    Skip();
    if (place_ != text_.size()) Fail();
    return node;
  }

 private:
  // Counts how deep a part of the expression is.
  class Deeper {
   public:
    explicit Deeper(Parser& parser) : parser_(parser) {
      if (++parser_.depth_ > kDeepest) parser_.TooLarge();
    }
    ~Deeper() { --parser_.depth_; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;

   private:
    Parser& parser_;
  };

  [[noreturn]] void Fail(const std::string& reason) const {
    throw std::runtime_error("is not arithmetic over dimensions: " + reason);
  }
  [[noreturn]] void Fail() const { Fail("byte " + std::to_string(place_) + " is not allowed"); }
  [[noreturn]] void TooLarge() const {
    Fail("it has more than " + std::to_string(kMostOperations) + " operations, or is nested more than " +
         std::to_string(kDeepest) + " deep");
  }

  static bool IsWord(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '.';
  }

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

  // Returns the token that comes next, or an empty one.
  std::string_view AcceptAny(const Tokens& tokens) {
    const auto found = std::find_if(tokens.begin(), tokens.end(), [this](auto token) { return Accept(token); });
    return found == tokens.end() ? std::string_view() : *found;
  }

  void Expect(std::string_view token) {
    if (!Accept(token)) Fail();
  }

  Node Operation(std::string_view what, Node first) {
    if (++operations_ > kMostOperations) TooLarge();
    Node node{what, {}};
    node.operands.push_back(std::move(first));
    return node;
  }

  Node Choice() {
    const Deeper deeper(*this);
    Node value = Junction("or");
    if (!Accept("if")) return value;
    Node node = Operation("if", Junction("or"));
    Expect("else");
    node.operands.push_back(std::move(value));
    node.operands.push_back(Choice());
    return node;
  }

  // Operands of "or", each of which may be operands of "and".
  Node Junction(std::string_view what) {
    const auto operand = [&] { return what == "or" ? Junction("and") : Negation(); };
    Node node = operand();
    while (Accept(what)) {
      node = Operation(what, std::move(node));
      node.operands.push_back(operand());
    }
    return node;
  }

  Node Negation() {
    if (!Accept("not")) return Comparison();
    const Deeper deeper(*this);
    return Operation("not", Negation());
  }

  Node Comparison() {
    Node node = Arithmetic(0);
    auto token = AcceptAny(kComparisons);
    if (token.empty()) return node;
    node = Operation("compare", std::move(node));
    for (; !token.empty(); token = AcceptAny(kComparisons)) {
      if (++operations_ > kMostOperations) TooLarge();
      node.comparisons.push_back(token);
      node.operands.push_back(Arithmetic(0));
    }
    return node;
  }

  Node Arithmetic(std::size_t level) {
    const auto operand = [&] { return level + 1 < kArithmetic.size() ? Arithmetic(level + 1) : Unary(); };
    Node node = operand();
    for (auto token = AcceptAny(kArithmetic[level]); !token.empty(); token = AcceptAny(kArithmetic[level])) {
      node = Operation(token, std::move(node));
      node.operands.push_back(operand());
    }
    return node;
  }

  Node Unary() {
    if (Accept("-")) {
      const Deeper deeper(*this);
      return Operation("negative", Unary());
    }
    Node node = Atom();
    if (!Accept("**")) return node;
    const Deeper deeper(*this);
    node = Operation("**", std::move(node));
    node.operands.push_back(Unary());
    return node;
  }

  Node Atom() {
    if (Accept("(")) return Closed(Choice());
    if (Accept("dim")) return Dimension();
    if (Accept("True")) return Constant(true);
    if (Accept("False")) return Constant(false);
    if (const auto name = AcceptAny(kFunctions); !name.empty()) {
      Expect("(");
      return Closed(Operation(name, Choice()));
    }
    if (const auto name = AcceptAny(kExtremes); !name.empty()) {
      Expect("(");
      Node node = Operation(name, Choice());
      do {
        Expect(",");
        if (++operations_ > kMostOperations) TooLarge();
        node.operands.push_back(Choice());
        Skip();
      } while (place_ < text_.size() && text_[place_] == ',');
      return Closed(std::move(node));
    }
    return Literal();
  }

  Node Literal() {
    Skip();
    std::size_t end = place_;
    while (end < text_.size() && IsWord(text_[end])) ++end;
    // The sign of an exponent is a part of the number.
    if (end > place_ && end < text_.size() && (text_[end - 1] == 'e' || text_[end - 1] == 'E') &&
        (text_[end] == '+' || text_[end] == '-')) {
      for (++end; end < text_.size() && IsWord(text_[end]);) ++end;
    }
    const std::string_view token = text_.substr(place_, end - place_);
    const char* last = token.data() + token.size();
    if (token.empty() || ((token.front() < '0' || token.front() > '9') && token.front() != '.')) Fail();
    Node node{"number", {}};
    if (token.find_first_not_of("0123456789") == std::string_view::npos) {
      std::int64_t value = 0;
      if (std::from_chars(token.data(), last, value).ec != std::errc()) Fail("a number in it has more than 64 bits");
      node.number = value;
    } else {
      double value = 0;
      const auto [read, error] = std::from_chars(token.data(), last, value);
      if (read != last || error != std::errc()) Fail();
      node.number = Number(value);
    }
    place_ = end;
    return node;
  }

  static Node Constant(bool value) {
    Node node{"number", {}};
    node.number = Number(value);
    return node;
  }

  Node Closed(Node node) {
    Expect(")");
    return node;
  }

  Node Dimension() {
    Expect("(");
    Skip();
    const char quote = place_ < text_.size() ? text_[place_++] : '\0';
    if (quote != '\'' && quote != '"') Fail();
    Node node{"dim", {}};
    while (place_ < text_.size() && text_[place_] != quote) {
      if (text_[place_] == '\\' && place_ + 1 < text_.size()) ++place_;
      node.name += text_[place_++];
    }
    if (place_ == text_.size()) Fail();
    ++place_;
    return Closed(std::move(node));
  }

  std::string_view text_;
  std::size_t place_ = 0;
  int depth_ = 0, operations_ = 0;
};

Number Power(const Number& base, const Number& exponent) {
  if (!base.truthy() && exponent.Compared(std::int64_t{0}) < 0) throw DivisionByZero();
  if (!base.whole() || !exponent.whole() || exponent.integer() < 0) return Number(std::pow(base.real(), exponent.real()));
  const std::int64_t factor = base.integer();
  if (factor == 0 || factor == 1) return exponent.integer() == 0 ? 1 : factor;
  if (factor == -1) return exponent.integer() % 2 == 0 ? 1 : -1;
  std::int64_t value = 1;
  for (std::int64_t count = exponent.integer(); count > 0; --count) {  // ends after at most 64 rounds
    if (__builtin_mul_overflow(value, factor, &value)) Number::TooLarge();
  }
  return value;
}

// The quotient, rounded down, and the rest, which has the sign of the divisor.
Number Divided(const Number& a, const Number& b, bool rest) {
  if (!a.whole() || !b.whole()) {
    double modulo = std::fmod(a.real(), b.real());
    const double quotient = std::round((a.real() - modulo) / b.real());
    const bool other_sign = modulo != 0 && (modulo < 0) != (b.real() < 0);
    if (other_sign) modulo += b.real();
    return Number(rest ? modulo : quotient - other_sign);
  }
  const std::int64_t x = a.integer(), y = b.integer();
  if (y == -1 && rest) return std::int64_t{0};
  if (y == -1 && x == kLeast) Number::TooLarge();
  const std::int64_t quotient = x / y, modulo = x % y;
  const bool other_sign = modulo != 0 && (modulo < 0) != (y < 0);
  return rest ? modulo + (other_sign ? y : 0) : quotient - other_sign;
}

Number Arithmetic(std::string_view token, const Number& a, const Number& b) {
  if (token == "**") return Power(a, b);
  if (token != "+" && token != "-" && token != "*") {
    if (!b.truthy()) throw DivisionByZero();
    return token == "/" ? Number(a.real() / b.real()) : Divided(a, b, token == "%");
  }
  if (!a.whole() || !b.whole()) {
    return Number(token == "+" ? a.real() + b.real() : token == "-" ? a.real() - b.real() : a.real() * b.real());
  }
  std::int64_t value = 0;
  const bool overflows = token == "+"   ? __builtin_add_overflow(a.integer(), b.integer(), &value)
                         : token == "-" ? __builtin_sub_overflow(a.integer(), b.integer(), &value)
                                        : __builtin_mul_overflow(a.integer(), b.integer(), &value);
  if (overflows) Number::TooLarge();
  return value;
}

Number Negative(const Number& value) { return value.whole() ? Arithmetic("-", std::int64_t{0}, value) : Number(-value.real()); }

Number Called(std::string_view name, const Number& value) {
  if (name == "float") return Number(value.real());
  if (name == "abs") return value.Compared(std::int64_t{0}) < 0 ? Negative(value) : value;
  if (value.whole()) return value;
  if (name == "round") return Number::Whole(std::nearbyint(value.real()));
  if (name == "math.floor") return Number::Whole(std::floor(value.real()));
  if (name == "math.ceil") return Number::Whole(std::ceil(value.real()));
  return Number::Whole(value.real());
}

bool Compare(std::string_view token, int order) {
  if (token == "==") return order == 0;
  if (token == "!=") return order != 0;
  if (token == "<=") return order <= 0;
  if (token == ">=") return order >= 0;
  return token == "<" ? order < 0 : order > 0;
}

Number Value(const Node& node, const Sizes& sizes) {
  const auto operand = [&](std::size_t index) { return Value(node.operands[index], sizes); };
  if (node.what == "number") return node.number;
  if (node.what == "dim") return sizes.at(node.name);
  if (node.what == "if") return operand(operand(0).truthy() ? 1 : 2);
  if (node.what == "or") return Number(operand(0).truthy() || operand(1).truthy());
  if (node.what == "and") return Number(operand(0).truthy() && operand(1).truthy());
  if (node.what == "not") return Number(!operand(0).truthy());
  if (node.what == "negative") return Negative(operand(0));
  if (node.what == "compare") {
    std::vector<Number> sides;
    for (std::size_t i = 0; i < node.operands.size(); ++i) sides.push_back(operand(i));
    bool holds = true;
    for (std::size_t i = 0; i < node.comparisons.size(); ++i) {
      holds = holds && Compare(node.comparisons[i], sides[i].Compared(sides[i + 1]));
    }
    return Number(holds);
  }
  Number value = operand(0);
  if (node.what == "max" || node.what == "min") {
    for (std::size_t i = 1; i < node.operands.size(); ++i) {
      const Number other = operand(i);
      const int order = other.Compared(value);
      if (node.what == "max" ? order > 0 : order < 0) value = other;
    }
    return value;
  }
  return node.operands.size() == 1 ? Called(node.what, value) : Arithmetic(node.what, value, operand(1));
}

// Returns the name of a dimension whose size is unknown, or null.
const std::string* Unknown(const Node& node, const Sizes& sizes) {
  if (node.what == "dim") return sizes.count(node.name) ? nullptr : &node.name;
  for (const Node& part : node.operands) {
    if (const std::string* name = Unknown(part, sizes)) return name;
  }
  return nullptr;
}

Number Evaluated(const std::string& text, const Sizes& sizes) {
  const std::string start = text.size() > 200 ? text.substr(0, 200) + "..." : text;
  try {
    const Node node = Parser(text).Whole();
    if (const std::string* name = Unknown(node, sizes)) throw UnknownSize("needs the size of " + *name + ", which is unknown");
    try {
      return Value(node, sizes);
    } catch (const DivisionByZero&) {
      throw;
    } catch (const std::runtime_error& error) {
      throw std::runtime_error("has no value: " + std::string(error.what()));
    }
  } catch (const UnknownSize& error) {
    throw UnknownSize("'" + start + "' " + error.what());
  } catch (const DivisionByZero&) {
    throw;
  } catch (const std::runtime_error& error) {
    throw std::runtime_error("'" + start + "' " + error.what());
  }
}

}  // namespace

bool Holds(const Json& condition, const Sizes& sizes) {
  try {
    return Evaluated(condition.string(), sizes).truthy();
  } catch (const UnknownSize&) {
    return true;
  } catch (const DivisionByZero&) {
    return false;
  }
}

std::int64_t Evaluate(const Json& expression, const Sizes& sizes) {
  if (!expression.is(Json::Kind::kString)) return expression.integer();
  try {
    return Evaluated(expression.text, sizes).integer();
  } catch (const DivisionByZero& error) {
    throw std::runtime_error("'" + expression.text + "' has no value: " + error.what());
  }
}

void CheckExpression(const Json& expression) {
  if (expression.is(Json::Kind::kString)) Holds(expression, {});
}

}  // namespace ort_trainer
