// The arrays of a chunk for phases.h, with random numbers.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "../csrc/persistent/arguments.h"

namespace fusedrnn::phases {

using namespace cuda;
using Element = BFloat16;

struct Call {
  const char* cell;
  int64_t steps, batch, hidden;
  int launches;  // that count; one more is before them

  int64_t rows() const { return steps * batch; }
  Sizes sizes() const { return {hidden, hidden, hidden, hidden}; }
};

// Arrays in a device's memory, with random numbers of at most `most`.
template <class Device>
class Arrays {
 public:
  Arrays(Device& device, const Call& call) : device_(device), call_(call) {}

  template <class N>
  N* random(int64_t count, float most = 1) {
    std::vector<N> numbers(count);
    for (N& x : numbers) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      x = narrow<N>(most * float(int32_t(state_ >> 32)) * 0x1p-31f);
    }
    auto* const memory = static_cast<N*>(device_.allocate(sizeof(N) * numbers.size()));
    device_.write(memory, numbers.data(), sizeof(N) * numbers.size());
    return memory;
  }
  // As random(), and the launches change them: they count as results.
  template <class N>
  N* result(int64_t count) {
    N* const memory = random<N>(count);
    results_.push_back({memory, std::vector<char>(sizeof(N) * size_t(count))});
    device_.read(results_.back().first.data(), memory, results_.back().first.size());
    return memory;
  }
  // As before the first launch.
  void restore_results() {
    for (const auto& [memory, first] : results_) device_.write(memory, first.data(), first.size());
  }
  // Floats that a product writes before each launch.
  float* product(int64_t count) {
    products_.push_back({random<float>(count), count});
    return products_.back().memory;
  }
  // The weight and what forward and backward have in common, in stage s.
  template <class Args>
  void fill(const Cell& cell, int s, Args& args) {
    const Projection& projection = cell.projections[cell.stages[s].projection];
    const int64_t columns = projection.blocks * call_.hidden;
    const float most = 1 / std::sqrt(float(call_.hidden));
    auto& step = args.step[s];
    step.width = call_.hidden;
    step.is_last = s == cell.num_stages - 1;
    step.mask = {nullptr, nullptr, call_.steps, call_.batch, 1};
    step.input_bias = random<float>(4 * call_.hidden, most);
    step.hidden_bias = random<float>(columns, most);
    args.weight[s] = Matrix<const Element>::contiguous(
        random<Element>(columns * call_.hidden, most), columns, call_.hidden);
    args.steps = int(call_.steps);
    args.batch = args.row_step = int(call_.batch);
  }

  void rewrite_products() {
    for (const auto& [memory, count] : products_) device_.rewrite(memory, count);
  }
  // A number that depends on every bit of the results.
  uint64_t hash() {
    uint64_t hash = 0;
    for (const auto& [memory, first] : results_) {
      std::vector<uint32_t> words(first.size() / sizeof(uint32_t));
      device_.read(words.data(), memory, words.size() * sizeof(uint32_t));
      for (const uint32_t word : words) hash = hash * 31 + word;
    }
    return hash;
  }

 private:
  struct Result {
    void* memory;
    std::vector<char> first;  // its bytes before the first launch
  };
  struct Product {
    float* memory;
    int64_t count;
  };
  Device& device_;
  const Call& call_;
  uint64_t state_ = 7;
  std::vector<Result> results_;
  std::vector<Product> products_;
};

}  // namespace fusedrnn::phases
