// The CPU kernels for processors with AVX-512.
#if defined(__x86_64__) && !defined(__clang__)  // clang has no such pragma
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define FUSEDRNN_ISA avx512
#include "step_impl.h"
#endif
