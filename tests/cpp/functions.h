// The functions of one float in csrc/base/math.h, csrc/base/scalar.h, csrc/program/functions.h and
// rare_functions.h, each with its exact result and its largest allowed error. Written once for the
// CPU and for CUDA; the sweeps over all floats, math_sweep.cpp and math_sweep.cu, take the list
// from here.
#pragma once

#include <cfloat>
#include <cmath>

#include "../../csrc/base/scalar.h"
#include "../../csrc/program/rare_functions.h"

namespace fusedrnn::check {

constexpr double kWrong = HUGE_VAL;  // an error that no bound allows

// exp, and functions made of it, may give 0 for results below this.
constexpr double kSmallest = 1.7e-38;

FUSEDRNN_HD double power_of_two(int n) {
  return Traits<double>::from_bits(static_cast<uint64_t>(n + 1023) << 52);
}

// n where 2^n <= |x| < 2^(n + 1), but at least `least`.
FUSEDRNN_HD int exponent_of(double x, int least) {
  const int n = static_cast<int>(Traits<double>::bits(x) >> 52 & 0x7ff) - 1023;
  return n < least ? least : n;
}

FUSEDRNN_HD bool is_negative(double x) { return Traits<double>::bits(x) >> 63; }

FUSEDRNN_HD bool is_denormal(float x) { return x != 0 && x > -FLT_MIN && x < FLT_MIN; }

FUSEDRNN_HD bool same(float a, float b) {
  return Traits<float>::bits(a) == Traits<float>::bits(b) || (a != a && b != b);
}

// The error in ulp of the exact result (at least the ulp of the smallest normal number). Only a NaN
// may give a NaN, and 0 has the sign of the exact result too.
FUSEDRNN_HD double ulp_error(double exact, float y, double smallest = kSmallest) {
  const double size = exact < 0 ? -exact : exact;
  if (exact != exact || y != y) return exact != exact && y != y ? 0 : kWrong;
  if (is_negative(exact) != is_negative(y)) return kWrong;
  if (y == 0 && size < smallest) return 0;
  if (size > FLT_MAX) return (y < 0 ? -y : y) >= FLT_MAX * (1 - 2.0 * FLT_EPSILON) ? 0 : kWrong;
  const double difference = y - exact;
  return (difference < 0 ? -difference : difference) *
         power_of_two(FLT_MANT_DIG - 1 - exponent_of(exact, FLT_MIN_EXP - 1));
}

// x rounded to nearest even, to numbers with `fraction` bits after the first one and exponents from
// `least` on; inf from 2^most on.
FUSEDRNN_HD double rounded(double x, int fraction, int least, int most) {
  if (!(x > -HUGE_VAL && x < HUGE_VAL)) return x;
  const double unit = power_of_two(exponent_of(x, least) - fraction);
  const double y = ::rint(x / unit) * unit;
  return (y < 0 ? -y : y) < power_of_two(most) ? y : y * HUGE_VAL;
}

// FUSEDRNN_CHECK_SEEDED_BUG makes the results of exp wrong, to see that a sweep notices: 1, by some
// ulp near the upper end; 2, near the lower end, only with denormals flushed; 3, in the last bit of
// a vector's lane.
#if !defined(FUSEDRNN_CHECK_SEEDED_BUG)
#define FUSEDRNN_CHECK_SEEDED_BUG 0
#endif
template <class F>
FUSEDRNN_HD F seeded(F x, F y) {
  constexpr int kBug = FUSEDRNN_CHECK_SEEDED_BUG;
  if constexpr (kBug == 1) return math::select(x > 88.7f, y + y * 0x1p-21f, y);
  if constexpr (kBug == 2) {
    const F denormal = x * 0x1p-133f;
    return math::select(x < -87.3f, math::select(denormal == 0.0f, y + 1.0f, y), y);
  }
  if constexpr (kBug == 3 && sizeof(F) > sizeof(float)) return y + y * 0x1p-24f * 1.5f;
  return y;
}

// The defaults of a function. Same is a second way to the same bits, if there is one; kBound holds
// with fused multiply-add, and four thirds of it without.
struct Function {
  using Same = void;
  static constexpr const char* kUnit = " ulp";
  static FUSEDRNN_HD bool covers(float) { return true; }
  // Whether CPU and GPU promise the same bits.
  static FUSEDRNN_HD bool is_alike(float) { return true; }
  static FUSEDRNN_HD double error(double exact, float y) { return ulp_error(exact, y); }
};

// A second way to the same bits.
template <class S>
struct SameAs : Function {
  using Same = S;
};

// A function of the kind Base: its result for a float or a vector x, and the exact one.
#define FUSEDRNN_FUNCTION(Name, Base, name, bound, result, exact_result) \
  struct Name : Base {                                                   \
    static constexpr const char* kName = name;                           \
    static constexpr double kBound = bound;                              \
    template <class F>                                                   \
    static FUSEDRNN_HD F apply(F x) {                                    \
      return result;                                                     \
    }                                                                    \
    static FUSEDRNN_HD double exact(double x) { return exact_result; }   \
  }

// The results of functions that have two.
template <class F>
struct Two {
  F first, second;
};
template <class F>
FUSEDRNN_HD Two<F> sigmoid_and_complement(F x) {
  Two<F> y;
  y.first = math::sigmoid(x, y.second);
  return y;
}
template <class F>
FUSEDRNN_HD Two<F> tanh_and_derivative(F x) {
  Two<F> y;
  y.first = math::tanh(x, y.second);
  return y;
}
template <class F>
FUSEDRNN_HD Two<F> sine_and_cosine(F x) {
  Two<F> y;
  math::sincospi(x, y.first, y.second);
  return y;
}

FUSEDRNN_FUNCTION(Exp, Function, "exp", 0.95, seeded(x, math::exp(x)), ::exp(x));

struct SigmoidOfTwo {
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return sigmoid_and_complement(x).first;
  }
};
FUSEDRNN_FUNCTION(Sigmoid, SameAs<SigmoidOfTwo>, "sigmoid", 2.8, math::sigmoid(x),
                  1 / (1 + ::exp(-x)));
