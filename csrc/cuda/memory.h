// The GPU backend's types and its part of the workspace, for code that runs without a GPU.
#pragma once
#include <algorithm>
#include <type_traits>

#include "../base/arena.h"
#include "../base/scalar.h"
#include "launches.h"

namespace fusedrnn::cuda {

template <class Element>
struct Memory {
  using T = Element;
  using A = Acc<T>;
  using O = T;  // GEMMs accumulate in A and write either T or A
  static constexpr bool kReplays = true, kGemmRounds = true, kPacks = false;
  // Whether there are kernels for whole chunks, in each pass.
  static constexpr bool kPersistent = std::is_same_v<A, float>;

  struct Scratch {
    int64_t* replay_offset;
    char* gemm_workspace;
    int64_t gemm_workspace_bytes;
    A* partial_sums;
  };
  static Scratch carve(Arena& arena, const ScratchNeeds& needs) {
    const int64_t slabs = (needs.rows + kSumRows - 1) / kSumRows;
    const int64_t gemm_bytes = gemm_workspace_bytes(needs);
    return {arena.take<int64_t>(1), arena.take<char>(gemm_bytes), gemm_bytes,
            arena.take<A>(slabs * needs.summed_columns)};
  }
  static int64_t scratch_bytes(const ScratchNeeds& needs) {
    Arena arena;
    carve(arena, needs);
    return arena.size_bytes();
  }

  // The workspace of a GEMM.  The gradient of a weight has few tiles and a long sum, over the rows
  // of a chunk: to fill a GPU, cuBLASLt splits the sum and adds up the partial results, which it
  // stores here.  There is room for parts of some hundred rows, up to the most that cuBLASLt asks
  // for on its largest GPUs, but only a small share of the chunk itself.  A power of two, because
  // the choice of an algorithm depends on the size.
  static int64_t gemm_workspace_bytes(const ScratchNeeds& needs) {
    constexpr int64_t kLeast = 2 << 20, kMost = 32 << 20, kRowsOfPart = 256, kShare = 8;
    const int64_t part = std::max<int64_t>(needs.largest_weight, 1) * int64_t(sizeof(A));
    const int64_t parts = std::min(needs.rows / kRowsOfPart, kMost / part);
    const int64_t chunk = times(times(needs.rows, needs.weight_rows), sizeof(A));
    const int64_t wanted = std::min(parts * part, chunk / kShare);
    int64_t bytes = kLeast;
    while (2 * bytes <= wanted) bytes *= 2;
    return bytes;
  }
};

}  // namespace fusedrnn::cuda
