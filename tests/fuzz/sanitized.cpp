// A write beyond an array of a workspace, to check that it is caught.
#include "../../csrc/base/arena.h"
#include "../../csrc/base/checked.h"
#include "../../csrc/ops/stable.h"

namespace {

// Writes element `count` of an array of `count` numbers that is between two other arrays.
void write_behind(torch::stable::Tensor memory, int64_t count) {
  fusedrnn::Arena arena(memory.mutable_data_ptr());
  arena.take<double>(count);
  double* volatile middle = arena.take<double>(count);
  arena.take<double>(count);
  FUSEDRNN_CHECK(arena.size_bytes() <= memory.numel(), "too little memory");
  middle[count] = 1;
}

}  // namespace

STABLE_TORCH_LIBRARY(fusedrnn_overrun, m) { m.def("write_behind(Tensor memory, int count) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(fusedrnn_overrun, CPU, m) {
  m.impl("write_behind", TORCH_BOX(&write_behind));
}
