// Runs any program through time: chunks, products, stages, and the gradients of everything.  The
// driver knows no cell; a backend supplies GEMMs, copies and the loops over rows, and the library
// of the program its stages.
//
// What forward keeps is what the program says: sequences, which are outputs or carries that
// products read, and the other carries before each chunk.  Backward makes all else again: for the
// steps of a chunk, products and stages over all rows at once, then step by step only the stages
// that depend on a carry that is not in a sequence, and these need no products.  Then the gradients
// of states run step by step.  The workspace has the size of one chunk, whatever the length of the
// sequence.
//
// Numbers in a sequence are rounded to the type of tensors, also where the step itself reads them,
// and so are operands of products.  All else is in the wider type.  So backward makes the same
// numbers as forward.
//
// A backend has the types T (tensors), O (GEMM operands) and A = Acc<T>, and of what
// driver/driver.h describes gemm, copy, copy_steps, zero, clear, column_sums, scratch_bytes,
// use_scratch and expect; zero also for matrices of T and O.  And
//   stage(Stages, index, is_backward, StageArgs, rows): see stage.h
//   carry_before(CarryBefore, rows), carry_last(CarryLast, rows),
//   carry_gradient(CarryGradient, rows), carry_part(CarryPart, rows): see carries.h
#pragma once
#include "backward.h"
#include "forward.h"

namespace fusedrnn::program {

template <class Backend>
int64_t forward_workspace_bytes(const Call<typename Backend::T>& call) {
  Arena arena;
  typename Workspace<Backend>::Forward(call, arena);
  return arena.size_bytes();
}
template <class Backend>
int64_t backward_workspace_bytes(const Call<typename Backend::T>& call,
                                 const Gradients<typename Backend::T>& gradients) {
  Arena arena;
  typename Workspace<Backend>::Backward(call, gradients, arena);
  return arena.size_bytes();
}

// The number of multiply-adds in the products of one row in one step.
inline int64_t row_work(const Program& program) {
  int64_t work = 0;
  for (const Product& product : program.products) {
    work = plus(work, times(product.terms, product.columns));
  }
  return work;
}

}  // namespace fusedrnn::program
