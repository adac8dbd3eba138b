// The CPU backend's types and its part of the workspace.
#pragma once
#include "../base/arena.h"
#include "../base/scalar.h"
#include "step.h"

namespace fusedrnn::cpu {

template <class Element>
struct Memory {
  using T = Element;
  using A = Acc<T>;
  // 16-bit types are widened before GEMMs, which accumulate and return float.
  using O = A;
  static constexpr bool kReplays = false, kGemmRounds = false;
  static constexpr bool kPersistent = false;
  // Whether weights that steps multiply are packed; see cpu/step.h.
  static constexpr bool kPacks = true;

  static int64_t scratch_bytes(const ScratchNeeds& /*needs*/) { return 0; }
};

}  // namespace fusedrnn::cpu
