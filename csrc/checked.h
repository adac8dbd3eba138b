// Arithmetic of sizes that does not wrap.
#pragma once
#include <cstdint>
#include <stdexcept>

namespace fusedrnn {

[[noreturn]] inline void fail_as_too_large() {
  throw std::runtime_error("fusedrnn: sizes are too large: their product must be below 2^63");
}

inline int64_t times(int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) fail_as_too_large();
  return product;
}

inline int64_t plus(int64_t a, int64_t b) {
  int64_t sum;
  if (__builtin_add_overflow(a, b, &sum)) fail_as_too_large();
  return sum;
}

}  // namespace fusedrnn
