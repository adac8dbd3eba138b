// Launches persistent kernels: presets memory, then starts all blocks at once, or none if the GPU
// refuses.
#pragma once
#include <cuda_runtime.h>

#include "../persistent/arguments.h"

namespace fusedrnn::cuda {

template <class Args>
using Kernel = void (*)(Args);

// Whether a launch error means that a grid of this size cannot run, and nothing else.  A launch may
// also report errors of earlier work on the GPU.
inline bool is_refusal(cudaError_t error) {
  switch (error) {
    case cudaErrorCooperativeLaunchTooLarge:
    case cudaErrorLaunchOutOfResources:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidValue:
    case cudaErrorNotSupported:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorNoKernelImageForDevice: return true;
    default: return false;
  }
}

// A kernel needs permission for more than 48 KiB of shared memory.  It is set to the limit and not
// to one launch's need, because other threads may launch the same kernel.
inline cudaError_t allow_shared_memory(const void* kernel, int64_t bytes, int64_t limit) {
  if (bytes <= (48 << 10)) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(limit));
}

template <class Args>
cudaError_t launch_at_once(Kernel<Args> kernel, const PersistentPlan& plan, const Args& args,
                           cudaStream_t stream) {
  const auto* address = reinterpret_cast<const void*>(kernel);
  const cudaError_t error = allow_shared_memory(address, plan.shared_bytes, plan.shared_limit);
  if (error != cudaSuccess) return error;
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

template <class Args>
Launch launch_prepared(const char* name, Kernel<Args> kernel, const PersistentPlan& plan,
                       void* workspace, Args& args, cudaStream_t stream) {
  if (kernel == nullptr) return {name, cudaErrorInvalidDeviceFunction, /*is_refused=*/true};
  cudaError_t error = cudaSuccess;
  prepare(plan, workspace, args, [&](void* memory, int byte, size_t count) {
    if (error == cudaSuccess) error = cudaMemsetAsync(memory, byte, count, stream);
  });
  if (error != cudaSuccess) return {name, error};
  error = launch_at_once(kernel, plan, args, stream);
  return {name, error, is_refusal(error)};
}

// The number of blocks of a kernel that the current GPU runs at once.
template <class Args>
int64_t count_blocks(Kernel<Args> found, const PersistentKernel& kernel) {
  const auto* address = reinterpret_cast<const void*>(found);
  int is_possible = 0, multiprocessors = 0, of_each = 0;
  cudaError_t error = address == nullptr ? cudaErrorInvalidDeviceFunction : cudaSuccess;
  const auto then = [&](const auto& ask) {
    if (error == cudaSuccess) error = ask();
  };
  const auto attribute = [&](int* value, cudaDeviceAttr which) {
    then([=] { return cudaDeviceGetAttribute(value, which, kernel.device); });
  };
  attribute(&is_possible, cudaDevAttrCooperativeLaunch);
  attribute(&multiprocessors, cudaDevAttrMultiProcessorCount);
  then([&] { return allow_shared_memory(address, kernel.shared_bytes, kernel.shared_limit); });
  then([&] {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_each, address, kPersistentThreads,
                                                         size_t(kernel.shared_bytes));
  });
  if (error != cudaSuccess) (void)cudaGetLastError();  // or torch's next kernel would report it
  if (error != cudaSuccess && !is_refusal(error)) return kUnknown;
  return error != cudaSuccess || is_possible == 0 ? 0 : int64_t(multiprocessors) * of_each;
}

}  // namespace fusedrnn::cuda
