// One spelling for functions that run on the host and on the device, so that the cell math is
// written once. On the host they are always inlined for a second reason: csrc/cpu compiles the same
// headers several times for different instruction sets. The linker would merge the out-of-line
// copies of a function into one, which might be the AVX-512 copy on a machine without AVX-512. A
// function that is always inlined has no copy to merge.
#pragma once

#if defined(__CUDACC__)
#define FUSEDRNN_HD __host__ __device__ __forceinline__
#define FUSEDRNN_UNROLL _Pragma("unroll")     // a loop over an array that must stay in registers
#define FUSEDRNN_IN_TURN _Pragma("unroll 1")  // a loop that would take too many registers at once
#else
#define FUSEDRNN_UNROLL
#define FUSEDRNN_IN_TURN
#define FUSEDRNN_HD inline __attribute__((always_inline))
#endif
