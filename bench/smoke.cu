// One mma of each dtype, and hops between two blocks, without anything else: `smoke
// mma|packets|flags` prints a line for each result. The exit status is 0 if all are right.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "smoke.h"

namespace fusedrnn::smoke {
namespace {

constexpr int kHops = 8192;
constexpr uint32_t kLooks = 1u << 22;  // some seconds

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
T* preset(size_t count, int byte) {
  T* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)));
  check(cudaMemset(memory, byte, count * sizeof(T)));
  return memory;
}

template <class T>
__global__ void multiply_alone(float* out) {
  multiply<T>(out);
}
__global__ void packets(Exchange args) { hop_by_packets(args); }
__global__ void flags(Exchange args) { hop_by_flags(args); }

template <class T>
bool try_mma(const char* dtype) {
  float found[kRows * kColumns];
  auto* out = preset<float>(kRows * kColumns, 0xff);
  multiply_alone<T><<<1, kWarpSize>>>(out);
  check(cudaGetLastError());
  check(cudaMemcpy(found, out, sizeof(found), cudaMemcpyDeviceToHost));
  int wrong = 0, first = -1;
  for (int i = 0; i < kRows * kColumns; ++i) {
    if (found[i] == float(product_at<T>(i / kColumns, i % kColumns))) continue;
    if (wrong++ == 0) first = i;
  }
  if (wrong == 0) {
    std::printf("mma %s: all %d numbers are right\n", dtype, kRows * kColumns);
  } else {
    const int row = first / kColumns, column = first % kColumns;
    std::printf(
        "wrong: mma %s: %d of %d numbers, the first at row=%d column=%d: %g instead of "
        "%d\n",
        dtype, wrong, kRows * kColumns, row, column, found[first], product_at<T>(row, column));
  }
  return wrong == 0;
}

// The second run is timed, because the first one loads the kernel.
bool try_hops(const char* name, void (*kernel)(Exchange)) {
  uint32_t wrong = 0;
  float ms = 0;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  for (int i = 0; i < 2 && wrong == 0; ++i) {
    Exchange args{preset<Packet>(size_t(kHops) * kWarpSize, 0xff), preset<uint32_t>(2, 0),
                  preset<uint32_t>(1, 0), kHops, kLooks};
    void* arguments[] = {&args};
    check(cudaEventRecord(begin));
    // Both blocks run at once, or the launch is refused.
    check(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(2),
                                      dim3(kWarpSize), arguments, 0, nullptr));
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    check(cudaEventElapsedTime(&ms, begin, end));
    check(cudaMemcpy(&wrong, args.wrong, sizeof(wrong), cudaMemcpyDeviceToHost));
  }
  if (wrong != 0) {
    std::printf("wrong: %s: hop %u of %d did not arrive as it was sent\n", name, wrong - 1, kHops);
  } else {
    std::printf("hop by %s: %.0f ns\n", name, 1e6 * double(ms) / kHops);
  }
  return wrong == 0;
}

}  // namespace
}  // namespace fusedrnn::smoke

int main(int count, char** words) {
  using namespace fusedrnn;
  using namespace fusedrnn::smoke;
  const auto is = [&](const char* name) { return count == 2 && std::strcmp(words[1], name) == 0; };
  if (is("mma")) {
    const bool all[] = {try_mma<BFloat16>("bfloat16"), try_mma<Half>("float16"),
                        try_mma<float>("float32 as TF32")};
    return all[0] && all[1] && all[2] ? 0 : 1;
  }
  if (is("packets")) return try_hops("packets", &packets) ? 0 : 1;
  if (is("flags")) return try_hops("flags", &flags) ? 0 : 1;
  std::printf("expected mma, packets or flags\n");
  return 2;
}
