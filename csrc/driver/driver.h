// Runs any cell through time: chunks, GEMMs, stages, weight gradients.  The driver names no cell
// and fixes no dtype; a backend supplies GEMMs, copies and the loops over rows.
//
// Forward saves only the output and, for a cell with a cell state, the states before each chunk.
// Every h_{t-1} is in the output, so backward need not repeat forward: for a chunk of steps, GEMMs
// over all its rows at once and one pass of each stage recompute the intermediates, and only
// backward_data, dh_t -> dh_{t-1}, runs step by step (and before it the cell states, without
// GEMMs). The workspace has the size of one chunk, whatever the length of the sequence.
//
// Time may run backwards.  "begin" and "t" of a chunk then still count in the order of work, while
// rows keep their order in memory; Chunk converts between the two.
//
// A backend has the types T (tensors), O (GEMM operands) and A = Acc<T>, and
//   gemm(Matrix<A> out, Matrix<const O> a, Matrix<const O> b, accumulate, is_of_input)
//       out (+)= a b; is_of_input: whether out is the gradient of the input
//   pack(Matrix<const O or T> b, A* to), gemm_packed(Matrix<A> out, Matrix<const O> a, panels,
//   accumulate)
//       if kPacks: the same with a b that is copied once to where steps read it fast
//   can_share_rows(rows), share_rows(rows, work, f)
//       if kPacks: calls f(first) for each of several shares of the rows of a batch, on different
//       threads.  What f calls for all rows, gemm_packed, copy, zero, forward, backward and what
//       program/driver.h adds, then concerns the rows of the share, from `first` on.  work: the
//       multiply-adds of all rows
//   copy(Matrix<To> out, Matrix<const From> from), which converts
//   copy_steps(Sequence<To> out, first, Sequence<const From> from, begin, steps, batch)
//   forward / backward(StageKind, step, rows), gather / clear / dropout(step, rows): see step.h
//   column_sums(ColumnSums)
//   enqueue(Recording, is_whole, repeats, first_row, steps)
//       calls steps(offset), or replays what an earlier call with `repeats` recorded, moved along
//       the sequence by the difference of first_row; is_whole: whether the chunk is a full one
//   forward_chunk(plan, PersistentForward, workspace): all steps of a chunk, if kPersistent
//   backward_data_chunk(plan, PersistentBackward, workspace): its backward_data, if kPersistent
//   kReplays: whether enqueue may replay.  kGemmRounds: whether gemm also writes a Matrix<T>
//   scratch_bytes(ScratchNeeds), use_scratch(pointers, ScratchNeeds)
//       the backend's own memory in the workspace, one part for each stream
//   expect(seq_len, batch): announces the sizes of the whole sequence
//   fork(wanted)
//       returns an object.  If `wanted`, there is a second stream until the object's join():
//       on_side_stream(f) calls f() for that stream, and sync() makes each stream wait for the work
//       that the other has been given so far, as join() does for the first stream.  Otherwise all
//       work is on one stream
#pragma once
#include "backward.h"
#include "forward.h"

namespace fusedrnn {

template <class Backend>
class Driver {
 public:
  using T = typename Backend::T;
  using A = Acc<T>;

  Driver(const Backend& backend, const Layer<T>& layer) : backend_(backend), layer_(layer) {}

  int64_t forward_workspace_bytes() const {
    Arena arena;
    typename Workspace<Backend>::Forward(layer_, arena);
    return arena.size_bytes();
  }
  int64_t backward_workspace_bytes(const Gradients<T>& gradients) const {
    Arena arena;
    typename Workspace<Backend>::Backward(layer_, gradients, arena);
    return arena.size_bytes();
  }

  // The number of multiply-adds in the recurrent GEMMs of one row in one step.
  int64_t row_work() const {
    int64_t work = 0;
    for (int s = 0; s <= layer_.last(); ++s) {
      work += layer_.columns(s) * layer_.weight[layer_.projection(s)].columns;
    }
    return work;
  }

  // See ForwardPass::run and BackwardPass::run.
  void forward(T* h_n, T* c_n, A* saved_gates, void* workspace) {
    ForwardPass<Backend>(backend_, layer_).run(h_n, c_n, saved_gates, workspace);
  }
  void backward(const Gradients<T>& gradients, const A* saved_gates, void* workspace) {
    BackwardPass<Backend>(backend_, layer_).run(gradients, saved_gates, workspace);
  }

 private:
  Backend backend_;
  Layer<T> layer_;
};

}  // namespace fusedrnn
