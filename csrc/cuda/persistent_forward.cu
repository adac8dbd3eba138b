// Finds and launches the persistent kernels of forward.
#include "cooperative.h"

namespace fusedrnn::cuda {

// Defined in instantiations/, one source for each cell.
template <class T, class... Stages>
Kernel<PersistentForward<T>> forward_kernel(StageList<Stages...>, int depth);

// Null if there is no such kernel.
template <class T>
Kernel<PersistentForward<T>> find_forward(const StageKind* stages, int num_stages, int depth) {
  Kernel<PersistentForward<T>> kernel = nullptr;
  dispatch_stages(stages, num_stages, [&](auto list) { kernel = forward_kernel<T>(list, depth); });
  return kernel;
}

template <class T>
Launch launch_persistent_forward(const PersistentPlan& plan, PersistentForward<T> args,
                                 void* workspace, Stream stream) {
  const auto kernel = find_forward<T>(plan.stages, plan.num_stages, plan.depth);
  return launch_prepared("persistent_forward", kernel, plan, workspace, args, stream);
}

template Launch launch_persistent_forward(const PersistentPlan&, PersistentForward<BFloat16>, void*,
                                          Stream);
template Launch launch_persistent_forward(const PersistentPlan&, PersistentForward<Half>, void*,
                                          Stream);
template Launch launch_persistent_forward(const PersistentPlan&, PersistentForward<float>, void*,
                                          Stream);

int64_t count_forward_blocks(const PersistentKernel& kernel) {
  const auto count = [&](auto find) {
    return count_blocks(find(kernel.stages, kernel.num_stages, kernel.depth), kernel);
  };
  switch (kernel.type) {
    case PersistentKernel::kBFloat16: return count(find_forward<BFloat16>);
    case PersistentKernel::kHalf: return count(find_forward<Half>);
    case PersistentKernel::kFloat: return count(find_forward<float>);
    default: return 0;
  }
}

}  // namespace fusedrnn::cuda
