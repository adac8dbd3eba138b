// What the CPU backend asks of the workspace: types and sizes.
#pragma once
#include "../base/arena.h"
#include "../base/scalar.h"

namespace fusedrnn::cpu {

template <class Element>
struct Memory {
  using T = Element;
  using A = Acc<T>;
  // 16-bit types are widened before its GEMMs, so that they accumulate and return float.
  using O = A;
  static constexpr bool kReplays = false, kGemmRounds = false;
  static constexpr bool kPersistent = false;

  static int64_t scratch_bytes(const ScratchNeeds& /*needs*/) { return 0; }
};

}  // namespace fusedrnn::cpu
