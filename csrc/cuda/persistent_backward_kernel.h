// The kernel of the adjoint chain for one list of stages, in every dtype: a source for each
// list, as forward.
#pragma once
#include "cooperative.h"
#include "persistent_backward.h"

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

#define FUSEDRNN_PERSISTENT_BACKWARD_STAGES(...)                                                  \
  template Kernel<PersistentBackward<BFloat16>> backward_kernel<BFloat16>(StageList<__VA_ARGS__>, \
                                                                          int);                   \
  template Kernel<PersistentBackward<Half>> backward_kernel<Half>(StageList<__VA_ARGS__>, int);   \
  template Kernel<PersistentBackward<float>> backward_kernel<float>(StageList<__VA_ARGS__>, int);

}  // namespace fusedrnn::cuda
