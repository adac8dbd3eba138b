// The properties of a GPU that plans depend on, and the GPUs that plans know by name.
#pragma once
#include <cstdint>
#include <cstring>

namespace fusedrnn {

// Peak rate of matrix products in 10^12 operations a second (a multiply-add counts as two), without
// sparsity; on tensor cores where they support the type.
struct Tflops {
  double of_16_bits = 0, tf32 = 0, float32 = 0, float64 = 0;
};

namespace cuda {
struct PersistentKernel;
// The number of blocks of a kernel that its GPU can run at once; kRefused if the GPU has refused to
// run it before.
using MostBlocks = int64_t (*)(const PersistentKernel*);
constexpr int64_t kRefused = -1;
}  // namespace cuda

// A GPU as plans see it.
struct Gpu {
  const char* name;
  int compute_capability;  // 10 * major + minor
  int multiprocessors;
  int64_t shared_bytes;  // the most shared memory of one block
  Tflops tflops{};       // see tflops_of()
  // Asks the GPU's driver; null if the GPU is not in this machine.
  int device = 0;
  cuda::MostBlocks most_blocks = nullptr;
};
// Rates are from the data sheets (the SXM variant where there are several; float64 of L40S and RTX
// 4090 from the Ada GPU Architecture whitepaper), the rest from the table of compute capabilities
// in the CUDA C++ Programming Guide.
inline constexpr Gpu kKnownGpus[] = {
    {"A100", 80, 108, 163 << 10, {312, 156, 19.5, 19.5}},
    {"H100", 90, 132, 227 << 10, {989.4, 494.7, 66.9, 66.9}},
    {"H200", 90, 132, 227 << 10, {989.4, 494.7, 66.9, 66.9}},
    {"B200", 100, 148, 227 << 10, {2250, 1125, 75, 37}},
    {"L40S", 89, 142, 99 << 10, {362.05, 183, 91.6, 1.43}},
    {"RTX 4090", 89, 128, 99 << 10, {165.2, 82.6, 82.6, 1.29}},
};

// Rates of a GPU, scaled by its multiprocessors from the known GPU whose name is part of its own,
// or else from one of the same compute capability; zeros if there is neither.
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
