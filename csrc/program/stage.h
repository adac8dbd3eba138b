// The arguments of a generated stage: the whole interface between the driver and a library that was
// printed from a step in Python and compiled at its first use.  Plain data, free of torch, because
// the library compiles nothing of torch.  A change here must change kAbi.
#pragma once
#include <cstdint>

namespace fusedrnn::program {

constexpr int64_t kAbi = 1;
constexpr int kMostIns = 32, kMostOuts = 16;

// What a stage reads in column c of a row.  A library knows this of each of its inputs when it is
// compiled (Stage::kIn).
enum class In : int64_t {
  Column,   // number c
  Group,    // number c / group, one for each group of columns
  Normal,   // a standard normal number, drawn from the seed
  Uniform,  // a number strictly between 0 and 1, drawn from the seed
  Index     // c % group, the place of the column in its group
};
// What becomes of a result (Stage::kOut).  All but Column make one number of each group of columns:
// the sum; the largest number; the place in the group of the first of the largest numbers.  The
// last two have no derivative.
enum class Out : int64_t { Column, Sum, Max, ArgMax };

// T: storage type of the user's tensors.  A = Acc<T>.
struct StageIn {
  const void* data;  // row 0, its first column; null if drawn, or for an index
  const void* bias;  // of A, one number per column, added to what is read; or null
  void* gradient;    // row 0; null if it is not wanted
  int64_t stride;    // from row to row; 0 for the same numbers in all rows
  int64_t gradient_stride;
  int64_t offset;   // of numbers that are drawn: the first column
  int32_t group;    // columns of a group; 0 without groups
  uint32_t stream;  // of numbers that are drawn: the Philox counter's last word
  bool is_storage;  // whether `data` is of T and not of A
  bool gradient_is_storage;
  bool adds;  // whether the gradient is added to what is there
};

struct StageOut {
  void* data;  // row 0; null if it is not wanted
  int64_t stride;
  int32_t group;  // columns of a group; 0 for Out::Column
  bool is_storage;
  bool rounds;  // whether numbers of A are rounded to T, as the operand of a product
  // The gradient is the sum of these; each may be null.
  const void* gradient[3];
  int64_t gradient_stride[3];
  bool gradient_is_storage[3];
};

struct StageArgs {
  int64_t width;  // columns of the stage
  // Row r is entry r % batch of the batch in step first_t + r / batch.
  int64_t first_t, batch;
  int64_t first_step;      // where the sequence starts, if it is a part of a longer one; for draws
  const int64_t* seed;     // one element; null if nothing is drawn
  const int64_t* lengths;  // [batch]: a row takes step t if t < lengths[b]; null if all rows do.
                           // Other rows get zeros for results, and zeros for gradients, or none
                           // where gradients are added
  StageIn in[kMostIns];
  StageOut out[kMostOuts];
};

// Does stage number `stage` for the rows [first, last).  backward: from the gradients of results to
// those of inputs.
using StageFunction = void (*)(int64_t stage, int64_t backward, const StageArgs*, int64_t first,
                               int64_t last);
// The same on a GPU, for all rows of a call: enqueues the work on a stream (a cudaStream_t), and
// returns a cudaError_t.
using StageLaunch = int64_t (*)(int64_t stage, int64_t backward, const StageArgs*, int64_t rows,
                                void* stream);

// The function of a library: one of them, the other is null.
struct Stages {
  StageFunction run;
  StageLaunch launch;

  bool is_for_gpu() const { return launch != nullptr; }
};

}  // namespace fusedrnn::program
