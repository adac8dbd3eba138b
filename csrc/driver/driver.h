// Any cell through time: chunks, GEMMs, stages, weight gradients.  No cell is named here and no
// dtype is fixed; a backend supplies GEMMs, copies and the loops over rows.
//
// Forward keeps nothing but the output, and of a cell with a cell state the states before each
// chunk.  Every h_{t-1} is in the output, so backward needs no replay: for a chunk of steps, GEMMs
// over all its rows at once and one pass of each stage recompute the intermediates, and only the
// backward_data dh_t -> dh_{t-1} runs step by step (and before it the states, without GEMMs).  The
// workspace is that of one chunk, whatever the length of the sequence.
//
// Time may run backwards.  Then "begin" and "t" of a chunk still count in the order of work, and
// rows lie as they do in memory: Chunk knows where.
//
// Backend: types T (tensors), O (GEMM operands), A = Acc<T>, and
//   gemm(Matrix<A> out, Matrix<const O> a, Matrix<const O> b, accumulate)   out (+)= a b; and then
//       whether it is the gradient of the input
//   copy(Matrix<To> out, Matrix<const From> from)                           converts
//   copy_steps(Sequence<To> out, first, Sequence<const From> from, begin, steps, batch)
//   forward / backward(StageKind, step, rows), gather / clear(step, rows): see step.h
//   column_sums(ColumnSums)
//   enqueue(Recording, is_whole, repeats, first_row, steps)   calls steps(offset), or replays what
//       an earlier call with `repeats` did, further on in the sequence by the difference of
//       first_row; is_whole: no step of a chunk is missing
//   forward_chunk(plan, PersistentForward, workspace): all steps of a chunk, if kPersistent
//   backward_data_chunk(plan, PersistentBackward, workspace): its backward_data, if kPersistent
//   kReplays: whether enqueue may do so.  kGemmRounds: whether gemm takes a Matrix<T> out as well.
//   scratch_bytes(ScratchNeeds), use_scratch(pointers, ScratchNeeds): memory of its own in the
//       workspace, for each stream
//   expect(seq_len, batch): of the whole sequence
//   split(wanted): an object.  While it lives, and if it is wanted, on_side_stream(f) calls f() for
//   a second
//       stream, and sync() makes each of the two wait for what the other has been given so far; in
//       the end the first one does.  Else there is one stream for all.
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

  // Multiply-adds of the recurrent GEMMs of a step.
  int64_t step_work() const {
    int64_t work = 0;
    for (int s = 0; s <= layer_.last(); ++s) {
      work += layer_.columns(s) * layer_.weight[layer_.projection(s)].columns;
    }
    return work * layer_.batch;
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
