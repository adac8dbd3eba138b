// Every function of functions.h on a GPU, judged there: `math_sweep STRIDE` takes every STRIDE-th
// float. Prints what it measured and exits with 1 if a bound is broken, or if bits differ from
// those of the CPU where they are to be the same. A compiler for the CPU makes a loop of the launch,
// by which it is seen without a GPU that this file judges as it should.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "functions.h"

namespace {

using namespace fusedrnn;
using namespace fusedrnn::check;

#if defined(__CUDACC__)
constexpr int kBlocks = 1024, kBlockThreads = 256;

bool succeeded(cudaError_t error) {
  if (error != cudaSuccess) std::printf("FAILED: %s\n", cudaGetErrorString(error));
  return error == cudaSuccess;
}

template <class Body>
__global__ void run(Body body) {
  body(blockIdx.x * kBlockThreads + threadIdx.x, kBlocks * kBlockThreads);
}

template <class Body>
bool launch(const Body& body) {
  run<<<kBlocks, kBlockThreads>>>(body);
  return succeeded(cudaGetLastError()) && succeeded(cudaDeviceSynchronize());
}

void* shared_memory(size_t size_bytes) {
  void* memory = nullptr;
  return succeeded(cudaMallocManaged(&memory, size_bytes)) ? memory : nullptr;
}
#else
template <class Body>
bool launch(const Body& body) {
  for (uint32_t i = 0; i < 3; ++i) body(i, 3);
  return true;
}

void* shared_memory(size_t size_bytes) { return std::malloc(size_bytes); }
#endif

// Whether the host's products and sums are fused as a GPU's are, so that bits can be compared.
#if defined(__FMA__) || defined(__aarch64__)
constexpr bool kHostFuses = true;
#else
constexpr bool kHostFuses = false;
#endif

FUSEDRNN_HD void merge(Tally* all, const Tally& mine) {
#if defined(__CUDA_ARCH__)
  atomicAdd(&all->failures, mine.failures);
  atomicMax(&all->worst, mine.worst);
#else
  all->add(mine);
#endif
}

// Thread i of `threads`: its share of the floats.
template <class Function>
struct Sweep {
  uint32_t stride;
  Tally* tally;

  FUSEDRNN_HD void operator()(uint32_t i, uint32_t threads) const {
    Tally mine;
    for (uint64_t bits = uint64_t(i) * stride; bits >> 32 == 0;
         bits += uint64_t(threads) * stride) {
      const float x = Traits<float>::from_bits(uint32_t(bits));
      if (!Function::covers(x)) continue;
      mine.add(Function::error(Function::exact(x), Function::apply(x)), Function::kBound, x);
    }
    merge(tally, mine);
  }
};

// Results of every kSampled-th float.
constexpr uint32_t kSampled = 4099, kSamples = uint32_t((uint64_t{1} << 32) / kSampled);

template <class Function>
struct Evaluate {
  float* y;

  FUSEDRNN_HD void operator()(uint32_t i, uint32_t threads) const {
    for (uint32_t k = i; k < kSamples; k += threads) {
      y[k] = Function::apply(Traits<float>::from_bits(k * kSampled));
    }
  }
};

template <class Function>
uint32_t differences(const float* y) {
  uint32_t count = 0;
  for (uint32_t k = 0; k < kSamples; ++k) {
    const float x = Traits<float>::from_bits(k * kSampled);
    if (!Function::covers(x) || !Function::is_alike(x)) continue;
    count += !same(y[k], Function::apply(x));
  }
  return count;
}

template <class Function>
bool sweep(uint32_t stride, Tally* tally, float* y) {
  *tally = Tally{};
  if (!launch(Sweep<Function>{stride, tally}) || !launch(Evaluate<Function>{y})) return false;
  const uint32_t different = kHostFuses ? differences<Function>(y) : 0;
  std::printf("%s: error %.4g%s at %.9g; ", Function::kName, tally->error(), Function::kUnit,
              tally->error() == 0 ? 0.0f : tally->x());
  if (kHostFuses) {
    std::printf("%u of %u differ from the CPU's\n", different, kSamples);
  } else {
    std::printf("bits not compared: this CPU code has no fused multiply-add\n");
  }
  if (tally->failures > 0) {
    std::printf("FAILED %s: %llu times beyond %.4g\n", Function::kName, tally->failures,
                Function::kBound);
  }
  return tally->failures == 0 && different == 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int stride = argc == 2 ? std::atoi(argv[1]) : 0;
  if (stride <= 0) {
    std::printf("usage: math_sweep STRIDE\n");
    return 2;
  }
  auto* tally = static_cast<Tally*>(shared_memory(sizeof(Tally)));
  auto* y = static_cast<float*>(shared_memory(kSamples * sizeof(float)));
  if (tally == nullptr || y == nullptr) return 1;
  bool passed = true;
  for_each_function(
      [&](auto function) { passed &= sweep<decltype(function)>(uint32_t(stride), tally, y); });
  return passed ? 0 : 1;
}
