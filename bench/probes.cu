// What an exchange between blocks is made of: `probes clock|alone|crowded|pair|cluster` prints a
// line.  The exit status is 0 if a number was found and what has been sent has arrived.
//   clock    the rate of the multiprocessors' clock
//   alone    cycles of a round trip to the L2 cache, one lane asking
//   crowded  the same while 128 blocks ask for the same 4 KiB, as blocks of a group ask for h
//   pair     a hop by st.async and an mbarrier between two blocks of a cluster of 8
//   cluster  the same from each to all 8 blocks, 512 bytes each
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../csrc/persistent/device.h"

namespace fusedrnn::probes {
namespace {

using namespace cuda;

constexpr int kLoads = 4096, kHops = 8192, kCluster = 8;
constexpr int kThreads = 256, kCrowd = 128;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
T* zeros(size_t count) {
  T* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)));
  check(cudaMemset(memory, 0, count * sizeof(T)));
  return memory;
}
template <class T>
T first_of(const T* memory) {
  T value;
  check(cudaGetLastError());
  check(cudaMemcpy(&value, memory, sizeof value, cudaMemcpyDeviceToHost));
  return value;
}

__device__ int64_t clock_now() {
  int64_t now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
}
__device__ int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// found[0]: cycles in found[1] nanoseconds.
__global__ void count_cycles(int64_t* found, int64_t for_ns) {
  const int64_t begin_ns = nanoseconds(), begin = clock_now();
  int64_t now_ns = begin_ns;
  while (now_ns - begin_ns < for_ns) now_ns = nanoseconds();
  found[0] = clock_now() - begin;
  found[1] = now_ns - begin_ns;
}

bool clock_rate() {
  auto* found = zeros<int64_t>(2);
  for (int64_t ms : {200, 20}) count_cycles<<<1, 1>>>(found, 1000000 * ms);  // the first warms up
  const int64_t cycles = first_of(found), ns = first_of(found + 1);
  std::printf("clock: %.0f MHz\n", 1e3 * double(cycles) / double(ns));
  return true;
}

// Each load's address depends on the one before; memory is zeros.  Block 0 counts the cycles.
__global__ void ask(const Packet* memory, uint32_t* cycles) {
  const Packet* at = memory + thread_index();
  Packet packet = load_relaxed(at);
  const uint32_t begin = clock_after(packet.word[0]);
  for (int i = 0; i < kLoads; ++i) packet = load_relaxed(at + packet.word[0]);
  const uint32_t end = clock_after(packet.word[0]);
  if (block_index() == 0 && thread_index() == 0) *cycles = end - begin;
}

bool round_trip(const char* name, int blocks, int threads) {
  auto* memory = zeros<Packet>(kThreads);
  auto* cycles = zeros<uint32_t>(1);
  for (int i = 0; i < 2; ++i) ask<<<blocks, threads>>>(memory, cycles);
  std::printf("L2 round trip, %s: %.0f cycles\n", name, double(first_of(cycles)) / kLoads);
  return true;
}

// Each of the first `readers` blocks of a cluster sends a packet per lane to all of them in each
// hop, and waits for theirs.  Two buffers take turns: whoever sends hop i has all of hop i - 1,
// whose senders were done with hop i - 2.  wrong: the number, from 1 on, of a hop that arrived
// wrong.
__global__ void __cluster_dims__(kCluster) hop_in_cluster(int readers, uint32_t* wrong) {
#if __CUDA_ARCH__ >= 900
  __shared__ Packet received[2][kCluster][kWarpSize];
  __shared__ alignas(8) uint64_t barriers[2];
  const auto shared_address = [](const void* p) { return uint32_t(__cvta_generic_to_shared(p)); };
  const int lane = thread_index(), rank = block_index() % kCluster;
  if (lane < 2) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barriers[lane])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
  bool is_right = true;
  for (int i = 0; rank < readers && i < kHops && is_right; ++i) {
    const uint32_t bar = shared_address(&barriers[i % 2]), parity = uint32_t(i / 2 % 2);
    const uint32_t to = shared_address(&received[i % 2][rank][lane]);
    const uint32_t word = uint32_t(i * kWarpSize + lane);
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar),
                   "r"(uint32_t(readers * kWarpSize * sizeof(Packet)))
                   : "memory");
    }
    for (int reader = 0; reader < readers; ++reader) {
      asm volatile(
          "{ .reg .b32 to, bar; mapa.shared::cluster.u32 to, %0, %2;"
          " mapa.shared::cluster.u32 bar, %1, %2;"
          " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {%3, %4, %5, %6},"
          " [bar]; }" ::"r"(to),
          "r"(bar), "r"(reader), "r"(word), "r"(word + 1), "r"(word + 2), "r"(word + 3)
          : "memory");
    }
    uint32_t has_come = 0;
    for (int looks = 0; has_come == 0 && looks < 1 << 16; ++looks) {
      asm volatile(
          "{ .reg .pred has_come;"
          " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 has_come, [%1], %2;"
          " selp.u32 %0, 1, 0, has_come; }"
          : "=r"(has_come)
          : "r"(bar), "r"(parity)
          : "memory");
    }
    for (int sender = 0; sender < readers; ++sender) {
      is_right = is_right && received[i % 2][sender][lane].word[0] == word;
    }
    is_right = is_right && has_come != 0;
    if (!is_right) *wrong = uint32_t(i) + 1;
    is_right = __all_sync(0xffffffffu, is_right);
  }
  // No block may end while another one still sends to it.
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

bool hop(const char* name, int readers) {
  cudaDeviceProp facts{};
  check(cudaGetDeviceProperties(&facts, 0));
  if (facts.major < 9) {
    std::printf("clusters need compute capability 9.0\n");
    return false;
  }
  auto* wrong = zeros<uint32_t>(1);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  float ms = 0;
  for (int i = 0; i < 2; ++i) {  // the first launch loads the kernel
    check(cudaEventRecord(begin));
    hop_in_cluster<<<kCluster, kWarpSize>>>(readers, wrong);
    check(cudaGetLastError());
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    check(cudaEventElapsedTime(&ms, begin, end));
  }
  if (const uint32_t hop = first_of(wrong); hop != 0) {
    std::printf("wrong: st.async, %s: hop %u of %d did not arrive as it was sent\n", name, hop - 1,
                kHops);
    return false;
  }
  std::printf("hop by st.async, %s: %.0f ns\n", name, 1e6 * double(ms) / kHops);
  return true;
}

}  // namespace
}  // namespace fusedrnn::probes

int main(int count, char** words) {
  using namespace fusedrnn::probes;
  const auto is = [&](const char* name) { return count == 2 && std::strcmp(words[1], name) == 0; };
  if (is("clock")) return clock_rate() ? 0 : 1;
  if (is("alone")) return round_trip("one lane alone", 1, 1) ? 0 : 1;
  if (is("crowded")) return round_trip("128 blocks asking", kCrowd, kThreads) ? 0 : 1;
  if (is("pair")) return hop("two blocks of a cluster of 8", 2) ? 0 : 1;
  if (is("cluster")) return hop("each to all in a cluster of 8", kCluster) ? 0 : 1;
  std::printf("expected clock, alone, crowded, pair or cluster\n");
  return 2;
}
