#include "random.h"

#include <algorithm>
#include <cmath>

namespace ort_trainer {
namespace {

constexpr std::size_t kShift = 397;
constexpr std::size_t kBlock = 1 << 16;  // words that one stream of a mask draws
constexpr int kLevels = 1 << 16;

// The hash of NumPy's SeedSequence: its constant changes with every value.
class Hash {
 public:
  Hash(std::uint32_t constant, std::uint32_t factor) : constant_(constant), factor_(factor) {}

  std::uint32_t operator()(std::uint32_t value) {
    value ^= constant_;
    constant_ *= factor_;
    value *= constant_;
    return value ^ (value >> 16);
  }

 private:
  std::uint32_t constant_, factor_;
};

std::uint32_t Mixed(std::uint32_t some, std::uint32_t other) {
  const std::uint32_t mixed = 0xCA01F9DDu * some - 0x4973F715u * other;
  return mixed ^ (mixed >> 16);
}

// Returns what SeedSequence(entropy).generate_state(3, uint64) returns.
std::array<std::uint64_t, 3> Seeds(const std::vector<std::uint32_t>& entropy) {
  Hash hash(0x43B0D7E5u, 0x931E8875u), drawn(0x8B51F9DDu, 0x58F38DEDu);
  std::array<std::uint32_t, 4> pool;
  for (std::size_t i = 0; i < pool.size(); ++i) pool[i] = hash(i < entropy.size() ? entropy[i] : 0);
  for (std::size_t from = 0; from < std::max(pool.size(), entropy.size()); ++from) {
    for (std::size_t to = 0; to < pool.size(); ++to) {
      if (from != to) pool[to] = Mixed(pool[to], hash(from < pool.size() ? pool[from] : entropy[from]));
    }
  }
  std::array<std::uint64_t, 3> seeds;
  for (std::size_t i = 0; i < seeds.size(); ++i) {
    const std::uint64_t low = drawn(pool[2 * i % 4]);
    seeds[i] = low | std::uint64_t{drawn(pool[(2 * i + 1) % 4])} << 32;
  }
  return seeds;
}

// Fills an array with the numbers of SFC64(SeedSequence(entropy)).
void Fill(std::uint64_t* out, std::size_t count, const std::vector<std::uint32_t>& entropy) {
  auto [a, b, c] = Seeds(entropy);
  std::uint64_t counter = 1;
  const auto next = [&] {
    const std::uint64_t sum = a + b + counter++;
    a = b ^ (b >> 11);
    b = c + (c << 3);
    c = (c << 24 | c >> 40) + sum;
    return sum;
  };
  for (int i = 0; i < 12; ++i) next();
  std::generate_n(out, count, next);
}

}  // namespace

MersenneTwister MersenneTwister::Seeded(std::uint32_t seed) {
  State state;
  state[0] = seed;
  for (std::uint32_t i = 1; i < kWords; ++i) state[i] = 1812433253u * (state[i - 1] ^ (state[i - 1] >> 30)) + i;
  state[kWords] = kWords;
  return MersenneTwister(state);
}

std::uint32_t MersenneTwister::Next() {
  if (state_[kWords] >= kWords) Refill();
  std::uint32_t word = state_[state_[kWords]++];
  word ^= word >> 11;
  word ^= (word << 7) & 0x9D2C5680u;
  word ^= (word << 15) & 0xEFC60000u;
  return word ^ (word >> 18);
}

void MersenneTwister::Refill() {
  for (std::size_t i = 0; i < kWords; ++i) {
    const std::uint32_t mixed = (state_[i] & 0x80000000u) | (state_[(i + 1) % kWords] & 0x7FFFFFFFu);
    state_[i] = state_[(i + kShift) % kWords] ^ (mixed >> 1) ^ (mixed & 1 ? 0x9908B0DFu : 0);
  }
  state_[kWords] = 0;
}

std::uint64_t MersenneTwister::Key() {
  const std::uint64_t high = Next() & 0x3FFFFFFFu;
  return high << 32 | Next();
}

std::vector<std::uint8_t> DrawMask(std::uint64_t key, std::size_t count, std::uint32_t number, double kept) {
  const std::size_t words = (count + 3) / 4;
  std::vector<std::uint8_t> mask(4 * words);
  const auto lowest = static_cast<int>(std::nearbyint((1.0 - kept) * kLevels)) - kLevels / 2;
  if (lowest < kLevels / 2) {  // otherwise it is above every 16-bit number
    std::vector<std::uint64_t> raw(words);
    for (std::size_t block = 0; block < words; block += kBlock) {
      std::vector<std::uint32_t> entropy{static_cast<std::uint32_t>(key)};
      if (key >> 32) entropy.push_back(static_cast<std::uint32_t>(key >> 32));  // NumPy leaves out an upper word of 0
      entropy.insert(entropy.end(), {number, static_cast<std::uint32_t>(block)});
      Fill(raw.data() + block, std::min(words - block, kBlock), entropy);
    }
    // Halves of words: those of the first half of the array are the first and the third quarter of the mask.
    const auto level = [&](std::size_t place) { return static_cast<std::int16_t>(raw[place / 4] >> (place % 4 * 16)); };
    for (std::size_t word = 0; word < words; ++word) {
      mask[word] = level(2 * word) >= lowest;
      mask[words + word] = level(2 * (words + word)) >= lowest;
      mask[2 * words + word] = level(2 * word + 1) >= lowest;
      mask[3 * words + word] = level(2 * (words + word) + 1) >= lowest;
    }
  }
  mask.resize(count);
  return mask;
}

}  // namespace ort_trainer
