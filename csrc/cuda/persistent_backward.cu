// Persistent kernels of the adjoint chain on a GPU.
#include "cooperative.h"
#include "persistent_backward_step.h"

namespace fusedrnn::cuda {

// In a source for each list.
template <class T, class... Stages>
cudaError_t launch_backward_stages(StageList<Stages...>, const PersistentPlan& plan,
                                   const PersistentBackward<T>& args, cudaStream_t stream);

template <class T>
Launch launch_persistent_backward(const PersistentPlan& plan, PersistentBackward<T> args,
                                  void* workspace, Stream stream) {
  const auto launch = [&](auto stages) {
    return launch_backward_stages<T>(stages, plan, args, stream);
  };
  return launch_prepared("persistent_backward", plan, workspace, args, stream, launch);
}

template Launch launch_persistent_backward(const PersistentPlan&, PersistentBackward<BFloat16>,
                                           void*, Stream);
template Launch launch_persistent_backward(const PersistentPlan&, PersistentBackward<Half>, void*,
                                           Stream);

}  // namespace fusedrnn::cuda
