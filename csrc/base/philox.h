// Counter-based random numbers: standard normals for latent samples, and uniform numbers.
//
// A sample is a pure function of (seed, t, b, z, layer): the time step, batch row, latent unit and
// layer that it belongs to. No generator has a state, so the numbers do not depend on how the work
// is split into chunks, tiles or threads, the backward pass recomputes them instead of storing
// them, and the CPU and CUDA kernels agree.
//
// The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
// 1, 2, 3", 2011). One call gives four 32-bit words, which Box-Muller turns into four normals, so
// one call serves four neighbouring latent units.
#pragma once

#include <cstdint>

#include "hd.h"
#include "math.h"
#include "scalar.h"

namespace fusedrnn {

// The high and low half of the 64-bit product of a constant and each word.
template <class U>
struct WideMul;

template <>
struct WideMul<uint32_t> {
  static FUSEDRNN_HD void mul(uint32_t a, uint32_t b, uint32_t& hi, uint32_t& lo) {
    const uint64_t product = static_cast<uint64_t>(a) * b;
    hi = static_cast<uint32_t>(product >> 32);
    lo = static_cast<uint32_t>(product);
  }
};

// Replaces the counter by its four random words. The key is common to all lanes of a vector U.
template <class U>
struct Philox4x32 {
  static FUSEDRNN_HD void apply(U (&counter)[4], uint32_t key0, uint32_t key1) {
    U c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 10
#endif
    for (int round = 0; round < 10; ++round) {
      U hi0, lo0, hi1, lo1;
      WideMul<U>::mul(0xD2511F53u, c0, hi0, lo0);
      WideMul<U>::mul(0xCD9E8D57u, c2, hi1, lo1);
      c0 = hi1 ^ c1 ^ key0;
      c1 = lo1;
      c2 = hi0 ^ c3 ^ key1;
      c3 = lo0;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    counter[0] = c0;
    counter[1] = c1;
    counter[2] = c2;
    counter[3] = c3;
  }
};

template <class U>
FUSEDRNN_HD void philox4x32(U (&counter)[4], uint32_t key0, uint32_t key1) {
  Philox4x32<U>::apply(counter, key0, key1);
}

// Two independent standard normals from two random words. The radius comes from a uniform number in
// [2^-32, 1], never 0, so a normal is 6.66 at most; the angle comes from a uniform number in [-1,
// 1] half turns. Both are rounded to 24 bits in float and exact in double, so samples in the two
// precisions differ by rounding: by 1e-6 at most, or by 4e-8 / radius where the radius is small.
template <class F>
FUSEDRNN_HD void box_muller(typename Traits<F>::Word w0, typename Traits<F>::Word w1, F& n0,
                            F& n1) {
  if constexpr (std::is_same_v<F, double>) {
    const double u = static_cast<double>(w0 >> 1) * 0x1p-31 + 0x1p-32;
    const double turn = static_cast<double>(static_cast<int32_t>(w1)) * 0x1p-31;
    const double radius = math::sqrt(-2.0 * math::log(u));
    double s, c;
    math::sincospi(turn, s, c);
    n0 = radius * c;
    n1 = radius * s;
  } else {
    using T = Traits<F>;
    const F u = T::from_int((typename T::Int)(w0 >> 1)) * 0x1p-31f + 0x1p-32f;
    const F turn = T::from_int((typename T::Int)w1) * 0x1p-31f;
    const F radius = math::sqrt(math::log(u) * -2.0f);
    F s, c;
    math::sincospi(turn, s, c);
    n0 = radius * c;
    n1 = radius * s;
  }
}

// Four standard normals from the four words of a counter.
struct Normal {
  template <class F>
  static FUSEDRNN_HD void of(const typename Traits<F>::Word (&w)[4], F (&x)[4]) {
    box_muller(w[0], w[1], x[0], x[1]);
    box_muller(w[2], w[3], x[2], x[3]);
  }
};

// Four uniform numbers strictly between 0 and 1, one from each word of a counter, for a tensor of
// T: (w + 1/2) / 2^32 in double, which is exact, else (floor(w / 2^8) + 1/2) / 2^24 in float. What
// would be rounded to 0 or to 1, in float or then in T, is the nearest number of T in between.
template <class T>
struct Uniform {
  static constexpr float kLeast = std::is_same_v<T, Half> ? 0x1p-24f : 0x1p-25f;
  static constexpr float kMost = std::is_same_v<T, Half>       ? 1 - 0x1p-11f
                                 : std::is_same_v<T, BFloat16> ? 1 - 0x1p-8f
                                                               : 1 - 0x1p-24f;
  template <class F>
  static FUSEDRNN_HD void of(const typename Traits<F>::Word (&w)[4], F (&x)[4]) {
    for (int j = 0; j < 4; ++j) {
      if constexpr (std::is_same_v<F, double>) {
        x[j] = static_cast<double>(w[j]) * 0x1p-32 + 0x1p-33;
      } else {
        using Float = Traits<F>;
        const F u = Float::from_int((typename Float::Int)(w[j] >> 8)) * 0x1p-24f + 0x1p-25f;
        x[j] = math::min(math::max(u, kLeast), kMost);
      }
    }
  }
};

// The four numbers of columns 4 block .. 4 block + 3 at time t, in batch row b of a stream (the
// layer, for the noise of latent units). For a vector F each lane has its own block, and lane i of
// x[j] is column 4 block[i] + j. seed holds the bits of the signed 64-bit seed. Distribution:
// Normal or Uniform.
template <class Distribution, class F>
FUSEDRNN_HD void draw4(uint64_t seed, uint32_t t, uint32_t b, typename Traits<F>::Word block,
                       uint32_t stream, F (&x)[4]) {
  using Word = typename Traits<F>::Word;
  Word w[4] = {t + Word{}, b + Word{}, block, stream + Word{}};
  philox4x32(w, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  Distribution::of(w, x);
}

// The same of standard normals, the noise of latent units.
template <class F>
FUSEDRNN_HD void normal4(uint64_t seed, uint32_t t, uint32_t b, typename Traits<F>::Word block,
                         uint32_t layer, F (&normal)[4]) {
  draw4<Normal>(seed, t, b, block, layer, normal);
}

}  // namespace fusedrnn
