// Kernel and launch of the adjoint chain for one list of stages, in every dtype: a source for each
// list, as forward.
#pragma once
#include "cooperative.h"
#include "persistent_backward.h"

namespace fusedrnn::cuda {

template <class T, int kDepth, class... Stages>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    run_persistent_backward(const __grid_constant__ PersistentBackward<T> args) {
  extern __shared__ __align__(16) unsigned char shared[];
  persistent_backward<T, kDepth>(StageList<Stages...>{}, args, shared);
}

template <class T, class... Stages>
cudaError_t launch_backward_stages(StageList<Stages...>, const PersistentPlan& plan,
                                   const PersistentBackward<T>& args, cudaStream_t stream) {
  switch (plan.depth) {
    case 1: return launch_at_once(run_persistent_backward<T, 1, Stages...>, plan, args, stream);
    case 2: return launch_at_once(run_persistent_backward<T, 2, Stages...>, plan, args, stream);
    case 4: return launch_at_once(run_persistent_backward<T, 4, Stages...>, plan, args, stream);
  }
  return cudaErrorInvalidValue;
}

#define FUSEDRNN_PERSISTENT_BACKWARD_STAGES(...)                                                  \
  template cudaError_t launch_backward_stages(StageList<__VA_ARGS__>, const PersistentPlan&,      \
                                              const PersistentBackward<BFloat16>&, cudaStream_t); \
  template cudaError_t launch_backward_stages(StageList<__VA_ARGS__>, const PersistentPlan&,      \
                                              const PersistentBackward<Half>&, cudaStream_t);

}  // namespace fusedrnn::cuda
