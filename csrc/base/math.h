// Elementary functions of the cells, written once for one float and for a CPU vector of floats.
//
// The float versions are branch-free polynomial code, so the same source serves a CUDA thread, a
// scalar on the CPU and all lanes of a vector, and a value does not depend on the lane it sits in.
// They do not need -ffast-math; they want a*b + c contracted to a fused multiply-add, and every sum
// here has at most one product as an operand, so that the contraction is never ambiguous and scalar
// and vector code round alike. The double versions are those of the C library.
//
// Errors are stated in units in the last place (ulp), for float with fused multiply-add; without it
// they grow by a third at most.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "hd.h"

namespace fusedrnn {

// What the code below needs to know about a float-like type F. Int and UInt have F's lanes and
// width; Word is the matching 32-bit type in which random numbers are drawn.
template <class F>
struct Traits;

template <>
struct Traits<float> {
  using Int = int32_t;
  using UInt = uint32_t;
  using Word = uint32_t;
  static FUSEDRNN_HD UInt bits(float x) {
    UInt u;
    memcpy(&u, &x, sizeof u);
    return u;
  }
  static FUSEDRNN_HD float from_bits(UInt u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
  }
  static FUSEDRNN_HD float from_int(Int i) { return static_cast<float>(i); }
  static FUSEDRNN_HD float sqrt(float x) { return ::sqrtf(x); }
  // NaN in x stays NaN; a denormal x may become 0 where they are flushed.
  static FUSEDRNN_HD float max(float bound, float x) { return bound > x ? bound : x; }
};

template <>
struct Traits<double> {
  using Int = int64_t;
  using UInt = uint64_t;
  using Word = uint32_t;
  static FUSEDRNN_HD UInt bits(double x) {
    UInt u;
    memcpy(&u, &x, sizeof u);
    return u;
  }
  static FUSEDRNN_HD double from_bits(UInt u) {
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
  }
  static FUSEDRNN_HD double from_int(Int i) { return static_cast<double>(i); }
  static FUSEDRNN_HD double sqrt(double x) { return ::sqrt(x); }
};

namespace math {

// All lanes equal to x. (x - 0 is x for every x, also for -0, so this costs nothing.)
template <class F>
FUSEDRNN_HD F splat(float x) {
  return x - F{};
}

// mask is the result of comparing two F: bool for a scalar, a vector of 0 and -1 for a vector.
template <class M, class F>
FUSEDRNN_HD F select(M mask, F a, F b) {
  return mask ? a : b;
}

// A NaN in x stays a NaN in min(x, b) and max(x, b).
template <class F>
FUSEDRNN_HD F min(F x, float b) {
  return select(x > b, splat<F>(b), x);
}

template <class F>
FUSEDRNN_HD F max(F x, float b) {
  return select(x < b, splat<F>(b), x);
}

template <class F>
FUSEDRNN_HD F sqrt(F x) {
  return Traits<F>::sqrt(x);
}

namespace detail {

// c + c1 x + c2 x^2 + ..., by Horner's rule.
template <class F>
FUSEDRNN_HD F horner(F, float c) {
  return splat<F>(c);
}

template <class F, class... Rest>
FUSEDRNN_HD F horner(F x, float c, Rest... rest) {
  return horner(x, rest...) * x + c;
}

// max in one instruction instead of three, for where a denormal x may count as 0.
template <class F>
FUSEDRNN_HD F at_least(F x, float b) {
  return Traits<F>::max(splat<F>(b), x);
}

constexpr float kLog2E = 0x1.715476p+0f;
// ln 2 = kLn2Hi + kLn2Lo; kLn2Hi has 15 bits, so that its product with a float's exponent is exact
// also where there is no fused multiply-add.
constexpr float kLn2Hi = 0x1.62e4p-1f;
constexpr float kLn2Lo = 0x1.7f7d1cp-20f;

// Adding 1.5 * 2^23 rounds a float of magnitude below 2^22 to an integer and leaves that integer in
// the low bits of the sum.
constexpr float kRound = 0x1.8p+23f;

// For x in [-87.5, 89] or NaN: e^x = 2^n e^r with |r| <= ln 2 / 2.  Returns q where 2 e^r = 2 + r
// q; scale is 2^(n - 1): so n = 128 is reached with a finite scale, and n = -126 meets the scale 0.
template <class F>
FUSEDRNN_HD F exp_parts(F x, F& r, F& scale) {
  using T = Traits<F>;
  constexpr float kRoundBiased = kRound + 126.0f;
  const F shifted = x * kLog2E + kRoundBiased;
  const F n = shifted - kRoundBiased;
  r = (x - n * kLn2Hi) - n * kLn2Lo;
  scale = T::from_bits(T::bits(shifted) << 23);
  // 2 (1 + r + r^2 ...) on |r| <= ln 2 / 2, error of e^r below 5e-9.
  return horner(r, 2.0f, 1.0f, 2 * 0x1.5554b2p-3f, 2 * 0x1.5554c8p-5f, 2 * 0x1.12267ep-7f,
                2 * 0x1.6d7216p-10f);
}

// e^x for x in [-87.5, 89] or NaN.  For n = 128 the product overflows to inf by itself.  A result
// is 0 or a normal number, never denormal, so it is the same whether or not denormals are flushed
// to 0.
template <class F>
FUSEDRNN_HD F exp_in_range(F x) {
  F r, scale;
  const F q = exp_parts(x, r, scale);
  return (q * r + 2.0f) * scale;
}

// 1 / x for x in [1, 2] or NaN, rounded to nearest.
template <class F>
FUSEDRNN_HD F reciprocal(F x) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<F, float>) {
    // Gives the same bits as a division. The compiler's division branches to a function for numbers
    // that do not occur here, and then the functions of several gates could not be computed at the
    // same time.
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return fmaf(r, -fmaf(x, r, -1.0f), r);
  }
#endif
  return 1.0f / x;
}

// For x <= 0: returns sigmoid(-x), and sets `small` to sigmoid(x). Both are computed from e^x,
// which is at most 1, so nothing overflows, and `small` is 0 where e^x is 0. The usual 1 / (e^-x +
// 1) would be a denormal number there, which the processor may or may not flush to 0, and a huge
// state would make it large.
template <class F>
FUSEDRNN_HD F sigmoid_of_minus(F x, F& small) {
  F e;
  if constexpr (std::is_same_v<F, double>) {
    e = ::exp(x);
  } else {
    e = exp_in_range(at_least(x, -87.5f));
  }
  small = e * reciprocal(e + 1.0f);
  return 1.0f - small;  // near 1 more accurate than 1 / (1 + e), because e + 1 has been rounded
}

// -|x|
template <class F>
FUSEDRNN_HD F minus_size(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return -::fabs(x);
  } else {
    return Traits<F>::from_bits(Traits<F>::bits(x) | 0x80000000u);
  }
}

}  // namespace detail