FUSEDRNN_FUNCTION(Complement, Function, "complement", 2.8, sigmoid_and_complement(x).second,
                  1 / (1 + ::exp(x)));

struct TanhOfTwo {
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return tanh_and_derivative(x).first;
  }
};
FUSEDRNN_FUNCTION(Tanh, SameAs<TanhOfTwo>, "tanh", 1.5, math::tanh(x), ::tanh(x));

struct OfDerivative : Function {
  static FUSEDRNN_HD double error(double exact, float y) {
    return ulp_error(exact, y, 4 * kSmallest);
  }
  // 1 / cosh(x)^2, computed without overflow.
  static FUSEDRNN_HD double of(double x) {
    const double e = ::exp(x < 0 ? x : -x);
    const double root = 2 * e / (1 + e * e);
    return root * root;
  }
};
FUSEDRNN_FUNCTION(Derivative, OfDerivative, "derivative", 4.1, tanh_and_derivative(x).second,
                  of(x));

struct OfNormalNumbers : Function {
  static FUSEDRNN_HD bool covers(float x) { return x >= FLT_MIN && x <= FLT_MAX; }
};
FUSEDRNN_FUNCTION(Log, OfNormalNumbers, "log", 1, math::log(x), ::log(x));

struct OfTurns : Function {
  static constexpr const char* kUnit = "";
  static FUSEDRNN_HD bool covers(float x) { return x >= -1 && x <= 1; }
  static FUSEDRNN_HD double angle(double x) { return 3.14159265358979323846 * x; }
  static FUSEDRNN_HD double error(double exact, float y) {
    const double size = y < exact ? exact - y : y - exact;
    return size < 1 ? size : kWrong;
  }
};
FUSEDRNN_FUNCTION(SinPi, OfTurns, "sinpi", 7e-8, sine_and_cosine(x).first, ::sin(angle(x)));
FUSEDRNN_FUNCTION(CosPi, OfTurns, "cospi", 7e-8, sine_and_cosine(x).second, ::cos(angle(x)));

// These two are exact.
struct OfSqrt : Function {
  // The root of a negative denormal is -0 if denormals are flushed.
  static FUSEDRNN_HD bool covers(float x) { return !(x < 0 && x > -FLT_MIN); }
  static FUSEDRNN_HD double error(double exact, float y) {
    const bool is_of_denormal = exact > 0 && exact < 0x1p-63;
    return same(y, static_cast<float>(exact)) || (is_of_denormal && y == 0) ? 0 : kWrong;
  }
};
FUSEDRNN_FUNCTION(Sqrt, OfSqrt, "sqrt", 0, math::sqrt(x), ::sqrt(x));

