// How the operators go about their work, where that changes no result but by rounding.  Python
// packs it into one number when forward is called, and backward gets the same number.
#pragma once
#include <cstdint>

#include "../base/checked.h"

namespace fusedrnn {

struct Tuning {
  bool replay = false;    // record the steps of a chunk into a CUDA graph, and replay that
  bool by_flags = false;  // persistent blocks announce results by flags instead of packets
  bool overlap = false;   // a second stream may work while a persistent kernel runs
  bool tf32 = false;      // products of float32 may be rounded to TF32
  int64_t free_multiprocessors = 0;  // that persistent kernels leave to other kernels

  // Bits of the number; what is above them counts free multiprocessors.
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
