// The functions of one float in csrc/base/math.h, csrc/base/scalar.h and csrc/program/functions.h,
// each with its exact result and its largest allowed error. Written once for the CPU and for CUDA;
// the sweeps over all floats, math_sweep.cpp and math_sweep.cu, take the list from here.
//
// Longer than 350 lines, because it is one list.
#pragma once

#include <cfloat>
#include <cmath>

#include "../../csrc/base/scalar.h"
#include "../../csrc/program/functions.h"

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

struct Exp : Function {
  static constexpr const char* kName = "exp";
  static constexpr double kBound = 0.95;
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return seeded(x, math::exp(x));
  }
  static FUSEDRNN_HD double exact(double x) { return ::exp(x); }
};

struct SigmoidOfTwo {
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    F complement;
    return math::sigmoid(x, complement);
  }
};

struct Sigmoid : Function {
  using Same = SigmoidOfTwo;
  static constexpr const char* kName = "sigmoid";
  static constexpr double kBound = 2.8;
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return math::sigmoid(x);
  }
  static FUSEDRNN_HD double exact(double x) { return 1 / (1 + ::exp(-x)); }
};

struct Complement : Function {
  static constexpr const char* kName = "complement";
  static constexpr double kBound = 2.8;
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    F complement;
    math::sigmoid(x, complement);
    return complement;
  }
  static FUSEDRNN_HD double exact(double x) { return 1 / (1 + ::exp(x)); }
};

struct TanhOfTwo {
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    F derivative;
    return math::tanh(x, derivative);
  }
};

struct Tanh : Function {
  using Same = TanhOfTwo;
  static constexpr const char* kName = "tanh";
  static constexpr double kBound = 1.5;
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return math::tanh(x);
  }
  static FUSEDRNN_HD double exact(double x) { return ::tanh(x); }
};

struct Derivative : Function {
  static constexpr const char* kName = "derivative";
  static constexpr double kBound = 4.1;
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    F derivative;
    math::tanh(x, derivative);
    return derivative;
  }
  // 1 / cosh(x)^2, computed without overflow.
  static FUSEDRNN_HD double exact(double x) {
    const double e = ::exp(x < 0 ? x : -x);
    const double root = 2 * e / (1 + e * e);
    return root * root;
  }
  static FUSEDRNN_HD double error(double exact, float y) {
    return ulp_error(exact, y, 4 * kSmallest);
  }
};

struct Log : Function {
  static constexpr const char* kName = "log";
  static constexpr double kBound = 1;
  static FUSEDRNN_HD bool covers(float x) { return x >= FLT_MIN && x <= FLT_MAX; }
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return math::log(x);
  }
  static FUSEDRNN_HD double exact(double x) { return ::log(x); }
};

template <bool kSin>
struct TurnPart : Function {
  static constexpr const char* kName = kSin ? "sinpi" : "cospi";
  static constexpr const char* kUnit = "";
  static constexpr double kBound = 7e-8;
  static FUSEDRNN_HD bool covers(float x) { return x >= -1 && x <= 1; }
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    F s, c;
    math::sincospi(x, s, c);
    return kSin ? s : c;
  }
  static FUSEDRNN_HD double exact(double x) {
    constexpr double kPi = 3.14159265358979323846;
    return kSin ? ::sin(kPi * x) : ::cos(kPi * x);
  }
  static FUSEDRNN_HD double error(double exact, float y) {
    const double size = y < exact ? exact - y : y - exact;
    return size < 1 ? size : kWrong;
  }
};

// These two are exact.
struct Sqrt : Function {
  static constexpr const char* kName = "sqrt";
  static constexpr double kBound = 0;
  // The root of a negative denormal is -0 if denormals are flushed.
  static FUSEDRNN_HD bool covers(float x) { return !(x < 0 && x > -FLT_MIN); }
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return math::sqrt(x);
  }
  static FUSEDRNN_HD double exact(double x) { return ::sqrt(x); }
  static FUSEDRNN_HD double error(double exact, float y) {
    const bool is_of_denormal = exact > 0 && exact < 0x1p-63;
    return same(y, static_cast<float>(exact)) || (is_of_denormal && y == 0) ? 0 : kWrong;
  }
};

struct Clamp : Function {
  static constexpr const char* kName = "clamp";
  static constexpr double kBound = 0;
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return math::min(math::max(x, -0.75f), 1.25f);
  }
  static FUSEDRNN_HD double exact(double x) { return x < -0.75 ? -0.75 : x > 1.25 ? 1.25 : x; }
  static FUSEDRNN_HD double error(double exact, float y) {
    return same(y, static_cast<float>(exact)) ? 0 : kWrong;
  }
};

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

