// Persistent kernels of the adjoint chain on a GPU.
#include <cuda_runtime.h>

#include "persistent_backward.h"

namespace fusedrnn::cuda {

// In a source for each list.
template <class T, class... Stages>
cudaError_t launch_backward_stages(StageList<Stages...>, const PersistentPlan& plan,
                                   const PersistentBackward<T>& args, cudaStream_t stream);

template <class T>
Launch launch_persistent_backward(const PersistentPlan& plan, PersistentBackward<T> args,
                                  void* workspace, Stream stream) {
  const char* name = "persistent_backward";
  cudaError_t error =
      cudaMemsetAsync(workspace, plan.preset(), size_t(plan.workspace_bytes()), stream);
  if (error != cudaSuccess) return {name, error};
  apply(plan, workspace, args);
  error = cudaErrorInvalidValue;
  dispatch_stages(
      plan, [&](auto stages) { error = launch_backward_stages<T>(stages, plan, args, stream); });
  return {name, error};
}

template Launch launch_persistent_backward(const PersistentPlan&, PersistentBackward<BFloat16>,
                                           void*, Stream);
template Launch launch_persistent_backward(const PersistentPlan&, PersistentBackward<Half>, void*,
                                           Stream);

}  // namespace fusedrnn::cuda
