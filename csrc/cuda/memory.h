// What the GPU backend asks of the workspace: types and sizes, without a GPU.
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
  using O = T;  // GEMMs accumulate in A and give either
  static constexpr bool kReplays = true, kGemmRounds = true;
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

  // What a GEMM may use.  The gradient of a weight has few tiles and a long sum, over the rows of a
  // chunk: to fill a GPU, cuBLASLt splits it and adds up what the parts give, which stands here.
  // For parts of some hundred rows, up to what it asks for on its largest GPUs, but little beside
  // the chunk itself.  A power of two, because algorithms are chosen for a size of it.
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
