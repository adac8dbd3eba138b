// More functions that a generated stage may call, which few steps have: inverse functions of
// angles, logarithms and powers of other bases, hyperbolic functions, remainders.
//
// As in functions.h.
#pragma once
#include "functions.h"

namespace fusedrnn::program::math {

namespace detail {

constexpr float kPi = 0x1.921fb6p+1f, kPiLo = -0x1.777a5cp-24f;  // pi is their sum

// turns * pi + sign * atan(t) for t in [0, 1], sign 1 or -1 and turns 0, 0.5 or 1. It is rounded
// once, but for small parts: what the sum with t loses is in `lost`.
template <class F>
FUSEDRNN_HD F angle_and_atan(F turns, F sign, F t) {
  const F u = sign * t, z = t * t;
  const F p = horner(z, -0x1.555554p-2f, 0x1.999910p-3f, -0x1.2487f2p-3f, 0x1.c64d3ep-4f,
                     -0x1.6f7a38p-4f, 0x1.27c840p-4f, -0x1.b8feeap-5f, 0x1.13f27cp-5f,
                     -0x1.01b0cap-6f, 0x1.338244p-8f, -0x1.582150p-11f);
  const F angle = turns * kPi, sum = angle + u, lost = (angle - sum) + u;
  return sum + ((lost + turns * kPiLo) + (u * z) * p);
}

// asin(t) for t = sqrt(z) in [0, 0.5625], relative error below 2e-10.
template <class F>
FUSEDRNN_HD F asin_of_part(F t, F z) {
  const F p = horner(z, 0x1.55555ap-3f, 0x1.333054p-4f, 0x1.6e4eaep-5f, 0x1.e31876p-6f,
                     0x1.cdba00p-6f, -0x1.484ec8p-9f, 0x1.757c8cp-5f);
  return (t * z) * p + t;
}

// Whether the sign of x is -, also that of 0.
template <class F>
FUSEDRNN_HD auto is_minus(F x) {
  return (Traits<F>::bits(x) & 0x80000000u) != 0u;
}

// e^x / 2 for x >= 0 or NaN: finite also where e^x is not.
template <class F>
FUSEDRNN_HD F half_exp(F x) {
  using T = Traits<F>;
  F r, half_scale;
  const F q = exp_parts(min(x, 90.0f), r, half_scale);
  const F quarter_scale = T::from_bits(T::bits(half_scale) - 0x00800000u);
  const F quarter = ((q * r) * 0.5f + 1.0f) * quarter_scale;
  return quarter + quarter;
}

// log(x) / log(2) times a number, for all x.
template <class F>
FUSEDRNN_HD F log_of_base(F x, double scale) {
  using L = Lanes<F>;
  const auto is_denormal = x < 0x1p-126f;
  const F scaled = select(is_denormal, F(x * 0x1p23f), x);
  F n;
  const F part = fusedrnn::math::detail::log_parts(scaled, n);
  const F whole = n + select(is_denormal, F{} - 23.0f, F{});
  // In double, so that powers of the base are exact.
  const F y = L::narrow((L::widen(part) * 0x1.71547652b82fep+0 + L::widen(whole)) * scale);
  const F special = select(x == 0.0f, F{} - kInf, select(x > 0.0f, x, F{} + NAN));
  return select(mask_and(scaled > 0.0f, x < kInf), y, special);
}

}  // namespace detail

// Within 1.5 ulp.
template <class F>
FUSEDRNN_HD F atan(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::atan(x);
  } else {
    const F a = abs(x);
    const auto is_large = a > 1.0f;
    const F one = F{} + 1.0f, t = select(is_large, F(1.0f / a), a);
    const F turns = select(is_large, 0.5f * one, F{}), sign = select(is_large, -one, one);
    return detail::with_sign_of(x, detail::angle_and_atan(turns, sign, t));
  }
}

// The angle of the point (x, y), within 1.5 ulp.
template <class F>
FUSEDRNN_HD F atan2(F y, F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::atan2(y, x);
  } else {
    const F a = abs(x), b = abs(y);
    const auto is_steep = b > a;
    const F most = select(is_steep, b, a), least = select(is_steep, a, b);
    // 0 / 0 is 0, and a quotient of infinities 1.
    const F t = select(least == most, select(most == 0.0f, F{}, F{} + 1.0f), F(least / most));
    const F one = F{} + 1.0f;
    const F level = select(detail::is_minus(x), one, F{}), sign = one - 2.0f * level;
    const F turns = select(is_steep, 0.5f * one, level);
    const F r = detail::angle_and_atan(turns, select(is_steep, -sign, sign), t);
    const auto is_nan = mask_or(x != x, y != y);
    return select(is_nan, F(x + y), detail::with_sign_of(y, r));
  }
}

