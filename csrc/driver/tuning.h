// Settings of how the operators work, which change results at most by rounding.  Python packs them
// into one number when forward is called, and backward gets the same number.
#pragma once
#include <cstdint>

#include "../base/checked.h"

namespace fusedrnn {

struct Tuning {
  bool replay = false;    // record the steps of a chunk into a CUDA graph, and replay that
  bool by_flags = false;  // blocks of persistent kernels announce results by flags, not packets
  bool overlap = false;   // a second stream may work while a persistent kernel runs
  bool tf32 = false;      // products of float32 may be rounded to TF32
  int64_t free_multiprocessors = 0;  // that persistent kernels leave to other kernels

  // The bits of the number; the bits above them count free multiprocessors.
  static constexpr int64_t kReplay = 1, kByFlags = 2, kOverlap = 4, kTf32 = 8;
  static constexpr int kFreeShift = 4;

  static Tuning of(int64_t number) {
    FUSEDRNN_CHECK(number >= 0 && number >> kFreeShift < int64_t(1) << 31,
                   "tuning must have four bits and a number of multiprocessors below 2^31, got ",
                   number);
    return {(number & kReplay) != 0, (number & kByFlags) != 0, (number & kOverlap) != 0,
            (number & kTf32) != 0, number >> kFreeShift};
  }
};

}  // namespace fusedrnn
