// The persistent kernel of forward for one cell.  Each cell has its own source in instantiations/,
// because these kernels take long to compile.
#pragma once
#include "../persistent/forward.h"
#include "cooperative.h"

namespace fusedrnn::cuda {

template <class T, int kDepth, class... Stages>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    run_persistent(const __grid_constant__ PersistentForward<T> args) {
  persistent_forward<T, kDepth>(StageList<Stages...>{}, args, shared_memory());
}

template <class T, class... Stages>
Kernel<PersistentForward<T>> forward_kernel(StageList<Stages...>, int depth) {
  switch (depth) {
    case 1: return run_persistent<T, 1, Stages...>;
    case 2: return run_persistent<T, 2, Stages...>;
    case 4: return run_persistent<T, 4, Stages...>;
  }
  return nullptr;
}

// Instantiates the kernels of a cell of persistent/cells.h, in every dtype.
#define FUSEDRNN_FORWARD_KERNELS(cell)                                                     \
  namespace fusedrnn::cuda {                                                               \
  template Kernel<PersistentForward<BFloat16>> forward_kernel<BFloat16>(cells::cell, int); \
  template Kernel<PersistentForward<Half>> forward_kernel<Half>(cells::cell, int);         \
  template Kernel<PersistentForward<float>> forward_kernel<float>(cells::cell, int);       \
  }

}  // namespace fusedrnn::cuda