struct LogOfAll : OfStages {
  static constexpr const char* kName = "log_of_all";
  static constexpr double kBound = 1.1;
  static FUSEDRNN_HD bool covers(float x) { return Sqrt::covers(x); }
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return program::math::log(x);
  }
  static FUSEDRNN_HD double exact(double x) { return ::log(x); }
  static FUSEDRNN_HD double error(double exact, float y) {
    return OfStages::error(exact, y, exact < -87.33654, -HUGE_VALF);
  }
};

struct Log1p : OfStages {
  static constexpr const char* kName = "log1p";
  static constexpr double kBound = 2;
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return program::math::log1p(x);
  }
  static FUSEDRNN_HD double exact(double x) { return ::log1p(x); }
};

struct Expm1 : OfStages {
  static constexpr const char* kName = "expm1";
  static constexpr double kBound = 2.2;
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return program::math::expm1(x);
  }
  static FUSEDRNN_HD double exact(double x) { return ::expm1(x); }
};

struct Softplus : Function {
  static constexpr const char* kName = "softplus";
  static constexpr double kBound = 2.2;
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return program::math::softplus(x);
  }
  static FUSEDRNN_HD double exact(double x) {
    return x > 0 ? x + ::log1p(::exp(-x)) : ::log1p(::exp(x));
  }
};

struct Erf : OfStages {
  static constexpr const char* kName = "erf";
  static constexpr double kBound = 1.6;
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return program::math::erf(x);
  }
  static FUSEDRNN_HD double exact(double x) { return ::erf(x); }
};

// The C library of either reduces large angles.
struct OfAngle : OfStages {
  static FUSEDRNN_HD bool is_alike(float x) {
    return x >= -program::math::detail::kLargeAngle && x <= program::math::detail::kLargeAngle;
  }
};

struct Sin : OfAngle {
  static constexpr const char* kName = "sin";
  static constexpr double kBound = 1.6;
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return program::math::sin(x);
  }
  static FUSEDRNN_HD double exact(double x) { return ::sin(x); }
};

struct Cos : OfAngle {
  static constexpr const char* kName = "cos";
  static constexpr double kBound = 1.6;
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return program::math::cos(x);
  }
  static FUSEDRNN_HD double exact(double x) { return ::cos(x); }
};

struct Rsqrt : OfStages {
  static constexpr const char* kName = "rsqrt";
  static constexpr double kBound = 2;
  static FUSEDRNN_HD bool covers(float x) { return Sqrt::covers(x); }
  static FUSEDRNN_HD bool is_alike(float) { return false; }  // a GPU has an instruction
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return program::math::rsqrt(x);
  }
  static FUSEDRNN_HD double exact(double x) { return 1 / ::sqrt(x); }
  static FUSEDRNN_HD double error(double exact, float y) {
    return OfStages::error(exact, y, exact > 0x1p63, HUGE_VALF);
  }
};

// These are exact; a denormal may count as 0.
struct Exact : Function {
  static constexpr double kBound = 0;
  static FUSEDRNN_HD bool covers(float x) { return !is_denormal(x); }
  static FUSEDRNN_HD double error(double exact, float y) {
    return same(y, static_cast<float>(exact)) ? 0 : kWrong;
  }
};

struct Round : Exact {
  static constexpr const char* kName = "round";
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return program::math::round(x);
  }
  static FUSEDRNN_HD double exact(double x) { return ::rint(x); }
};

struct Trunc : Exact {
  static constexpr const char* kName = "trunc";
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return program::math::trunc(x);
  }
  static FUSEDRNN_HD double exact(double x) { return ::trunc(x); }
};

struct Floor : Exact {
  static constexpr const char* kName = "floor";
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return program::math::floor(x);
  }
  static FUSEDRNN_HD double exact(double x) { return ::floor(x); }
};

struct Ceil : Exact {
  static constexpr const char* kName = "ceil";
  template <class F>
  static FUSEDRNN_HD F apply(F x) {
    return program::math::ceil(x);
  }
  static FUSEDRNN_HD double exact(double x) { return ::ceil(x); }
};

// Calls visit(F{}) for every function F.
template <class Visit>
void for_each_function(Visit visit) {
  visit(Exp{}), visit(Sigmoid{}), visit(Complement{}), visit(Tanh{}), visit(Derivative{});
  visit(Log{}), visit(TurnPart<true>{}), visit(TurnPart<false>{}), visit(Sqrt{}), visit(Clamp{});
  visit(Narrow<BFloat16>{}), visit(Narrow<Half>{});
  visit(LogOfAll{}), visit(Log1p{}), visit(Expm1{}), visit(Softplus{}), visit(Erf{}), visit(Sin{});
  visit(Cos{}), visit(Rsqrt{}), visit(Round{}), visit(Trunc{}), visit(Floor{}), visit(Ceil{});
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
