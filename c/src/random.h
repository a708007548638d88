// The random numbers of a training step, those of Python: PyTorch's Mersenne Twister, and NumPy's SFC64 for masks.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace ort_trainer {

class MersenneTwister {
 public:
  static constexpr std::size_t kWords = 624;
  using State = std::array<std::uint32_t, kWords + 1>;  // the words, and the position

  explicit MersenneTwister(const State& state) : state_(state) {}
  // The state after torch.manual_seed(seed).
  static MersenneTwister Seeded(std::uint32_t seed);

  const State& state() const { return state_; }
  std::uint32_t Next();
  // Returns the key of a step's masks: torch.randint(2**62, ()).
  std::uint64_t Key();

 private:
  void Refill();

  State state_;
};

// Returns a mask: 1 for an element that is kept, which it is with the probability `kept`, otherwise 0.
std::vector<std::uint8_t> DrawMask(std::uint64_t key, std::size_t count, std::uint32_t number, double kept);

}  // namespace ort_trainer
