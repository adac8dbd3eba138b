// Checks that fail in one sentence, and arithmetic of sizes that does not wrap.
#pragma once
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace fusedrnn {

// The text of one part of a message.  It is made without streams: to print a number, a stream asks
// the locales of libstdc++, and a process may hold several copies of libstdc++ that share some
// variables (for example when a library links it statically).  Such a stream prints wrong numbers
// or ends the process.
inline std::string text_of(const char* part) { return part; }
inline const std::string& text_of(const std::string& part) { return part; }
inline std::string text_of(double part) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", part);
  for (char* c = text; *c != 0; ++c) {
    if (*c == ',') *c = '.';  // the decimal separator of the user's locale
  }
  return text;
}
template <class Number, class = std::enable_if_t<std::is_integral_v<Number>>>
std::string text_of(Number part) {
  static_assert(!std::is_same_v<Number, bool> && !std::is_same_v<Number, char>, "no number");
  return std::to_string(part);
}

template <class Error = std::runtime_error, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::string text = "fusedrnn: ";
  ((text += text_of(parts)), ...);
  throw Error(text);
}

// The GPU refuses to run a grid of this size.  Nothing has been launched.
struct LaunchRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A macro, so that the text is made only when the check fails.  TORCH_CHECK would add the path of a
// source file on the machine that compiled the package.
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
