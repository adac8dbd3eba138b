// The functions that a generated stage may call, in the namespace `math` as the stage sees it:
// those of base/math.h, and here the others, or such as base/math.h has for a part of all numbers
// only.
//
// As there: written once for a float and a vector of floats, without branches, in double those of
// the C library; errors are stated in ulp.  Unlike there, 0, negative numbers, inf and NaN give
// what torch gives.  Where denormals are flushed to 0, a denormal argument counts as 0.
//
// A function of several arguments takes the same type for all: printed code writes A(...) around
// each, because an expression of two vectors may have another type than its operands.
#pragma once
#include "../base/math.h"

namespace fusedrnn::program {

// Masks are results of comparisons: bool for a number, a vector of 0 and -1 for a vector.
template <class M>
FUSEDRNN_HD M mask_and(M a, M b) {
  return a & b;
}
template <class M>
FUSEDRNN_HD M mask_or(M a, M b) {
  return a | b;
}
template <class M>
FUSEDRNN_HD M mask_not(M a) {
  if constexpr (std::is_same_v<M, bool>) {
    return !a;
  } else {
    return ~a;
  }
}

namespace math {

using namespace fusedrnn::math;

template <class F>
FUSEDRNN_HD F abs(F x) {
  using T = Traits<F>;
  if constexpr (std::is_same_v<F, double>) {
    return ::fabs(x);
  } else {
    return T::from_bits(T::bits(x) & 0x7fffffffu);
  }
}

// 1, -1, or 0 for 0 and NaN.
template <class F>
FUSEDRNN_HD F sign(F x) {
  return select(x > 0.0f, F{} + 1.0f, select(x < 0.0f, F{} - 1.0f, F{}));
}

// The smaller and the larger of two numbers, NaN if one of them is.
template <class F>
FUSEDRNN_HD F min2(F a, F b) {
  return select((a < b) | (a != a), a, b);
}
template <class F>
FUSEDRNN_HD F max2(F a, F b) {
  return select((a > b) | (a != a), a, b);
}

namespace detail {

using namespace fusedrnn::math::detail;

constexpr float kInf = HUGE_VALF;

// `size`, at least 0, with the sign of x.
template <class F>
FUSEDRNN_HD F with_sign_of(F x, F size) {
  using T = Traits<F>;
  return T::from_bits(T::bits(size) | (T::bits(x) & 0x80000000u));
}

// The nearest integer of x >= 0, the even one of two.  Beyond 2^23 all floats are integers.
template <class F>
FUSEDRNN_HD F nearest(F x) {
  return select(x < 0x1p23f, F((x + 0x1p23f) - 0x1p23f), x);
}

}  // namespace detail

// These five are exact.  0 and results of 0 keep the sign of x.
template <class F>
FUSEDRNN_HD F round(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::rint(x);
  } else {
    return detail::with_sign_of(x, detail::nearest(abs(x)));
  }
}

template <class F>
FUSEDRNN_HD F trunc(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::trunc(x);
  } else {
    const F size = abs(x), n = detail::nearest(size);
    return detail::with_sign_of(x, select(n > size, F(n - 1.0f), n));
  }
}

template <class F>
FUSEDRNN_HD F floor(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::floor(x);
  } else {
    const F n = round(x);
    return select(n > x, F(n - 1.0f), n);
  }
}

template <class F>
FUSEDRNN_HD F ceil(F x) {
  return -floor(F(-x));
}

// 1 / sqrt(x), within 2 ulp.
template <class F>
FUSEDRNN_HD F rsqrt(F x) {
#if defined(__CUDA_ARCH__)
  return ::rsqrt(x);
#else
  return 1.0f / sqrt(x);
#endif
}

