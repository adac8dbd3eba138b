// The persistent kernel of backward for one cell.  Each cell has its own source in instantiations/,
// because these kernels take long to compile.
#pragma once
#include "../persistent/backward.h"
#include "cooperative.h"

namespace fusedrnn::cuda {

template <class T, int kDepth, class... Stages>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    run_persistent_backward(const __grid_constant__ PersistentBackward<T> args) {
  persistent_backward<T, kDepth>(StageList<Stages...>{}, args, shared_memory());
}

template <class T, class... Stages>
Kernel<PersistentBackward<T>> backward_kernel(StageList<Stages...>, int depth) {
  switch (depth) {
    case 1: return run_persistent_backward<T, 1, Stages...>;
    case 2: return run_persistent_backward<T, 2, Stages...>;
    case 4: return run_persistent_backward<T, 4, Stages...>;
  }
  return nullptr;
}

// Instantiates the kernels of a cell of persistent/cells.h, in every dtype.
#define FUSEDRNN_BACKWARD_KERNELS(cell)                                                      \
  namespace fusedrnn::cuda {                                                                 \
  template Kernel<PersistentBackward<BFloat16>> backward_kernel<BFloat16>(cells::cell, int); \
  template Kernel<PersistentBackward<Half>> backward_kernel<Half>(cells::cell, int);         \
  template Kernel<PersistentBackward<float>> backward_kernel<float>(cells::cell, int);       \
  }

}  // namespace fusedrnn::cuda
