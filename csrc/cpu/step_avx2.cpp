// The CPU kernels for processors with AVX2 and FMA.
#if defined(__x86_64__) && !defined(__clang__)  // clang has no such pragma
#pragma GCC target("avx2,fma")
#define FUSEDRNN_ISA avx2
#include "step_impl.h"
#endif
