// Kernel and launch for one list of stages, in every dtype: each list has a source of its own,
// since they take the compiler long.
#pragma once
#include "cooperative.h"
#include "persistent.h"

namespace fusedrnn::cuda {

template <class T, int kDepth, class... Stages>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    run_persistent(const __grid_constant__ PersistentForward<T> args) {
  extern __shared__ __align__(16) unsigned char shared[];
  persistent_forward<T, kDepth>(StageList<Stages...>{}, args, shared);
}

template <class T, class... Stages>
cudaError_t launch_stages(StageList<Stages...>, const PersistentPlan& plan,
                          const PersistentForward<T>& args, cudaStream_t stream) {
  switch (plan.depth) {
    case 1: return launch_at_once(run_persistent<T, 1, Stages...>, plan, args, stream);
    case 2: return launch_at_once(run_persistent<T, 2, Stages...>, plan, args, stream);
    case 4: return launch_at_once(run_persistent<T, 4, Stages...>, plan, args, stream);
  }
  return cudaErrorInvalidValue;
}

#define FUSEDRNN_PERSISTENT_STAGES(...)                                                 \
  template cudaError_t launch_stages(StageList<__VA_ARGS__>, const PersistentPlan&,     \
                                     const PersistentForward<BFloat16>&, cudaStream_t); \
  template cudaError_t launch_stages(StageList<__VA_ARGS__>, const PersistentPlan&,     \
                                     const PersistentForward<Half>&, cudaStream_t);     \
  template cudaError_t launch_stages(StageList<__VA_ARGS__>, const PersistentPlan&,     \
                                     const PersistentForward<float>&, cudaStream_t);

}  // namespace fusedrnn::cuda
