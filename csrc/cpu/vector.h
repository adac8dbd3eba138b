// The CPU's vector of floats for the cell math, at the width of one instruction set.
//
// A source file for a width other than the baseline's begins, before any include, with
//   #define FUSEDRNN_ISA avx512
//   #pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
// (or avx2 and "avx2,fma"). The width follows from FUSEDRNN_ISA and not from __AVX512F__, because
// g++ up to 12 does not define that macro after the pragma, although it does emit the instructions.
//
// One definition rule: several such files are linked together. If they emit code under the same
// name, the linker keeps one copy, for whichever instruction set comes first. So here as in hd.h
// every function is always inlined. Everything declared below is in an inline namespace named after
// the instruction set, and so must be every function, class and template of the files that include
// this one. These files include nothing of the standard library that has code in it (no containers,
// no algorithms) and nothing of torch.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "../base/hd.h"
#include "../base/math.h"
#include "../base/philox.h"
#include "../base/scalar.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef FUSEDRNN_ISA
#define FUSEDRNN_ISA baseline
#endif

#define FUSEDRNN_LANES_baseline 4
#define FUSEDRNN_LANES_avx2 8
#define FUSEDRNN_LANES_avx512 16
#define FUSEDRNN_PASTE_(a, b) a##b
#define FUSEDRNN_PASTE(a, b) FUSEDRNN_PASTE_(a, b)
#define FUSEDRNN_LANES FUSEDRNN_PASTE(FUSEDRNN_LANES_, FUSEDRNN_ISA)

namespace fusedrnn {
inline namespace FUSEDRNN_ISA {

constexpr int kLanes = FUSEDRNN_LANES;
typedef float VecF __attribute__((vector_size(4 * FUSEDRNN_LANES)));
typedef int32_t VecI __attribute__((vector_size(4 * FUSEDRNN_LANES)));
typedef uint32_t VecU __attribute__((vector_size(4 * FUSEDRNN_LANES)));
typedef uint64_t VecU64 __attribute__((vector_size(4 * FUSEDRNN_LANES)));

}  // namespace FUSEDRNN_ISA

template <>
struct Traits<VecF> {
  using Int = VecI;
  using UInt = VecU;
  using Word = VecU;
  static FUSEDRNN_HD VecU bits(VecF x) { return (VecU)x; }
  static FUSEDRNN_HD VecF from_bits(VecU u) { return (VecF)u; }
  static FUSEDRNN_HD VecF from_int(VecI i) { return __builtin_convertvector(i, VecF); }
  static FUSEDRNN_HD VecF sqrt(VecF x) {
#if FUSEDRNN_LANES == 16
    return (VecF)_mm512_maskz_sqrt_ps(0xffff, (__m512)x);
#elif FUSEDRNN_LANES == 8
    return (VecF)_mm256_sqrt_ps((__m256)x);
#elif defined(__x86_64__)
    return (VecF)_mm_sqrt_ps((__m128)x);
#else
    for (int i = 0; i < kLanes; ++i) x[i] = ::sqrtf(x[i]);
    return x;
#endif
  }
  static FUSEDRNN_HD VecF max(VecF bound, VecF x) {
#if FUSEDRNN_LANES == 16
    return (VecF)_mm512_maskz_max_ps(0xffff, (__m512)bound, (__m512)x);
#elif FUSEDRNN_LANES == 8
    return (VecF)_mm256_max_ps((__m256)bound, (__m256)x);
#elif defined(__x86_64__)
    return (VecF)_mm_max_ps((__m128)bound, (__m128)x);
#else
    return bound > x ? bound : x;
#endif
  }
};

// A word in the low half of each 64-bit lane. The high halves may hold anything: the multiplication
// does not read them, which saves masking. (A compiler does not know that only the low halves
// count; with its product of 64-bit lanes a normal takes about twice as long.)
template <>
struct WideMul<VecU64> {
  static FUSEDRNN_HD void mul(uint32_t a, VecU64 b, VecU64& hi, VecU64& lo) {
    const VecU64 wide_a = a + VecU64{};
#if FUSEDRNN_LANES == 16
    lo = (VecU64)_mm512_maskz_mul_epu32(0xff, (__m512i)wide_a, (__m512i)b);
#elif FUSEDRNN_LANES == 8
    lo = (VecU64)_mm256_mul_epu32((__m256i)wide_a, (__m256i)b);
#elif defined(__x86_64__)
    lo = (VecU64)_mm_mul_epu32((__m128i)wide_a, (__m128i)b);
#else
    lo = wide_a * (b & 0xffffffffu);
#endif
    hi = lo >> 32;
  }
};

// Even and odd lanes are computed separately, as the multiplication needs them.
template <>
struct Philox4x32<VecU> {
  static FUSEDRNN_HD void apply(VecU (&counter)[4], uint32_t key0, uint32_t key1) {
    VecU64 even[4], odd[4];
    for (int i = 0; i < 4; ++i) {
      even[i] = (VecU64)counter[i];
      odd[i] = (VecU64)counter[i] >> 32;
    }
    Philox4x32<VecU64>::apply(even, key0, key1);
    Philox4x32<VecU64>::apply(odd, key0, key1);
    for (int i = 0; i < 4; ++i) counter[i] = (VecU)((even[i] & 0xffffffffu) | (odd[i] << 32));
  }
};

inline namespace FUSEDRNN_ISA {

#if FUSEDRNN_LANES == 8
// -1 in the first n lanes, 0 in the others.
FUSEDRNN_HD VecI first_lanes(int64_t n) {
  constexpr VecI kLane = {0, 1, 2, 3, 4, 5, 6, 7};
  return kLane < static_cast<int32_t>(n);
}
#endif

// The first n floats at p, and zeros in the other lanes; memory beyond them is not touched. A part
// of a row is computed by the same arithmetic as whole vectors, so the bits of an element do not
// depend on where its row ends. (Masks are used where the instruction set has them: a copy of n
// floats through memory takes about 25 ns.)
FUSEDRNN_HD VecF load(const float* p, int64_t n = kLanes) {
  VecF x{};
  if (n >= kLanes) {
    memcpy(&x, p, sizeof x);
    return x;
  }
#if FUSEDRNN_LANES == 16
  return (VecF)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
#elif FUSEDRNN_LANES == 8
  return (VecF)_mm256_maskload_ps(p, (__m256i)first_lanes(n));
#else
  memcpy(&x, p, static_cast<size_t>(n) * sizeof(float));
  return x;
#endif
}

FUSEDRNN_HD void store(float* p, VecF x, int64_t n = kLanes) {
  if (n >= kLanes) {
    memcpy(p, &x, sizeof x);
    return;
  }
#if FUSEDRNN_LANES == 16
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), (__m512)x);
#elif FUSEDRNN_LANES == 8
  _mm256_maskstore_ps(p, (__m256i)first_lanes(n), (__m256)x);
#else
  memcpy(p, &x, static_cast<size_t>(n) * sizeof(float));
#endif
}

