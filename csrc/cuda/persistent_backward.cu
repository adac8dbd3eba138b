// Finds and launches the persistent kernels of backward.
#include "../persistent/backward_arguments.h"
#include "cooperative.h"

namespace fusedrnn::cuda {

// Defined in instantiations/, one source for each cell.
template <class T, class... Stages>
Kernel<PersistentBackward<T>> backward_kernel(StageList<Stages...>, int depth);

// Null if there is no such kernel.
template <class T>
Kernel<PersistentBackward<T>> find_backward(const StageKind* stages, int num_stages, int depth) {
  Kernel<PersistentBackward<T>> kernel = nullptr;
  dispatch_stages(stages, num_stages, [&](auto list) { kernel = backward_kernel<T>(list, depth); });
  return kernel;
}

template <class T>
Launch launch_persistent_backward(const PersistentPlan& plan, PersistentBackward<T> args,
                                  void* workspace, Stream stream) {
  const auto kernel = find_backward<T>(plan.stages, plan.num_stages, plan.depth);
  return launch_prepared("persistent_backward", kernel, plan, workspace, args, stream);
}

template Launch launch_persistent_backward(const PersistentPlan&, PersistentBackward<BFloat16>,
                                           void*, Stream);
template Launch launch_persistent_backward(const PersistentPlan&, PersistentBackward<Half>, void*,
                                           Stream);
template Launch launch_persistent_backward(const PersistentPlan&, PersistentBackward<float>, void*,
                                           Stream);

int64_t count_backward_blocks(const PersistentKernel& kernel) {
  const auto count = [&](auto find) {
    return count_blocks(find(kernel.stages, kernel.num_stages, kernel.depth), kernel);
  };
  switch (kernel.type) {
    case PersistentKernel::kBFloat16: return count(find_backward<BFloat16>);
    case PersistentKernel::kHalf: return count(find_backward<Half>);
    case PersistentKernel::kFloat: return count(find_backward<float>);
    default: return 0;
  }
}

}  // namespace fusedrnn::cuda