struct Exact : Function {
  static FUSEDRNN_HD double error(double exact, float y) {
    return same(y, static_cast<float>(exact)) ? 0 : kWrong;
  }
};
FUSEDRNN_FUNCTION(Clamp, Exact, "clamp", 0, math::min(math::max(x, -0.75f), 1.25f),
                  x < -0.75 ? -0.75 : (x > 1.25 ? 1.25 : x));

// The 16 bits of a T instead of a float; also exact, denormals included.
template <class T>
struct Narrow : Function {
  static constexpr bool kIsHalf = std::is_same_v<T, Half>;
  static constexpr const char* kName = kIsHalf ? "float16" : "bfloat16";
  static constexpr double kBound = 0;
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return Traits<F>::from_bits(T::narrow(x));
  }
  static FUSEDRNN_HD double exact(double x) {
    return kIsHalf ? rounded(x, 10, -14, 16) : rounded(x, 7, -126, 128);
  }
  static FUSEDRNN_HD double error(double exact, float y) {
    const uint32_t word = Traits<float>::bits(y);
    if (exact != exact) return word == 0x7fff ? 0 : kWrong;
    if (word > 0xffff) return kWrong;
    const double wide = T::template widen<float>(word);
    return wide == exact && is_negative(wide) == is_negative(exact) ? 0 : kWrong;
  }
};

// Those that generated stages call, for all floats.  A denormal argument or result may count as 0.
struct OfStages : Function {
  static FUSEDRNN_HD double error(double exact, float y) {
    return ulp_error(exact, y, 1.13 * FLT_MIN);  // erf(x) is 1.128 x near 0
  }
  // at_zero: the result for 0.
  static FUSEDRNN_HD double error(double exact, float y, bool is_of_denormal, float at_zero) {
    return is_of_denormal && same(y, at_zero) ? 0 : error(exact, y);
  }
};

struct OfLog : OfStages {
  static FUSEDRNN_HD bool covers(float x) { return Sqrt::covers(x); }
  static FUSEDRNN_HD double error(double exact, float y) {
    return OfStages::error(exact, y, exact < -87.33654, -HUGE_VALF);
  }
};
FUSEDRNN_FUNCTION(LogOfAll, OfLog, "log_of_all", 1.1, program::math::log(x), ::log(x));

FUSEDRNN_FUNCTION(Log1p, OfStages, "log1p", 2, program::math::log1p(x), ::log1p(x));
FUSEDRNN_FUNCTION(Expm1, OfStages, "expm1", 2.2, program::math::expm1(x), ::expm1(x));
FUSEDRNN_FUNCTION(Softplus, Function, "softplus", 2.2, program::math::softplus(x),
                  x > 0 ? x + ::log1p(::exp(-x)) : ::log1p(::exp(x)));
FUSEDRNN_FUNCTION(Erf, OfStages, "erf", 1.6, program::math::erf(x), ::erf(x));

// The C library of either reduces large angles.
struct OfAngle : OfStages {
  static FUSEDRNN_HD bool is_alike(float x) {
    return x >= -program::math::detail::kLargeAngle && x <= program::math::detail::kLargeAngle;
  }
};
FUSEDRNN_FUNCTION(Sin, OfAngle, "sin", 1.6, program::math::sin(x), ::sin(x));
FUSEDRNN_FUNCTION(Cos, OfAngle, "cos", 1.6, program::math::cos(x), ::cos(x));

struct OfRsqrt : OfStages {
  static FUSEDRNN_HD bool covers(float x) { return Sqrt::covers(x); }
  static FUSEDRNN_HD bool is_alike(float) { return false; }  // a GPU has an instruction
  static FUSEDRNN_HD double error(double exact, float y) {
    return OfStages::error(exact, y, exact > 0x1p63, HUGE_VALF);
  }
};
FUSEDRNN_FUNCTION(Rsqrt, OfRsqrt, "rsqrt", 2, program::math::rsqrt(x), 1 / ::sqrt(x));

// Those of rare_functions.h.
FUSEDRNN_FUNCTION(Atan, OfStages, "atan", 1.5, program::math::atan(x), ::atan(x));
// Of all quotients, with another number of either sign and of both sizes.
FUSEDRNN_FUNCTION(Atan2, OfStages, "atan2", 1.5, program::math::atan2(x, F{} - 0.75f),
                  ::atan2(x, -0.75));
