// The kernel for one list of stages, in every dtype: each list has a source of its own,
// since they take the compiler long.
#pragma once
#include "cooperative.h"
#include "persistent.h"

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

#define FUSEDRNN_PERSISTENT_STAGES(...)                                                         \
  template Kernel<PersistentForward<BFloat16>> forward_kernel<BFloat16>(StageList<__VA_ARGS__>, \
                                                                        int);                   \
  template Kernel<PersistentForward<Half>> forward_kernel<Half>(StageList<__VA_ARGS__>, int);   \
  template Kernel<PersistentForward<float>> forward_kernel<float>(StageList<__VA_ARGS__>, int);

}  // namespace fusedrnn::cuda