// Within 1.1 ulp, for all numbers.
template <class F>
FUSEDRNN_HD F log(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::log(x);
  } else {
    const auto is_denormal = x < 0x1p-126f;
    const F scaled = select(is_denormal, F(x * 0x1p23f), x);
    const F shift = select(is_denormal, F{} - 0x1.fe2804p+3f, F{});  // -23 ln 2
    const F y = fusedrnn::math::log(scaled) + shift;
    const F special = select(x == 0.0f, F{} - detail::kInf, select(x > 0.0f, x, F{} + NAN));
    return select(mask_and(scaled > 0.0f, x < detail::kInf), y, special);
  }
}

// log(1 + x), within 2 ulp.
template <class F>
FUSEDRNN_HD F log1p(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::log1p(x);
  } else {
    // The logarithm of u, which is 1 + x rounded, and the derivative 1 / u times what was lost.
    const F u = x + 1.0f;
    const F lost = x - (u - 1.0f);
    const F y = log(u);
    const F corrected = select(mask_and(u > 0.0f, u < detail::kInf), F(y + lost / u), y);
    return select(u == 1.0f, x, corrected);
  }
}

// e^x - 1, within 2.2 ulp.
template <class F>
FUSEDRNN_HD F expm1(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::expm1(x);
  } else {
    // 2^n e^r - 1 = 2^n (e^r - 1) + (2^n - 1), all halved, so that it overflows where it should.
    F r, half_scale;
    const F q = detail::exp_parts(min(max(x, -87.5f), 89.0f), r, half_scale);
    const F p = (q * r) * 0.5f;
    const F half = half_scale * p + (half_scale - 0.5f);
    return select(half_scale == 0.5f, p, F(half + half));
  }
}

// log(1 + e^x), within 2.2 ulp.
template <class F>
FUSEDRNN_HD F softplus(F x) {
  const F tail = log1p(exp(F(-abs(x))));
  return max(x, 0.0f) + tail;
}

// The error function, within 1.6 ulp.
template <class F>
FUSEDRNN_HD F erf(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::erf(x);
  } else {
    // |x| (1 + p(x^2)) for |x| <= 0.9375, relative error below 1e-9.  (|x| + |x| p would lose a
    // part that is denormal.)
    const F a = abs(x), z = a * a;
    const F p = detail::horner(z, 0x1.06eba8p-3f, -0x1.812740p-2f, 0x1.ce2d64p-4f, -0x1.b80120p-6f,
                               0x1.544aa8p-8f, -0x1.a6126ep-11f, 0x1.4f8e58p-14f);
    // 1 - e^q(|x|) beyond, relative error below 4e-11; it is 1 from 3.92 on.
    const F far = min(a, 4.0f);
    const F q =
        detail::horner(far, 0x1.77fbd6p-13f, -0x1.212956p+0f, -0x1.444036p-1f, -0x1.bbb744p-4f,
                       0x1.9c138ep-6f, -0x1.122586p-8f, 0x1.ca31aap-12f, -0x1.659320p-16f);
    const F large = 1.0f - detail::exp_in_range(q);
    return detail::with_sign_of(x, select(a <= 0.9375f, F(a * (p + 1.0f)), large));
  }
}