// The same of the 16-bit types of scalar.h.
template <class T>
FUSEDRNN_HD VecF load(const T* p, int64_t n = kLanes) {
  uint16_t bits[kLanes] = {};
  memcpy(bits, p, static_cast<size_t>(n) * sizeof(T));
  VecU words{};
  for (int i = 0; i < kLanes; ++i) words[i] = bits[i];
  return T::template widen<VecF>(words);
}

template <class T>
FUSEDRNN_HD void store(T* p, VecF x, int64_t n = kLanes) {
  const VecU words = T::narrow(x);
  uint16_t bits[kLanes];
  for (int i = 0; i < kLanes; ++i) bits[i] = static_cast<uint16_t>(words[i]);
  memcpy(p, bits, static_cast<size_t>(n) * sizeof(T));
}

FUSEDRNN_HD int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The lanes I of a and b interleaved, in each group of four lanes alike: pieces of kPiece lanes (1
// or 2), alternately from half kHalf of a's group and half kHalf of b's.
template <int kPiece, int kHalf, class V, int... I>
FUSEDRNN_HD V interleave(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int kCount = sizeof...(I);
  return __builtin_shufflevector(
      a, b,
      (I / 4 * 4 + 2 * kHalf + (kPiece == 1 ? I % 4 / 2 : I % 2) + I / kPiece % 2 * kCount)...);
}

// Writes the numbers of columns 4 block .. 4 block + n - 1 of one row; see draw4.
template <class Distribution>
FUSEDRNN_HD void draws(float* out, int64_t n, uint64_t seed, uint32_t t, uint32_t b, uint32_t block,
                       uint32_t stream) {
  // draw4 puts column 4 block[i] + j in lane i of vector j. A transpose within each group of four
  // lanes puts the columns of a block next to each other: the columns of group g's i-th lane go to
  // group g of vector i. With blocks numbered as below, that is the order of the columns.
  VecU offset;
  for (int i = 0; i < kLanes; ++i) offset[i] = kLanes / 4 * (i % 4) + i / 4;
  constexpr std::make_integer_sequence<int, kLanes> kAll;
  for (; n > 0; n -= 4 * kLanes, out += 4 * kLanes, block += kLanes) {
    VecF unit[4];
    draw4<Distribution, VecF>(seed, t, b, block + offset, stream, unit);
    const VecF lo01 = interleave<1, 0>(unit[0], unit[1], kAll);
    const VecF hi01 = interleave<1, 1>(unit[0], unit[1], kAll);
    const VecF lo23 = interleave<1, 0>(unit[2], unit[3], kAll);
    const VecF hi23 = interleave<1, 1>(unit[2], unit[3], kAll);
    const VecF row[4] = {interleave<2, 0>(lo01, lo23, kAll), interleave<2, 1>(lo01, lo23, kAll),
                         interleave<2, 0>(hi01, hi23, kAll), interleave<2, 1>(hi01, hi23, kAll)};
    for (int i = 0; i < 4 && i * kLanes < n; ++i) store(out + i * kLanes, row[i], n - i * kLanes);
  }
}

// The same of standard normals, the noise of latent units.
FUSEDRNN_HD void normals(float* out, int64_t n, uint64_t seed, uint32_t t, uint32_t b,
                         uint32_t block, uint32_t layer) {
  draws<Normal>(out, n, seed, t, b, block, layer);
}

}  // namespace FUSEDRNN_ISA
}  // namespace fusedrnn
