// One allocation, divided into arrays.
#pragma once
#include <cstddef>
#include <cstdint>
#ifdef FUSEDRNN_RED_ZONES
#include <sanitizer/asan_interface.h>
#endif

#include "checked.h"

namespace fusedrnn {

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
