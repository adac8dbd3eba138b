// The GPU functions that persistent kernels need beyond C++.  Kernel sources name nothing else of
// CUDA, so without nvcc they run on an emulation of these few functions (tests/emulator/fibers.h).
//
// Accesses to memory that other blocks write are of two kinds: `relaxed` ones are visible to the
// whole GPU but order nothing; plain ones must be ordered by a release and an acquire.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../base/scalar.h"

namespace fusedrnn::cuda {

constexpr int kWarpSize = 32;

// 16 bytes, read and written by one instruction.  Each word may arrive without the others.
struct alignas(16) Packet {
  uint32_t word[4];
};

}  // namespace fusedrnn::cuda

#if !defined(__CUDACC__)
#include <fibers.h>
#else
#include <cassert>

#define FUSEDRNN_DEVICE __device__ __forceinline__
#define FUSEDRNN_DEVICE_MEMORY static __device__

namespace fusedrnn::cuda {

FUSEDRNN_DEVICE int thread_index() { return int(threadIdx.x); }
FUSEDRNN_DEVICE int block_index() { return int(blockIdx.x); }
FUSEDRNN_DEVICE int grid_blocks() { return int(gridDim.x); }

// The block's shared memory, of the size that its launch has asked for.
FUSEDRNN_DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}

// Barriers for all threads of the block, or of the warp; each orders their memory accesses.
FUSEDRNN_DEVICE void sync_block() { __syncthreads(); }
FUSEDRNN_DEVICE void sync_warp() { __syncwarp(); }

FUSEDRNN_DEVICE Packet load_relaxed(const Packet* p) {
  Packet v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}
// Loads into v if is_there.  Without a branch: at the end of a branch, ptxas may make the thread
// wait for what was loaded in it.
FUSEDRNN_DEVICE void load_relaxed_if(bool is_there, const Packet* p, Packet& v) {
  asm volatile(
      "{ .reg .pred is_there; setp.ne.s32 is_there, %5, 0;"
      " @is_there ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(v.word[0]), "+r"(v.word[1]), "+r"(v.word[2]), "+r"(v.word[3])
      : "l"(p), "r"(int(is_there))
      : "memory");
}
FUSEDRNN_DEVICE void store_relaxed(Packet* p, const Packet& v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]),
               "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}
FUSEDRNN_DEVICE Packet load_plain(const Packet* p) {
  Packet v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}
FUSEDRNN_DEVICE void store_plain(Packet* p, const Packet& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

FUSEDRNN_DEVICE uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
FUSEDRNN_DEVICE void store_release(uint32_t* p, uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
FUSEDRNN_DEVICE uint32_t load_relaxed(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
FUSEDRNN_DEVICE void store_relaxed(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// The 64-bit product of two ints in one instruction.  From a widening cast, the compiler may make a
// 64-by-64-bit multiplication.
FUSEDRNN_DEVICE int64_t wide_product(int a, int b) {
  int64_t product;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

// The value of the lane `distance` lanes further on, called by all lanes of a warp; the last lanes
// get an unspecified value.
FUSEDRNN_DEVICE uint32_t shuffle_down(uint32_t v, int distance) {
  return __shfl_down_sync(0xffffffffu, v, unsigned(distance));
}

// The nearest number with 10 bits of fraction (ties away from zero), as the bits of a float; every
// NaN becomes 0x7fffffff.
FUSEDRNN_DEVICE uint32_t round_to_tf32(float x) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return x == x ? rounded : 0x7fffffffu;  // PTX does not specify the NaN
}

// d += a b with a of 16xK, b of Kx8 and d of 16x8, spread over the lanes of a warp (PTX, m16n8k16
// and m16n8k8). With g = lane / 4 and q = lane % 4, a lane holds
// for 16-bit types, K = 16,
//   a:  (g, 2q), (g + 8, 2q), (g, 2q + 8), (g + 8, 2q + 8), each with its right neighbour
//   b:  (2q, g), (2q + 8, g), each with its neighbour below
// for float, K = 8, with numbers rounded to TF32 (their last 13 bits are ignored),
//   a:  (g, q), (g + 8, q), (g, q + 4), (g + 8, q + 4)
//   b:  (q, g), (q + 4, g)
// and for both
//   d:  (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1).
template <class T>
FUSEDRNN_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(std::is_same_v<Acc<T>, float>);
  if constexpr (std::is_same_v<T, float>) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The last 32 bits of the multiprocessor's clock, read as soon as the thread has `bits`: the read
// depends on a test of them.  0 if they happen to be 0x7fbadbad.
FUSEDRNN_DEVICE uint32_t clock_after(uint32_t bits) {
  uint64_t clock = 0;
  asm volatile(
      "{ .reg .pred is_read; setp.ne.u32 is_read, %1, 0x7fbadbad;"
      " @is_read mov.u64 %0, %%clock64; }"
      : "+l"(clock)
      : "r"(bits)
      : "memory");
  return uint32_t(clock);
}
// Stores two words at p if is_wanted, without a branch.
FUSEDRNN_DEVICE void store_if(bool is_wanted, uint32_t* p, uint32_t first, uint32_t second) {
  asm volatile(
      "{ .reg .pred is_wanted; setp.ne.s32 is_wanted, %0, 0;"
      " @is_wanted st.global.v2.u32 [%1], {%2, %3}; }" ::"r"(int(is_wanted)),
      "l"(p), "r"(first), "r"(second)
      : "memory");
}

// Starts to copy a word into shared memory. end_of_copies() ends a group of copies, perhaps an
// empty one; wait_for_copies() waits until all but the last kGroups groups of this thread have
// arrived, which only this thread may read.
FUSEDRNN_DEVICE void copy_async(float* shared, const void* from) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))),
      "l"(from)
      : "memory");
}
FUSEDRNN_DEVICE void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kGroups>
FUSEDRNN_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Called between two reads of memory that another block is going to write.
FUSEDRNN_DEVICE void pause() {}

// Prints a message on stderr and ends the kernel; the process cannot use the GPU afterwards.
[[noreturn]] static __device__ __noinline__ void give_up() {
  __assert_fail("other blocks of a persistent kernel have not sent their results in time",
                "fusedrnn", 0, "persistent kernel");
  __trap();
}

}  // namespace fusedrnn::cuda
#endif
