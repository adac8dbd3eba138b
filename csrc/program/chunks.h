// The steps of a chunk, and where their rows are.
//
// If all rows take all steps, the rows of a chunk are those of the batch, step after step.  If not,
// step t has rows only up to the last one that takes it: then products over all rows of a chunk
// multiply no padding if the batch is sorted by length.
//
// Time may run backwards.  "begin" and "t" then still count in the order of work, while s, the step
// within the chunk, and the rows keep their order in memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../base/matrix.h"

namespace fusedrnn::program {

// Steps [first, first + count) of a chunk, in memory.
struct Span {
  int64_t first, count;
};

class Chunk {
 public:
  int64_t index, begin, steps;  // begin: steps done before it
  int64_t first;                // its first step in memory
  int64_t batch;
  bool is_reversed;
  bool is_full;  // whether all rows take all steps

  Chunk(int64_t index, int64_t most_steps, int64_t seq_len, int64_t batch, bool is_reversed,
        int64_t full_steps, const int64_t* rows_at)
      : index(index), begin(index * most_steps), steps(std::min(most_steps, seq_len - begin)),
        first(is_reversed ? seq_len - begin - steps : begin), batch(batch),
        is_reversed(is_reversed), is_full(first + steps <= full_steps) {
    if (is_full) return;
    starts_.push_back(0);
    for (int64_t s = 0; s < steps; ++s) starts_.push_back(starts_.back() + rows_at[first + s]);
  }

  int64_t direction() const { return is_reversed ? -1 : 1; }
  int64_t step(int64_t t) const { return is_reversed ? steps - 1 - t : t; }
  // The first row of step s, also of the step behind the last.
  int64_t row(int64_t s) const { return is_full ? s * batch : starts_[size_t(s)]; }
  int64_t rows_of(int64_t s) const { return row(s + 1) - row(s); }
  int64_t rows(const Span& span) const { return row(span.first + span.count) - row(span.first); }
  int64_t rows() const { return row(steps); }
  Span whole() const { return {0, steps}; }
  // Whether step s is the first of the whole sequence that is worked on.
  bool starts_at(int64_t s) const { return begin == 0 && s == step(0); }

 private:
  std::vector<int64_t> starts_;
};

// Rows of numbers in a chunk: of one step, the same memory for every step, or of all steps.
struct Rows {
  static constexpr int64_t kCompact = -1;

  void* data;
  int64_t stride;       // from row to row; strides count elements
  int64_t step_stride;  // from step to step, or kCompact: the rows lie as those of the chunk
  int64_t first;        // the number of steps from `data` to the first of the chunk
  bool is_storage;      // whether they are of the tensors' type, and not of the wider one
  int64_t element;      // bytes

  bool exists() const { return data != nullptr; }
  bool is_compact() const { return step_stride == kCompact; }
  void* at(const Chunk& chunk, int64_t s, int64_t column = 0) const {
    const int64_t begin = is_compact() ? chunk.row(s) * stride : (first + s) * step_stride;
    return static_cast<char*>(data) + (begin + column) * element;
  }
  // Columns of the rows of a span.  P: the type of the numbers.
  template <class P>
  Matrix<P> matrix(const Chunk& chunk, const Span& span, int64_t column, int64_t columns) const {
    return {static_cast<P*>(at(chunk, span.first, column)), chunk.rows(span), columns, stride, 1};
  }
};

}  // namespace fusedrnn::program
