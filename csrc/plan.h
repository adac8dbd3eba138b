// How large a call may be, how its workspace is divided, and what a GPU has.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#ifdef FUSEDRNN_RED_ZONES
#include <sanitizer/asan_interface.h>
#endif

#include "checked.h"

namespace fusedrnn {

// Philox counters and row numbers have 32 bits, some of which tell layers apart (step.h).
inline constexpr int64_t kMostRows = (int64_t(1) << 32) - 1, kMostLayers = (1 << 29) - 1;
// Of all arrays of a call that grow with the rows, and of all weights, counted together: numbers.
// So nothing that planner.h counts in bytes comes near 2^63.
inline constexpr int64_t kMostNumbers = int64_t(1) << 50;

// Products a second, in 10^12 operations (a multiply-add is two), without sparsity, of tensor cores
// where there are any for the type.
struct Tflops {
  double of_16_bits = 0, tf32 = 0, float32 = 0, float64 = 0;
};

namespace cuda {
struct PersistentKernel;
// How many blocks of a kernel its GPU runs at once; kRefused if it has refused to.
using MostBlocks = int64_t (*)(const PersistentKernel*);
constexpr int64_t kRefused = -1;
}  // namespace cuda

// What plans ask of a GPU.
struct Gpu {
  const char* name;
  int compute_capability;  // 10 major + minor
  int multiprocessors;
  int64_t shared_bytes;  // that one block may have
  Tflops tflops{};       // see tflops_of()
  // Its driver, if it is there to be asked.
  int device = 0;
  cuda::MostBlocks most_blocks = nullptr;
};
// By their data sheets (SXM where there are several; float64 of L40S and RTX 4090 by the Ada GPU
// Architecture whitepaper), and the table of compute capabilities in the CUDA C++ Programming
// Guide.
inline constexpr Gpu kKnownGpus[] = {
    {"A100", 80, 108, 163 << 10, {312, 156, 19.5, 19.5}},
    {"H100", 90, 132, 227 << 10, {989.4, 494.7, 66.9, 66.9}},
    {"H200", 90, 132, 227 << 10, {989.4, 494.7, 66.9, 66.9}},
    {"B200", 100, 148, 227 << 10, {2250, 1125, 75, 37}},
    {"L40S", 89, 142, 99 << 10, {362.05, 183, 91.6, 1.43}},
    {"RTX 4090", 89, 128, 99 << 10, {165.2, 82.6, 82.6, 1.29}},
};

// Per multiprocessor those of the known GPU that its name names, else of one of its compute
// capability; zeros if there is none.
inline Tflops tflops_of(const Gpu& gpu) {
  const Gpu* like = nullptr;
  for (const Gpu& known : kKnownGpus) {
    if (std::strstr(gpu.name, known.name) != nullptr) {
      like = &known;
      break;
    }
    if (like == nullptr && known.compute_capability == gpu.compute_capability) like = &known;
  }
  if (like == nullptr) return {};
  const double part = double(gpu.multiprocessors) / like->multiprocessors;
  const Tflops& all = like->tflops;
  return {part * all.of_16_bits, part * all.tf32, part * all.float32, part * all.float64};
}

// What a backend's own memory in the workspace follows from.
struct ScratchNeeds {
  int64_t rows;            // of a chunk
  int64_t summed_columns;  // at most, of the matrices of one call of column_sums()
  // In backward: rows of all weights, and numbers of the largest.  Also of those whose gradients
  // are not wanted: to want less never takes more.
  int64_t weight_rows, largest_weight;
};

// Divides one allocation into arrays.  With base == nullptr it only counts, so that the code that
// carves the workspace is also the code that says how large it is.
class Arena {
 public:
  explicit Arena(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  static int64_t aligned(int64_t bytes) {
    return plus(bytes, kAlignment - 1) / kAlignment * kAlignment;
  }

  template <class T>
  T* take(int64_t count) {
    const int64_t begin = size_, end = plus(begin, times(count, sizeof(T)));
    size_ = aligned(plus(end, is_together_ ? 0 : kRedZone));
    if (base_ == nullptr) return nullptr;
#ifdef FUSEDRNN_RED_ZONES
    if (!is_together_) ASAN_POISON_MEMORY_REGION(base_ + end, size_ - end);
#endif
    return reinterpret_cast<T*>(base_ + begin);
  }
  // Whether what is taken from now on is one with what is behind it, to be preset at once.
  void keep_together(bool together) { is_together_ = together; }
  int64_t size_bytes() const { return size_; }

 private:
  // What GEMMs on a GPU like best; a CPU's vectors need 64.
  static constexpr int64_t kAlignment = 256;
#ifdef FUSEDRNN_RED_ZONES  // a test's build: whoever leaves an array is caught by the sanitizer
  static constexpr int64_t kRedZone = 64;
#else
  static constexpr int64_t kRedZone = 0;
#endif
  char* base_;
  int64_t size_ = 0;
  bool is_together_ = false;
};

}  // namespace fusedrnn