// Within 0.95 ulp. Results below 1.7e-38 are 0; overflow gives inf, NaN stays NaN.
template <class F>
FUSEDRNN_HD F exp(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::exp(x);
  } else {
    return detail::exp_in_range(min(detail::at_least(x, -87.5f), 89.0f));
  }
}

// sigmoid(x), and 1 - sigmoid(x) without the cancellation of a subtraction. Both are within 2.8
// ulp, also in the tails; values below 1.7e-38 become 0.
template <class F>
FUSEDRNN_HD F sigmoid(F x, F& complement) {
  F small;
  const F large = detail::sigmoid_of_minus(detail::minus_size(x), small);
  const auto is_negative = x < 0.0f;
  complement = select(is_negative, large, small);
  return select(is_negative, small, large);
}

template <class F>
FUSEDRNN_HD F sigmoid(F x) {
  F complement;
  return sigmoid(x, complement);
}

// tanh(x) within 1.5 ulp, and derivative = 1 - tanh(x)^2 without cancellation, within 4.1 ulp; a
// derivative below 6.8e-38 becomes 0. Near 0 the result is a polynomial, elsewhere 1 - 2 sigmoid(-2
// |x|); both are always computed, so there is no branch.
template <class F>
FUSEDRNN_HD F tanh(F x, F& derivative) {
  const F minus_a = detail::minus_size(x);
  F t;
  const F not_t = detail::sigmoid_of_minus(minus_a + minus_a, t);
  const F far_derivative = (4.0f * t) * not_t;
  if constexpr (std::is_same_v<F, double>) {
    derivative = far_derivative;
    return ::tanh(x);
  } else {
    using T = Traits<F>;
    const auto sign = T::bits(x) & 0x80000000u;
    const F a = T::from_bits(T::bits(x) ^ sign);
    // |x| + |x|^3 p(x^2) for |x| <= 0.55, relative error below 3.8e-8.
    const F z = a * a;
    const F p = detail::horner(z, -0x1.555452p-2f, 0x1.10cefap-3f, -0x1.af7cf4p-5f, 0x1.0d506cp-6f);
    const F small = (a * z) * p + a;
    // From 0.55 on tanh is above 1/2, so t is below 1/4 and its rounding errors count half.
    const auto is_small = a < 0.55f;
    derivative = select(is_small, 1.0f - small * small, far_derivative);
    return T::from_bits(T::bits(select(is_small, small, 1.0f - 2.0f * t)) | sign);
  }
}

