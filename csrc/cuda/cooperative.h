// How persistent kernels are launched: after a preset of memory, and all blocks run at once, or it
// is refused.
#pragma once
#include <cuda_runtime.h>

#include "persistent_step.h"

namespace fusedrnn::cuda {

template <class Args>
cudaError_t launch_at_once(void (*kernel)(Args), const PersistentPlan& plan, const Args& args,
                           cudaStream_t stream) {
  if (plan.shared_bytes > (48 << 10)) {
    // What is above, a kernel has to be allowed: once and for all, not for this launch, since other
    // threads may launch it too.
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(plan.shared_limit));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(plan.grid()));
  config.blockDim = dim3(kPersistentThreads);
  config.dynamicSmemBytes = size_t(plan.shared_bytes);
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

// launch(stages): that of the kernel for a list of stages, with args as they are by then.
template <class Args, class F>
Launch launch_prepared(const char* name, const PersistentPlan& plan, void* workspace, Args& args,
                       cudaStream_t stream, const F& launch) {
  cudaError_t error = cudaSuccess;
  prepare(plan, workspace, args, [&](void* memory, int byte, size_t count) {
    if (error == cudaSuccess) error = cudaMemsetAsync(memory, byte, count, stream);
  });
  if (error != cudaSuccess) return {name, error};
  error = cudaErrorInvalidValue;
  dispatch_stages(plan, [&](auto stages) { error = launch(stages); });
  return {name, error};
}

}  // namespace fusedrnn::cuda
