// Checks that fail in one sentence, and arithmetic of sizes that does not wrap.
#pragma once
#include <cstdint>
#include <sstream>
#include <stdexcept>

namespace fusedrnn {

template <class Error = std::runtime_error, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  text << "fusedrnn: ";
  (text << ... << parts);
  throw Error(text.str());
}

// A GPU does not run such a grid.  Nothing has happened.
struct LaunchRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A macro, because the text is to be made only where it is needed.  torch's own would add the path
// of a file on the machine that compiled it.
#define FUSEDRNN_CHECK(condition, ...)               \
  do {                                               \
    if (!(condition)) ::fusedrnn::fail(__VA_ARGS__); \
  } while (false)

inline int64_t times(int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) fail("sizes are too large: ", a, " times ", b);
  return product;
}

inline int64_t plus(int64_t a, int64_t b) {
  int64_t sum;
  if (__builtin_add_overflow(a, b, &sum)) fail("sizes are too large: ", a, " and ", b);
  return sum;
}

}  // namespace fusedrnn
