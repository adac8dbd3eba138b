// The driver's data: a program with its tensors, and their gradients.  Pointers and sizes only;
// nothing here allocates memory for numbers, or computes.
#pragma once
#include <cstdint>
#include <vector>

#include "../base/matrix.h"
#include "../base/scalar.h"
#include "../step/step.h"
#include "carries.h"
#include "chunks.h"
#include "flow.h"
#include "program.h"

namespace fusedrnn::program {

// One call, as forward and backward both see it.  Lists have an entry for each part of the program;
// entries of the output are contiguous.
template <class T>
struct Call {
  using A = Acc<T>;

  const Program* program;
  const Flow* flow;
  Stages stages;
  int64_t seq_len, batch, chunk;  // chunk: steps of a chunk
  std::vector<Sequence<const T>> inputs;
  std::vector<const T*> carries;           // (batch, width), the initial ones
  std::vector<Matrix<const T>> weights;    // (terms, columns)
  std::vector<Matrix<const T>> vectors;    // (1, width)
  std::vector<ResetTo<const T>> reset_to;  // of each carry
  const int64_t* seed;                     // one element, or null
  int64_t stream;                          // added to the program's streams
  int64_t first_step;  // where this sequence starts, if it is a part of a longer one
  Mask mask;
  const int64_t* rows_at;     // [seq_len]: rows from this one on are finished in each step; or null
  int64_t full_steps;         // the number of steps from the first that all rows take
  std::vector<bool> ends_at;  // whether a row takes its last step there; empty without lengths
  // Forward writes them, and backward reads them.
  std::vector<T*> sequences;  // (seq_len, batch, width)
  std::vector<A*> kept;       // (chunks, batch, width), before each chunk; null if not wanted
  std::vector<A*> saved;      // (seq_len, batch, columns), the arrays; or an empty list

  int64_t chunks() const { return (seq_len + chunk - 1) / chunk; }
  bool has_lengths() const { return rows_at != nullptr; }
  bool is_saved() const { return !saved.empty(); }
  Chunk chunk_at(int64_t index) const {
    return {index, chunk, seq_len, batch, mask.direction < 0, full_steps, rows_at};
  }
  bool is_finished(const Chunk& c) const { return has_lengths() && rows_at[c.first] == 0; }
};

// The gradients of results, and those of arguments.  Each is wanted if it is not null.
template <class T>
struct Gradients {
  using A = Acc<T>;

  std::vector<Sequence<const T>> sequences;  // data may be null
  std::vector<const T*> last;                // (batch, width), or null
  std::vector<T*> inputs;                    // (seq_len, batch, width)
  std::vector<T*> carries;                   // (batch, width)
  std::vector<Matrix<A>> weights;            // (terms, columns), or the same transposed
  std::vector<A*> vectors;                   // (width)
  std::vector<A*> reset_rows;                // (batch, width)
  std::vector<T*> reset_steps;               // (seq_len, batch, width)
};

}  // namespace fusedrnn::program
