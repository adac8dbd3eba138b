// What a layer is to do, and in which way it is done: what plans are made from, and are.
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

// What all of that follows from.
struct Problem {
  Cell cell{};
  Sizes sizes{};
  bool bias = true;
  int64_t seq_len = 1, batch = 1;
  int64_t chunk_size = 0;       // steps, and
  int64_t workspace_bytes = 0;  // the most that a pass may take: as the caller wants it, or 0
  int64_t chunks = 0;           // as many as forward has saved states, or 0
  std::string backend;          // of kBackends
  cuda::Exchange exchange{};
  bool overlap = false;              // whether there may be a second stream
  int64_t free_multiprocessors = 0;  // that persistent kernels leave to others
  const Gpu* gpu = nullptr;          // null for the CPU
  bool tf32 = false;                 // whether products of float32 may be rounded to TF32, now
  // Why the GPU's driver does not run the persistent kernel of a Pass, a sentence, or empty.
  std::array<std::string, 2> refusal;
  // Whether a GEMM can read a weight where it lies, in each direction.
  std::array<bool, kMaxProjections> is_operand = {true, true, true};

  void see_weight(const Parameter& p, int64_t row_stride, int64_t column_stride) {
    const Matrix<const char> weight{nullptr, p.rows, p.columns, row_stride, column_stride};
    is_operand[p.projection] = is_operand[p.projection] && weight.is_operand();
  }
};

inline void check_rows(int64_t seq_len, int64_t batch) {
  FUSEDRNN_CHECK(seq_len >= 0 && batch >= 0 &&
                     times(std::max<int64_t>(seq_len, 1), std::max<int64_t>(batch, 1)) <= kMostRows,
                 "seq_len * batch must be below 2^32, got ", seq_len, " and ", batch);
}

// Whether a problem has a size: whatever is counted below then stays far from the end of int64.
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

// Of a pass.
struct PassPlan {
  bool is_persistent = false;
  cuda::PersistentPlan persistent;  // also of the way that is not gone
  bool is_refused = false;          // by the driver of the GPU: it would be persistent
  bool overlaps = false;  // if there are several chunks, a second stream works beside the kernel
};

// Of both.
struct Plan {
  int64_t steps = 1;  // of a chunk
  PassPlan forward, backward;
  bool lacks_room = false;     // for persistent kernels
  const char* why_steps = "";  // a sentence
};

}  // namespace fusedrnn
