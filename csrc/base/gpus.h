// What plans need to know of a GPU, and the GPUs that plans know by name.
#pragma once
#include <cstdint>
#include <cstring>

namespace fusedrnn {

// Products a second, in 10^12 operations (a multiply-add is two), without sparsity, of tensor cores
// where there are any for the type.
struct Tflops {
  double of_16_bits = 0, tf32 = 0, float32 = 0, float64 = 0;
};

namespace cuda {
struct PersistentKernel;
// How many blocks of a kernel its GPU runs at once; kRefused if it has refused to.
using MostBlocks = int64_t (*)(const PersistentKernel*);
constexpr int64_t kRefused = -1;
}  // namespace cuda

// What plans ask of a GPU.
struct Gpu {
  const char* name;
  int compute_capability;  // 10 major + minor
  int multiprocessors;
  int64_t shared_bytes;  // that one block may have
  Tflops tflops{};       // see tflops_of()
  // Its driver, if it is there to be asked.
  int device = 0;
  cuda::MostBlocks most_blocks = nullptr;
};
// By their data sheets (SXM where there are several; float64 of L40S and RTX 4090 by the Ada GPU
// Architecture whitepaper), and the table of compute capabilities in the CUDA C++ Programming
// Guide.
inline constexpr Gpu kKnownGpus[] = {
    {"A100", 80, 108, 163 << 10, {312, 156, 19.5, 19.5}},
    {"H100", 90, 132, 227 << 10, {989.4, 494.7, 66.9, 66.9}},
    {"H200", 90, 132, 227 << 10, {989.4, 494.7, 66.9, 66.9}},
    {"B200", 100, 148, 227 << 10, {2250, 1125, 75, 37}},
    {"L40S", 89, 142, 99 << 10, {362.05, 183, 91.6, 1.43}},
    {"RTX 4090", 89, 128, 99 << 10, {165.2, 82.6, 82.6, 1.29}},
};

// Per multiprocessor those of the known GPU that its name names, else of one of its compute
// capability; zeros if there is none.
inline Tflops tflops_of(const Gpu& gpu) {
  const Gpu* like = nullptr;
  for (const Gpu& known : kKnownGpus) {
    if (std::strstr(gpu.name, known.name) != nullptr) {
      like = &known;
      break;
    }
    if (like == nullptr && known.compute_capability == gpu.compute_capability) like = &known;
  }
  if (like == nullptr) return {};
  const double part = double(gpu.multiprocessors) / like->multiprocessors;
  const Tflops& all = like->tflops;
  return {part * all.of_16_bits, part * all.tf32, part * all.float32, part * all.float64};
}

}  // namespace fusedrnn
