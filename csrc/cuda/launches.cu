// Runs the bodies of kernels.h and program_kernels.h on a GPU.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels.h"
#include "program_kernels.h"

namespace fusedrnn::cuda {

constexpr int kThreads = 128;
// One block per multiprocessor is enough: with a larger minimum, the compiler spills registers in
// double precision.
constexpr int kLeastBlocks = 1;

template <class Body>
__global__ void __launch_bounds__(kThreads, kLeastBlocks)
    run(const __grid_constant__ Body body, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) body(i);
}

template <class Body>
Launch launch(const char* kernel, const Body& body, int64_t count, Stream stream) {
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) return {kernel, cudaErrorInvalidConfiguration};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return {kernel, cudaLaunchKernelEx(&config, run<Body>, body, count)};
}

}  // namespace fusedrnn::cuda