// Within 1.5 ulp; NaN beyond 1.
template <class F>
FUSEDRNN_HD F asin(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::asin(x);
  } else {
    const F a = abs(x);
    const auto is_large = a > 0.5625f;
    const F z = select(is_large, F(0.5f - 0.5f * a), F(a * a));
    const F r = detail::asin_of_part(F(select(is_large, sqrt(z), a)), z);
    const F from_above = 0.5f * detail::kPi - (2.0f * r - 0.5f * detail::kPiLo);
    return detail::with_sign_of(x, select(is_large, from_above, r));
  }
}

// Within 1.5 ulp; NaN beyond 1.
template <class F>
FUSEDRNN_HD F acos(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::acos(x);
  } else {
    const F a = abs(x);
    const auto is_large = a > 0.5625f;
    const F z = select(is_large, F(0.5f - 0.5f * a), F(a * a));
    const F r = detail::asin_of_part(F(select(is_large, sqrt(z), a)), z);
    const F signed_r = detail::with_sign_of(x, r);
    const F twice = r + r;
    const F from_ends = select(x < 0.0f, F(detail::kPi - (twice - detail::kPiLo)), twice);
    const F from_middle = 0.5f * detail::kPi - (signed_r - 0.5f * detail::kPiLo);
    return select(is_large, from_ends, from_middle);
  }
}

// Within 1.7 ulp.
template <class F>
FUSEDRNN_HD F sinh(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::sinh(x);
  } else {
    const F a = abs(x);
    // |x| + |x|^3 p(x^2) for |x| <= 1, relative error below 4e-10.
    const F z = a * a;
    const F p = detail::horner(z, 0x1.555556p-3f, 0x1.1110ecp-7f, 0x1.a01ad0p-13f, 0x1.76ac86p-19f);
    const F small = (a * z) * p + a;
    const F e = detail::half_exp(a);
    return detail::with_sign_of(x, select(a <= 1.0f, small, F(e - 0.25f / e)));
  }
}

// Within 1.7 ulp.
template <class F>
FUSEDRNN_HD F cosh(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::cosh(x);
  } else {
    const F e = detail::half_exp(F(abs(x)));
    return e + 0.25f / e;
  }
}

// 2^x, within 0.95 ulp. Results below 1.7e-38 are 0.
template <class F>
FUSEDRNN_HD F exp2(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::exp2(x);
  } else {
    using T = Traits<F>;
    constexpr float kRoundBiased = detail::kRound + 126.0f;
    const F bounded = min(detail::at_least(x, -126.5f), 129.0f);
    const F shifted = bounded + kRoundBiased;
    const F r = bounded - (shifted - kRoundBiased);
    const F scale = T::from_bits(T::bits(shifted) << 23);
    // 2 * 2^r = 2 + r q(r) for |r| <= 1/2, error of 2^r below 4e-9.
    const F q = detail::horner(r, 0x1.62e430p+0f, 0x1.ebfbe0p-2f, 0x1.c6af72p-4f, 0x1.3b2a48p-6f,
                               0x1.5f0dccp-9f, 0x1.4424b0p-12f);
    return (q * r + 2.0f) * scale;
  }
}

// Each within 1.6 ulp, for all numbers; powers of the base give integers.
template <class F>
FUSEDRNN_HD F log2(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::log2(x);
  } else {
    return detail::log_of_base(x, 1.0);
  }
}

template <class F>
FUSEDRNN_HD F log10(F x) {
  if constexpr (std::is_same_v<F, double>) {
    return ::log10(x);
  } else {
    return detail::log_of_base(x, 0x1.34413509f79ffp-2);
  }
}

namespace detail {

// f of each two lanes.
template <class F, class Function>
FUSEDRNN_HD F of_lanes(F x, F y, const Function& f) {
  if constexpr (std::is_same_v<F, float>) {
    return f(x, y);
  } else {
    F made;
    for (size_t i = 0; i < sizeof(F) / sizeof(float); ++i) made[i] = f(x[i], y[i]);
    return made;
  }
}

}  // namespace detail

// sqrt(x^2 + y^2) without overflow in between, rounded to nearest: squares of floats are exact in
// double.
template <class F>
FUSEDRNN_HD F hypot(F x, F y) {
  if constexpr (std::is_same_v<F, double>) {
    return ::hypot(x, y);
  } else {
    const F length = detail::of_lanes(
        x, y, [](double a, double b) { return static_cast<float>(::sqrt(a * a + b * b)); });
    const auto is_infinite = mask_or(abs(x) == detail::kInf, abs(y) == detail::kInf);
    return select(is_infinite, F{} + detail::kInf, length);  // also with a NaN
  }
}

// x - y trunc(x / y), exact, with the sign of x. That of the C library.
template <class F>
FUSEDRNN_HD F fmod(F x, F y) {
  if constexpr (std::is_same_v<F, double>) {
    return ::fmod(x, y);
  } else {
    return detail::of_lanes(x, y, [](float a, float b) { return ::fmodf(a, b); });
  }
}

}  // namespace fusedrnn::program::math
