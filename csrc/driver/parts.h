// The parts of a sequence whose last states alone are wanted.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace fusedrnn {

struct Part {
  int64_t begin, steps;  // begin: its first step in memory
};

// Parts have about as many steps as there are parts, so that the states before all parts and the
// outputs of one part take the least memory together.  They are counted in the order of work.
struct Parts {
  int64_t seq_len;
  bool is_reversed;  // whether time runs backwards

  // The steps of each part but the last one in memory, which may be shorter.  Parts of fewer steps
  // would save little and cost time.
  int64_t steps() const {
    constexpr int64_t kLeast = 16;
    return std::max(kLeast, int64_t(std::sqrt(double(seq_len))));
  }
  int64_t count() const { return (seq_len + steps() - 1) / steps(); }
  Part at(int64_t index) const {
    const int64_t begin = (is_reversed ? count() - 1 - index : index) * steps();
    return {begin, std::min(steps(), seq_len - begin)};
  }
};

}  // namespace fusedrnn
