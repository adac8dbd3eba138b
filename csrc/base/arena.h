// One allocation, divided into arrays.
#pragma once
#include <cstddef>
#include <cstdint>
#ifdef FUSEDRNN_RED_ZONES
#include <sanitizer/asan_interface.h>
#endif

#include "checked.h"

namespace fusedrnn {

// The sizes that a backend's own part of the workspace depends on.
struct ScratchNeeds {
  int64_t rows;            // of a chunk
  int64_t summed_columns;  // the most in the matrices of one call of column_sums()
  // In backward: the rows of all weights together, and the elements of the largest one.  Weights
  // whose gradients are not wanted count too, so that a call that wants fewer gradients never takes
  // more memory.
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
    // The same memory may have been divided in another way before.
    ASAN_UNPOISON_MEMORY_REGION(base_ + begin, end - begin);
    if (!is_together_) ASAN_POISON_MEMORY_REGION(base_ + end, size_ - end);
#endif
    return reinterpret_cast<T*>(base_ + begin);
  }
  // Arrays that are taken from now on lie one right after the other (true), so that one call can
  // preset them all, or apart (false).
  void keep_together(bool together) { is_together_ = together; }
  int64_t size_bytes() const { return size_; }

 private:
  // GEMMs on a GPU are fastest at this alignment; the vectors of a CPU need 64 bytes.
  static constexpr int64_t kAlignment = 256;
#ifdef FUSEDRNN_RED_ZONES  // only in tests: the sanitizer reports accesses beyond the end of an
                           // array
  static constexpr int64_t kRedZone = 64;
#else
  static constexpr int64_t kRedZone = 0;
#endif
  char* base_;
  int64_t size_ = 0;
  bool is_together_ = false;
};

}  // namespace fusedrnn
