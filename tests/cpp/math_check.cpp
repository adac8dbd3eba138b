// Checks of csrc/base/math.h, scalar.h, philox.h and cpu/vector.h for one instruction set beyond
// what a sweep over floats shows (math_sweep.cpp). Run as `math_check NAME`; test_math.py does, for
// every NAME. Prints what it measured and exits with 1 if a bound is broken.
#include "check.h"
// (the instruction set first)
#include "functions.h"

namespace {

using namespace fusedrnn;
using namespace fusedrnn::check;

// Exact results, in addition to those in math_sweep.
template <class Function>
void special(float x, float want) {
  float y[kLanes];
  store(y, Function::apply(math::splat<VecF>(x)));
  expect(same(y[0], want) && same(Function::apply(x), want), Function::kName, x, y[0]);
}

void check_special() {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (float zero : {0.0f, -0.0f}) {
    special<Exp>(zero, 1.0f);
    special<Sigmoid>(zero, 0.5f);
    special<Complement>(zero, 0.5f);
    special<Tanh>(zero, zero);
    special<Derivative>(zero, 1.0f);
  }
  special<Log>(1.0f, 0.0f);
  special<Tanh>(FLT_MIN, FLT_MIN);
  for (float x : {100.0f, FLT_MAX, kInf}) {
    special<Exp>(x, kInf);
    special<Exp>(-x, 0.0f);
    for (float sign : {1.0f, -1.0f}) {
      special<Sigmoid>(sign * x, sign > 0 ? 1.0f : 0.0f);
      special<Complement>(sign * x, sign > 0 ? 0.0f : 1.0f);
      special<Tanh>(sign * x, sign);
      special<Derivative>(sign * x, 0.0f);
    }
  }
  // The last argument with a finite result and the first without.
  special<Exp>(88.72283f, math::exp(88.72283f));
  expect(std::isfinite(math::exp(88.72283f)), "exp", 88.72283, math::exp(88.72283f));
  special<Exp>(88.72284f, kInf);
}

// The double versions are the C library's; this checks that the right ones are called.
void check_double() {
  for (double x = -1; x <= 1; x += 1.0 / 64) {
    double s, c;
    math::sincospi(x, s, c);
    const double pi_x = 3.14159265358979323846 * x;
    const double pairs[][2] = {{math::exp(x), std::exp(x)},
                               {math::tanh(x), std::tanh(x)},
                               {math::sigmoid(x), 1 / (1 + std::exp(-x))},
                               {math::log(x + 2), std::log(x + 2)},
                               {math::sqrt(x + 2), std::sqrt(x + 2)},
                               {s, std::sin(pi_x)},
                               {c, std::cos(pi_x)}};
    for (const auto& pair : pairs) {
      expect(std::fabs(pair[0] - pair[1]) <= 1e-15, "double", x, pair[0]);
    }
  }
}

void check_select() {
  float ones[kLanes], x[kLanes], y[kLanes];
  for (int i = 0; i < kLanes; ++i) ones[i] = 1, x[i] = i - 1.5f;
  const VecF v = load(x);
  store(y, math::select(v < 0.0f, load(ones), math::sqrt(v)));
  for (int i = 0; i < kLanes; ++i) {
    expect(same_bits(y[i], x[i] < 0 ? 1 : std::sqrt(x[i])), "select, sqrt", x[i], y[i]);
  }
  const float zero[] = {0.0f, -0.0f};
  for (float z : zero) expect(same_bits(math::splat<VecF>(z)[kLanes - 1], z), "splat", z, 0);
}

// A partial access reads and writes the right numbers, and its results have the bits of a full
// one's.
void check_tails() {
  std::vector<float> x(3 * kLanes), y(3 * kLanes), whole(3 * kLanes);
  for (int i = 0; i < 3 * kLanes; ++i) x[i] = std::sin(i) * 3;
  for (int i = 0; i < 3 * kLanes; i += kLanes) store(&whole[i], math::tanh(load(&x[i])));
  for (int offset = 0; offset < kLanes; ++offset) {
    for (int n = 0; n <= kLanes; ++n) {
      y.assign(y.size(), -7);
      const VecF part = load(&x[offset], n);
      for (int i = 0; i < kLanes; ++i) {
        expect(part[i] == (i < n ? x[offset + i] : 0.0f), "partial load", i, part[i]);
      }
      store(&y[offset], math::tanh(part), n);
      for (int i = 0; i < 3 * kLanes; ++i) {
        const bool written = i >= offset && i < offset + n;
        expect(same_bits(y[i], written ? whole[i] : -7), "partial store", i, y[i]);
      }
    }
  }
  // The last n floats of a block of memory: a sanitizer reports accesses beyond it.
  for (int n = 1; n < kLanes; ++n) {
    std::vector<float> exact_size(n, 2);
    store(exact_size.data(), load(exact_size.data(), n) * 2.0f, n);
    for (float v : exact_size) expect(v == 4, "end of memory", n, v);
  }
}

// One number, and the same in a vector.  Out of line and of a volatile, so that a second call with
// denormals flushed is not optimised away as a repetition of the first.
template <class T>
__attribute__((noinline)) uint32_t widen_once(volatile uint16_t bits) {
  const T x{bits};
  const VecF wide = T::template widen<VecF>(VecU{} + x.bits);
  expect(same_bits(wide[kLanes - 1], widen(x)), "widen of a vector", x.bits, wide[kLanes - 1]);
  return bits_of(widen(x));
}
template <class T>
__attribute__((noinline)) uint32_t narrow_once(volatile float value) {
  const float x = value;
  const VecU words = T::narrow(math::splat<VecF>(x));
  expect(words[kLanes - 1] == narrow<T>(x).bits, "narrow of a vector", x, words[kLanes - 1]);
  return narrow<T>(x).bits;
}

// f(x), which must not depend on the treatment of denormals.
template <class X>
uint32_t in_both_modes(uint32_t (*f)(X), X x) {
  const uint32_t want = f(x);
  const fusedrnn::cpu::FlushDenormals flush;
  const uint32_t flushed = f(x);
  expect(flushed == want, "conversion with denormals flushed", x, flushed);
  return want;
}

template <class T>
uint32_t widened(uint16_t bits) {
  const uint32_t wide = in_both_modes<uint16_t>(widen_once<T>, bits);
  const uint32_t back = in_both_modes<float>(narrow_once<T>, float_of(wide));
  expect(back == (std::isnan(float_of(wide)) ? 0x7fff : bits), "narrow of widen", bits, back);
  return wide;
}

void print_narrowed(float x) {
  std::printf("narrow %08x %04x %04x\n", bits_of(x), in_both_modes<float>(narrow_once<BFloat16>, x),
              in_both_modes<float>(narrow_once<Half>, x));
}

// Prints all values of bfloat16 and of float16; then conversions of floats to both: random floats,
// and the middle of each two neighbours with its own neighbours.
void check_narrow() {
  expect(widen(0.1f) == 0.1f && narrow<float>(0.1f) == 0.1f, "float", 0.1f, 0);
  expect(widen(0.1) == 0.1 && narrow<double>(0.1) == 0.1, "double", 0.1, 0);
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    std::printf("widen %04x %08x %08x\n", bits, widened<BFloat16>(bits), widened<Half>(bits));
  }
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    for (uint32_t low : {0x7fffu, 0x8000u, 0x8001u}) print_narrowed(float_of(bits << 16 | low));
    const float half = float_of(widened<Half>(bits));
    const bool is_last = (bits & 0x7fff) == 0x7bff;
    const float next = is_last ? std::copysign(0x1p16f, half) : float_of(widened<Half>(bits + 1));
    const float middle = (half + next) / 2;
    for (float x : {std::nextafter(middle, half), middle, std::nextafter(middle, next)}) {
      print_narrowed(x);
    }
    uint32_t random[4] = {bits, 0, 0, 0};
    fusedrnn::philox4x32(random, 0, 0);
    for (uint32_t word : random) print_narrowed(float_of(word));
  }
}

