// What the GPU backend asks of the workspace: types and sizes, without a GPU.
#pragma once
#include <type_traits>

#include "../plan.h"
#include "../scalar.h"
#include "step.h"

namespace fusedrnn::cuda {

template <class Element>
struct Memory {
  using T = Element;
  using A = Acc<T>;
  using O = T;  // GEMMs accumulate in A and give either
  static constexpr bool kReplays = true, kGemmRounds = true;
  // Whether there are kernels for whole chunks backward.
  static constexpr bool kPersistentBackward = sizeof(T) == 2;
  // Whether there are kernels for whole chunks.
  static constexpr bool kPersistent = std::is_same_v<A, float>;

  struct Scratch {
    int64_t* shift;
    char* gemm_workspace;
    A* partial_sums;
  };
  // With room for column sums over `rows` rows of up to `summed_columns` columns.
  static Scratch carve(Arena& arena, int64_t rows, int64_t summed_columns) {
    const int64_t slabs = (rows + kSumRows - 1) / kSumRows;
    return {arena.take<int64_t>(1), arena.take<char>(kGemmWorkspaceBytes),
            arena.take<A>(slabs * summed_columns)};
  }
  static int64_t scratch_bytes(int64_t rows, int64_t summed_columns) {
    Arena arena;
    carve(arena, rows, summed_columns);
    return arena.size_bytes();
  }
};

}  // namespace fusedrnn::cuda