FUSEDRNN_FUNCTION(Atan2Inverse, OfStages, "atan2_inverse", 1.5,
                  program::math::atan2(F{} + 0.75f, x), ::atan2(0.75, x));
FUSEDRNN_FUNCTION(Asin, OfStages, "asin", 1.5, program::math::asin(x), ::asin(x));
FUSEDRNN_FUNCTION(Acos, OfStages, "acos", 1.2, program::math::acos(x), ::acos(x));
FUSEDRNN_FUNCTION(Sinh, OfStages, "sinh", 1.7, program::math::sinh(x), ::sinh(x));
FUSEDRNN_FUNCTION(Cosh, OfStages, "cosh", 1.7, program::math::cosh(x), ::cosh(x));
FUSEDRNN_FUNCTION(Exp2, Function, "exp2", 0.95, program::math::exp2(x), ::exp2(x));
FUSEDRNN_FUNCTION(Hypot, OfStages, "hypot", 0.51, program::math::hypot(x, F{} + 1.0f),
                  ::hypot(x, 1.0));

struct OfLog2 : OfLog {
  static FUSEDRNN_HD double error(double exact, float y) {
    return OfStages::error(exact, y, exact < -126, -HUGE_VALF);
  }
};
FUSEDRNN_FUNCTION(Log2, OfLog2, "log2", 1.5, program::math::log2(x), ::log2(x));
struct OfLog10 : OfLog {
  static FUSEDRNN_HD double error(double exact, float y) {
    return OfStages::error(exact, y, exact < -37.9297, -HUGE_VALF);
  }
};
FUSEDRNN_FUNCTION(Log10, OfLog10, "log10", 1.6, program::math::log10(x), ::log10(x));

// These are exact; a denormal may count as 0.
struct OfRounding : Exact {
  static FUSEDRNN_HD bool covers(float x) { return !is_denormal(x); }
};
FUSEDRNN_FUNCTION(Round, OfRounding, "round", 0, program::math::round(x), ::rint(x));
FUSEDRNN_FUNCTION(Trunc, OfRounding, "trunc", 0, program::math::trunc(x), ::trunc(x));
FUSEDRNN_FUNCTION(Floor, OfRounding, "floor", 0, program::math::floor(x), ::floor(x));
FUSEDRNN_FUNCTION(Ceil, OfRounding, "ceil", 0, program::math::ceil(x), ::ceil(x));

// Calls visit(F{}) for every function F.
template <class Visit>
void for_each_function(Visit visit) {
  visit(Exp{}), visit(Sigmoid{}), visit(Complement{}), visit(Tanh{}), visit(Derivative{});
  visit(Log{}), visit(SinPi{}), visit(CosPi{}), visit(Sqrt{}), visit(Clamp{});
  visit(Narrow<BFloat16>{}), visit(Narrow<Half>{});
  visit(LogOfAll{}), visit(Log1p{}), visit(Expm1{}), visit(Softplus{}), visit(Erf{}), visit(Sin{});
  visit(Cos{}), visit(Rsqrt{}), visit(Round{}), visit(Trunc{}), visit(Floor{}), visit(Ceil{});
  visit(Atan{}), visit(Atan2{}), visit(Atan2Inverse{}), visit(Asin{}), visit(Acos{}), visit(Sinh{});
  visit(Cosh{}), visit(Exp2{}), visit(Log2{}), visit(Log10{}), visit(Hypot{});
}

// The number of errors, and the largest error with its x.
struct Tally {
  unsigned long long failures = 0, worst = 0;  // the bits of a float of 0 or above, those of x

  FUSEDRNN_HD void add(double error, double bound, float x) {
    const uint64_t bits = Traits<float>::bits(static_cast<float>(error));
    const unsigned long long here = bits << 32 | Traits<float>::bits(x);
    failures += error > bound;
    worst = here > worst ? here : worst;
  }
  FUSEDRNN_HD void add(const Tally& other) {
    failures += other.failures;
    worst = other.worst > worst ? other.worst : worst;
  }
  float error() const { return Traits<float>::from_bits(static_cast<uint32_t>(worst >> 32)); }
  float x() const { return Traits<float>::from_bits(static_cast<uint32_t>(worst)); }
};

}  // namespace fusedrnn::check