// Prints a few counters and keys with their words, for a comparison with other code.
void check_philox() {
  const uint32_t inputs[][6] = {
      {0, 0, 0, 0, 0, 0},
      {~0u, ~0u, ~0u, ~0u, ~0u, ~0u},
      {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0},
      {1, 2, 3, 4, 5, 6},
      {0x80000000, 0x7fffffff, 0xdeadbeef, 0x12345678, 0xfedcba98, 0x0badf00d}};
  for (const auto& in : inputs) {
    uint32_t words[4] = {in[0], in[1], in[2], in[3]};
    fusedrnn::philox4x32(words, in[4], in[5]);
    std::printf("philox");
    for (uint32_t v : in) std::printf(" %08x", v);
    for (uint32_t v : words) std::printf(" %08x", v);
    std::printf("\n");
    // Every lane its own counter, the first lane the one above.
    VecU counter[4];
    for (int i = 0; i < 4; ++i) {
      for (int lane = 0; lane < kLanes; ++lane) counter[i][lane] = in[i] + lane * (2 * i + 1);
    }
    fusedrnn::philox4x32(counter, in[4], in[5]);
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t scalar[4];
      for (int i = 0; i < 4; ++i) scalar[i] = in[i] + lane * (2 * i + 1);
      fusedrnn::philox4x32(scalar, in[4], in[5]);
      for (int i = 0; i < 4; ++i) {
        expect(counter[i][lane] == scalar[i], "philox of a vector", lane, counter[i][lane]);
      }
    }
  }
}

