// What persistent.cpp and persistent_backward.cpp share: one chunk of several blocks and tiles, and
// a number that depends on every bit of its results. For the thread sanitizer.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

// The number of the seeded bug that is on, in a copy of the headers with bugs: see seeded_bugs.py.
namespace {
int64_t seeded_bug = 0;
}
#include "../../csrc/persistent/backward.h"
#include "../../csrc/persistent/backward_plan.h"
#include "../../csrc/persistent/forward.h"
#include "../../csrc/persistent/plan.h"

#ifndef FUSEDRNN_ELEMENT
#define FUSEDRNN_ELEMENT BFloat16
#endif
namespace fusedrnn {
namespace {

using namespace cuda;

using Element = FUSEDRNN_ELEMENT;  // of the tensors
constexpr int64_t kSteps = 5, kBatch = 27, kRows = kSteps * kBatch;
constexpr uint32_t kSpins = 3000;
constexpr Gpu kGpu{"", 90, 8, int64_t(100) << 10};

float random_number() {  // in [-1, 1)
  static uint64_t state = 7;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return float(int32_t(state >> 32)) * 0x1p-31f;
}
std::vector<float> random_floats(int64_t count) {
  std::vector<float> numbers(count);
  for (float& x : numbers) x = random_number();
  return numbers;
}
std::vector<Element> random_tensor(int64_t count) {
  std::vector<Element> numbers(count);
  for (auto& x : numbers) x = narrow<Element>(random_number());
  return numbers;
}

// One row ends early, and another one starts anew. direction: of time in memory.
Mask mask_of(int64_t direction) {
  static std::vector<int64_t> lengths(kBatch, kSteps);
  static bool reset[kRows];
  lengths[2] = 3;
  reset[kBatch + 4] = true;
  return {lengths.data(), reset, kSteps, kBatch, int(direction)};
}

struct RunOptions {
  int64_t exchange, schedule, bug;
};

// Runs kernel(stages, depth); returns what went wrong, or "".
template <class Kernel>
std::string launch(const PersistentPlan& plan, const RunOptions& options, const Kernel& kernel) {
  seeded_bug = options.bug;
  std::string failure = "there is no such kernel";
  dispatch_stages(plan, [&](auto stages) {
    const auto run = [&](auto depth) {
      failure = emulated::launch(plan.grid(), kPersistentThreads, size_t(plan.shared_bytes),
                                 uint64_t(options.schedule), [&] { kernel(stages, depth); });
    };
    if (plan.depth == 1) run(std::integral_constant<int, 1>{});
  });
  return failure;
}

// Prints what went wrong, or a number for all results; returns the program's exit status.
template <class... Results>
int report(const std::string& failure, const Results&... results) {
  if (!failure.empty()) {
    printf("%s\n", failure.c_str());
    return 1;
  }
  uint64_t hash = 0;
  [[maybe_unused]] const auto add = [&](const auto& numbers) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(numbers.data());
    for (size_t i = 0; i < numbers.size() * sizeof numbers[0]; ++i) hash = hash * 31 + bytes[i];
  };
  (add(results), ...);
  printf("%016llx\n", static_cast<unsigned long long>(hash));
  return 0;
}

}  // namespace
}  // namespace fusedrnn
