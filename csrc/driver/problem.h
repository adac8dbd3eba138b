// The inputs of planning (Problem) and its results (Plan).
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "../base/checked.h"
#include "../base/gpus.h"
#include "../base/limits.h"
#include "../base/matrix.h"
#include "../cell/layout.h"
#include "../persistent/arguments.h"

namespace fusedrnn {

inline constexpr const char* kBackends[] = {"auto", "stepwise", "persistent"};

enum class Pass { Forward, Backward };

// Everything that a plan depends on.
struct Problem {
  Cell cell{};
  Sizes sizes{};
  bool bias = true;
  int64_t seq_len = 1, batch = 1;
  int64_t chunk_size = 0;       // steps that the caller asks for, or 0
  int64_t workspace_bytes = 0;  // the caller's limit for each pass, or 0
  int64_t chunks = 0;           // as many as forward has saved cell states for, or 0
  std::string backend;          // one of kBackends
  cuda::Exchange exchange{};
  bool overlap = false;              // whether a second stream may be used
  int64_t free_multiprocessors = 0;  // that persistent kernels leave to others
  const Gpu* gpu = nullptr;          // null for the CPU
  bool tf32 = false;                 // whether products of float32 may be rounded to TF32
  // Why the GPU's driver does not run the persistent kernel of each Pass, a sentence; or empty.
  std::array<std::string, 2> refusal;
  // Whether a GEMM can read each weight in the user's memory, in both directions.
  std::array<bool, kMaxProjections> is_operand = {true, true, true};

  void see_weight(const Parameter& p, int64_t row_stride, int64_t column_stride) {
    const auto weight =
        Matrix<const char>::strided(nullptr, p.rows, p.columns, row_stride, column_stride);
    is_operand[p.projection] = is_operand[p.projection] && weight.is_operand();
  }
};

inline void check_rows(int64_t seq_len, int64_t batch) {
  FUSEDRNN_CHECK(seq_len >= 0 && batch >= 0 &&
                     times(std::max<int64_t>(seq_len, 1), std::max<int64_t>(batch, 1)) <= kMostRows,
                 "seq_len * batch must be below 2^32, got ", seq_len, " and ", batch);
}

// Checks that all sizes are positive and small enough for byte counts to stay far below 2^63.
inline void check_sizes(const Cell& cell, const Sizes& sizes, int64_t seq_len, int64_t batch) {
  check_rows(seq_len, batch);
  int64_t features = 0;
  for (int p = 0; p < cell.num_projections; ++p) {
    for (const Width width : {cell.projections[p].from, cell.projections[p].to}) {
      FUSEDRNN_CHECK(sizes[width] > 0, "a layer must have features, got sizes of ", sizes.input,
                     " (input), ", sizes.hidden, " (hidden), ", sizes.output, " (output)");
      features = plus(features, sizes[width]);
    }
  }
  const int64_t rows =
      plus(times(std::max<int64_t>(seq_len, 1), std::max<int64_t>(batch, 1)), features);
  FUSEDRNN_CHECK(times(rows, features) <= kMostNumbers,
                 "sizes are too large: a layer may have 2^50 numbers, got ", seq_len, " steps of ",
                 batch, " rows, and sizes of ", sizes.input, " (input), ", sizes.hidden,
                 " (hidden), ", sizes.output, " (output)");
}

// The plan of one pass.
struct PassPlan {
  bool is_persistent = false;
  cuda::PersistentPlan persistent;  // set even if the pass is stepwise, for why_not
  bool is_refused = false;  // whether only the GPU's driver keeps the pass from being persistent
  bool overlaps =
      false;  // whether a second stream works during the kernel, if there are several chunks
};

// The plan of a layer.
struct Plan {
  int64_t steps = 1;  // of each chunk
  PassPlan forward, backward;
  bool lacks_room = false;     // whether workspace_bytes is too small for persistent kernels
  const char* why_steps = "";  // why chunks have that length, a sentence
};

}  // namespace fusedrnn
