// A persistent kernel by itself on a GPU: `phases STEPS BATCH HIDDEN LAUNCHES` prints what phases.h
// says.  One program for each cell and pass, FUSEDRNN_PHASES_CELL and FUSEDRNN_PHASES_PASS: with
// FUSEDRNN_PHASE_CLOCKS, without, and with FUSEDRNN_PHASES_VARIANTS.
#include <cuda_runtime.h>

#include <cstdlib>

#include "../csrc/cuda/backward_kernel.h"
#include "../csrc/cuda/forward_kernel.h"
#include "phases.h"

#define FUSEDRNN_TEXT_OF(name) #name
#define FUSEDRNN_TEXT(name) FUSEDRNN_TEXT_OF(name)

namespace fusedrnn::phases {
namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

__global__ void rewrite_each(float* numbers, int64_t count) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    numbers[i] = __ldcg(numbers + i);
  }
}

template <unsigned kVariant, int kDepth, class Stages, class Args>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    run_in_variant(const __grid_constant__ Args args) {
  run_variant<kVariant, kDepth>(Stages{}, args, shared_memory());
}
template <unsigned kVariant, class Args, class Stages>
Kernel<Args> kernel_in_variant(Stages stages, int depth) {
  if constexpr (kVariant != kAsInPackage) {
    switch (depth) {
      case 1: return run_in_variant<kVariant, 1, Stages, Args>;
      case 2: return run_in_variant<kVariant, 2, Stages, Args>;
      case 4: return run_in_variant<kVariant, 4, Stages, Args>;
    }
    return nullptr;
  } else if constexpr (std::is_same_v<Args, PersistentForward<Element>>) {
    return forward_kernel<Element>(stages, depth);
  } else {
    return backward_kernel<Element>(stages, depth);
  }
}

class CudaDevice {
 public:
  CudaDevice() {
    cudaDeviceProp facts{};
    check(cudaGetDeviceProperties(&facts, 0));
    gpu_ = {"", 10 * facts.major + facts.minor, facts.multiProcessorCount,
            int64_t(facts.sharedMemPerBlockOptin)};
    check(cudaEventCreate(&begin_));
    check(cudaEventCreate(&end_));
  }
  const Gpu& gpu() const { return gpu_; }
  void* allocate(size_t bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes));
    return memory;
  }
  void set(void* memory, int byte, size_t bytes) { check(cudaMemsetAsync(memory, byte, bytes)); }
  void write(void* memory, const void* from, size_t bytes) {
    check(cudaMemcpy(memory, from, bytes, cudaMemcpyHostToDevice));
  }
  void read(void* to, const void* memory, size_t bytes) {
    check(cudaMemcpy(to, memory, bytes, cudaMemcpyDeviceToHost));
  }
  void rewrite(float* numbers, int64_t count) {
    rewrite_each<<<4 * gpu_.multiprocessors, 256>>>(numbers, count);
    check(cudaGetLastError());
  }
  template <unsigned kVariant, class Stages, class Args>
  float run(Stages stages, const PersistentPlan& plan, const Args& args) {
    const Kernel<Args> kernel = kernel_in_variant<kVariant, Args>(stages, plan.depth);
    check(cudaEventRecord(begin_));
    check(launch_at_once(kernel, plan, args, nullptr));
    check(cudaEventRecord(end_));
    check(cudaEventSynchronize(end_));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_));
    return 1000 * ms;
  }
#if defined(FUSEDRNN_PHASE_CLOCKS)
  void set_log(const PhaseLog& log) { check(cudaMemcpyToSymbol(phase_log, &log, sizeof log)); }
#endif

 private:
  Gpu gpu_{};
  cudaEvent_t begin_{}, end_{};
};

}  // namespace
}  // namespace fusedrnn::phases

int main(int count, char** words) {
  using namespace fusedrnn;
  if (count != 5) return phases::refuse("expected STEPS BATCH HIDDEN LAUNCHES");
  const auto number = [&](int i) { return std::atoi(words[i]); };
  phases::CudaDevice device;
  const phases::Call call{FUSEDRNN_TEXT(FUSEDRNN_PHASES_CELL), number(1), number(2), number(3),
                          number(4)};
  return phases::FUSEDRNN_PHASES_PASS(device, cuda::cells::FUSEDRNN_PHASES_CELL{}, call);
}
