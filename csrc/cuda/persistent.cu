// Persistent kernels on a GPU.
#include <cuda_runtime.h>

#include "persistent.h"

namespace fusedrnn::cuda {

// In a source for each list.
template <class T, class... Stages>
cudaError_t launch_stages(StageList<Stages...>, const PersistentPlan& plan,
                          const PersistentForward<T>& args, cudaStream_t stream);

template <class T>
Launch launch_persistent_forward(const PersistentPlan& plan, PersistentForward<T> args,
                                 void* workspace, Stream stream) {
  const char* name = "persistent_forward";
  cudaError_t error =
      cudaMemsetAsync(workspace, plan.preset(), size_t(plan.workspace_bytes()), stream);
  if (error != cudaSuccess) return {name, error};
  apply(plan, workspace, args);
  error = cudaErrorInvalidValue;
  dispatch_stages(plan, [&](auto stages) { error = launch_stages<T>(stages, plan, args, stream); });
  return {name, error};
}

template Launch launch_persistent_forward(const PersistentPlan&, PersistentForward<BFloat16>, void*,
                                          Stream);
template Launch launch_persistent_forward(const PersistentPlan&, PersistentForward<Half>, void*,
                                          Stream);
template Launch launch_persistent_forward(const PersistentPlan&, PersistentForward<float>, void*,
                                          Stream);

}  // namespace fusedrnn::cuda