// The vector, float and double samples of a row agree; prints some doubles for other code.
void check_normals() {
  const uint64_t seeds[] = {0, 1, 0x8000000000000000u, 0xfedcba9876543210u};
  double worst = 0, worst_vector = 0;
  for (uint64_t seed : seeds) {
    for (uint32_t t = 0; t < 12; ++t) {
      const uint32_t b = 7 * t, layer = t % 3, n = 1 + 67 * t, first_block = t % 2 ? 0 : 5;
      std::vector<float> row(n + 1, -7);
      normals(row.data(), n, seed, t, b, first_block, layer);
      expect(row[n] == -7, "normals beyond the end", n, row[n]);
      for (uint32_t z = 0; z < n; ++z) {
        float single[4];
        double wide[4];
        normal4(seed, t, b, first_block + z / 4, layer, single);
        normal4(seed, t, b, first_block + z / 4, layer, wide);
        worst_vector = std::fmax(worst_vector, std::fabs(row[z] - single[z % 4]));
        // Where the radius's uniform number is near 1, rounding it to float, by up to 3e-8, moves
        // the radius by up to 3e-8 / radius.
        const double radius = std::hypot(wide[z % 4], wide[z % 4 ^ 1]);
        worst = std::fmax(worst, std::fabs(row[z] - wide[z % 4]) * std::fmin(1, radius));
        if (z < 8) {
          std::printf("normal %llu %u %u %u %u %.17g\n", static_cast<unsigned long long>(seed), t,
                      b, 4 * first_block + z, layer, wide[z % 4]);
        }
      }
    }
  }
  std::printf("vector and float differ by %.3g, float and double by %.3g\n", worst_vector, worst);
  expect(worst_vector == 0, "normals of vector and float", 0, worst_vector);
  expect(worst <= 1e-6, "normals of float and double", 0, worst);

  // The ends of the uniforms: the largest normal there is, and a radius of 0.
  float n0, n1;
  fusedrnn::box_muller<float>(0, 0, n0, n1);
  expect(std::fabs(n0 - 6.66043f) < 1e-4 && n1 == 0, "largest normal", 0, n0);
  fusedrnn::box_muller<float>(~0u, 0x80000000u, n0, n1);
  expect(n0 == 0 && n1 == 0, "smallest normal", 0, n0);
}

}  // namespace

int main(int argc, char** argv) {
  return run_named(argc, argv,
                   {{"special", check_special},
                    {"double", check_double},
                    {"select", check_select},
                    {"tails", check_tails},
                    {"narrow", check_narrow},
                    {"philox", check_philox},
                    {"normals", check_normals}});
}