template <class F>
FUSEDRNN_HD F tanh(F x) {
  F derivative;
  return tanh(x, derivative);
}

namespace detail {

// x = 2^n (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), for positive normal numbers. Returns log(1 +
// f).
template <class F>
FUSEDRNN_HD F log_parts(F x, F& n) {
  using T = Traits<F>;
  const auto ix = T::bits(x) - 0x3f3504f3u;
  n = T::from_int((typename T::Int)ix >> 23);
  const F f = T::from_bits(T::bits(x) - (ix & 0xff800000u)) - 1.0f;
  // f + f^2 (-1/2 + f p(f)), relative error below 6e-9.
  const F p = horner(f, -0.5f, 0x1.55554ap-2f, -0x1.00021ep-2f, 0x1.99a5a6p-3f, -0x1.5478fcp-3f,
                     0x1.226d90p-3f, -0x1.0cdc4cp-3f, 0x1.07d356p-3f, -0x1.42065ap-4f);
  return (f * f) * p + f;
}

}  // namespace detail

// Within 1 ulp, for positive normal numbers; log(1) is exactly 0. In float anything else (0,
// negative, denormal, inf, NaN) gives a meaningless number.
template <class F>
FUSEDRNN_HD F log(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::log(x);
  } else {
    F n;
    const F part = detail::log_parts(x, n);
    return (part + n * detail::kLn2Lo) + n * detail::kLn2Hi;
  }
}

// s = sin(pi x), c = cos(pi x) for x in [-1, 1], each within 7e-8 in float.
template <class F>
FUSEDRNN_HD void sincospi(F x, F& s, F& c) {
  if constexpr (std::is_same_v<F, double>) {
#if defined(__CUDA_ARCH__)  // ::sin would take stack memory for large angles, which do not occur
                            // here
    ::sincospi(x, &s, &c);
#else
    constexpr double kPi = 3.14159265358979323846;
    s = ::sin(kPi * x);
    c = ::cos(kPi * x);
#endif
  } else {
    using T = Traits<F>;
    // x = k / 2 + r with |r| <= 1/4, exactly; k counts quarter turns.
    const F shifted = x * 2.0f + detail::kRound;
    const auto k = T::bits(shifted);
    const F r = x - (shifted - detail::kRound) * 0.5f;
    const F z = r * r;
    // sin(pi r) = r p(r^2) and cos(pi r), absolute errors below 6e-9 and 1e-9.
    const F sin_r =
        r * detail::horner(z, 0x1.921fb4p+1f, -0x1.4abb68p+2f, 0x1.46496cp+1f, -0x1.2a763cp-1f);
    const F cos_r =
        detail::horner(z, 1.0f, -0x1.3bd3ccp+2f, 0x1.03c1acp+2f, -0x1.55afbcp+0f, 0x1.d3ef18p-3f);
    const auto odd = (k & 1u) != 0u;
    s = T::from_bits(T::bits(select(odd, cos_r, sin_r)) ^ ((k & 2u) << 30));
    c = T::from_bits(T::bits(select(odd, sin_r, cos_r)) ^ (((k + 1u) & 2u) << 30));
  }
}

}  // namespace math
}  // namespace fusedrnn
