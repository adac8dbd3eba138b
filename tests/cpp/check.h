// Functions that the programs of this folder share. The instruction set is chosen with
// -DCHECK_AVX512 or -DCHECK_AVX2, so this file comes before any other header.
#pragma once
#if defined(CHECK_AVX512)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define FUSEDRNN_ISA avx512
#elif defined(CHECK_AVX2)
#pragma GCC target("avx2,fma")
#define FUSEDRNN_ISA avx2
#else
#define FUSEDRNN_ISA baseline
#endif
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "../../csrc/base/scalar.h"
#include "../../csrc/cpu/denormals.h"
#include "../../csrc/cpu/vector.h"

namespace fusedrnn::check {

inline int failures = 0;

inline void expect(bool ok, const char* what, double x, double got) {
  if (ok) return;
  if (++failures <= 20) std::printf("FAILED %s at %.9g (%a): got %.9g\n", what, x, x, got);
}

inline bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

inline uint32_t bits_of(float x) { return Traits<float>::bits(x); }
inline float float_of(uint32_t bits) { return Traits<float>::from_bits(bits); }

struct Check {
  const char* name;
  void (*run)();
};

// Runs the check that the command line names, and says how it went: the program's exit status.
template <int n>
int run_named(int argc, char** argv, const Check (&checks)[n]) {
  for (const Check& check : checks) {
    if (argc == 2 && std::strcmp(argv[1], check.name) == 0) {
      check.run();
      std::printf("%d failures\n", failures);
      return failures != 0;
    }
  }
  std::printf("usage: %s NAME\n", argv[0]);
  return 2;
}

}  // namespace fusedrnn::check