namespace detail {

// Doubles and integers with the lanes of F.
template <class F>
struct Lanes {
#if !defined(__CUDACC__)  // a GPU has no vectors
  typedef double Double __attribute__((vector_size(2 * sizeof(F))));
  static FUSEDRNN_HD Double widen(F x) { return __builtin_convertvector(x, Double); }
  static FUSEDRNN_HD F narrow(Double x) { return __builtin_convertvector(x, F); }
  static FUSEDRNN_HD typename Traits<F>::UInt count(Double x) {
    return (typename Traits<F>::UInt) __builtin_convertvector(x, typename Traits<F>::Int);
  }
#endif
};
template <>
struct Lanes<float> {
  using Double = double;
  static FUSEDRNN_HD double widen(float x) { return x; }
  static FUSEDRNN_HD float narrow(double x) { return static_cast<float>(x); }
  static FUSEDRNN_HD uint32_t count(double x) { return static_cast<uint32_t>(int32_t(x)); }
};

// y, with f(x) in the lanes of the mask; these are few, or f is costly.
template <class F, class M, class Function>
FUSEDRNN_HD F replaced(M mask, F x, F y, const Function& f) {
  if constexpr (std::is_same_v<F, float>) {
    return mask ? f(x) : y;
  } else {
    constexpr int kWords = sizeof(F) / sizeof(uint64_t);
    uint64_t words[kWords], any = 0;
    memcpy(words, &mask, sizeof words);
    for (int i = 0; i < kWords; ++i) any |= words[i];
    if (any != 0) {
      for (size_t i = 0; i < sizeof(F) / sizeof(float); ++i) {
        if (mask[i]) y[i] = f(x[i]);
      }
    }
    return y;
  }
}

// sin(x + quarters pi / 2) for x >= 0; `size` has the sign of the result removed.
template <class F>
FUSEDRNN_HD F sin_of_size(F x, uint32_t quarters) {
  using T = Traits<F>;
  using L = Lanes<F>;
  using D = typename L::Double;
  // x = k pi / 2 + r with |r| <= pi / 4, in double: the product with the first 31 bits of pi / 2 is
  // exact, and the error of r below 1e-12 of the smallest r that a float can have.
  constexpr double kRoundDouble = 0x1.8p+52;
  const D wide = L::widen(x);
  const D k = (wide * 0x1.45f306dc9c883p-1 + kRoundDouble) - kRoundDouble;
  const F r = L::narrow((wide - k * 0x1.921fb544p+0) - k * 0x1.0b4611a626331p-34);
  const auto quarter = L::count(k) + quarters;
  const F z = r * r;
  // sin and cos of r, errors below 2e-10 and 2e-10.
  const F p = horner(z, -0x1.555556p-3f, 0x1.111174p-7f, -0x1.a05956p-13f, 0x1.7c2da4p-19f);
  const F sin_r = (r * z) * p + r;
  const F q = horner(z, -0.5f, 0x1.55554ap-5f, -0x1.6c0c28p-10f, 0x1.99e80cp-16f);
  const F cos_r = q * z + 1.0f;
  const F size = select((quarter & 1u) != 0u, cos_r, sin_r);
  return T::from_bits(T::bits(size) ^ ((quarter & 2u) << 30));
}

constexpr float kLargeAngle = 0x1p20f;  // the C library reduces larger ones, a lane at a time

}  // namespace detail

// Each within 1.6 ulp.
template <class F>
FUSEDRNN_HD F sin(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::sin(x);
  } else {
    using T = Traits<F>;
    const auto is_large = !(abs(x) <= detail::kLargeAngle);  // or NaN
    const F size = detail::sin_of_size(select(is_large, F{}, abs(x)), 0);
    const F y = T::from_bits(T::bits(size) ^ (T::bits(x) & 0x80000000u));
    return detail::replaced(is_large, x, y, [](float of) { return ::sinf(of); });
  }
}

template <class F>
FUSEDRNN_HD F cos(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::cos(x);
  } else {
    const auto is_large = !(abs(x) <= detail::kLargeAngle);  // or NaN
    const F y = detail::sin_of_size(select(is_large, F{}, abs(x)), 1);
    return detail::replaced(is_large, x, y, [](float of) { return ::cosf(of); });
  }
}

// That of the C library.  A power with a constant exponent is better printed as products.
template <class F>
FUSEDRNN_HD F pow(F x, F y) {
  if constexpr (std::is_same_v<F, double>) {
    return ::pow(x, y);
  } else if constexpr (std::is_same_v<F, float>) {
    return ::powf(x, y);
  } else {
    F power;
    for (size_t i = 0; i < sizeof(F) / sizeof(float); ++i) power[i] = ::powf(x[i], y[i]);
    return power;
  }
}

}  // namespace math
}  // namespace fusedrnn::program
