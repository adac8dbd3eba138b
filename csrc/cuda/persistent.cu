// Persistent kernels on a GPU.
#include "cooperative.h"

namespace fusedrnn::cuda {

// In a source for each list.
template <class T, class... Stages>
cudaError_t launch_stages(StageList<Stages...>, const PersistentPlan& plan,
                          const PersistentForward<T>& args, cudaStream_t stream);

template <class T>
Launch launch_persistent_forward(const PersistentPlan& plan, PersistentForward<T> args,
                                 void* workspace, Stream stream) {
  const auto launch = [&](auto stages) { return launch_stages<T>(stages, plan, args, stream); };
  return launch_prepared("persistent_forward", plan, workspace, args, stream, launch);
}

template Launch launch_persistent_forward(const PersistentPlan&, PersistentForward<BFloat16>, void*,
                                          Stream);
template Launch launch_persistent_forward(const PersistentPlan&, PersistentForward<Half>, void*,
                                          Stream);
template Launch launch_persistent_forward(const PersistentPlan&, PersistentForward<float>, void*,
                                          Stream);

}  // namespace fusedrnn::cuda
