// A set of columns.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>

namespace fusedrnn::program {

struct Range {
  int64_t begin, count;

  int64_t end() const { return begin + count; }
  bool operator==(const Range& other) const { return begin == other.begin && count == other.count; }
};

class Columns {
 public:
  // Whether the set has all columns of a range.
  bool has(Range range) const {
    auto part = parts_.upper_bound(range.begin);
    if (part == parts_.begin()) return false;
    --part;
    return part->second >= range.end();
  }
  // Whether it has any of them.
  bool has_any(Range range) const {
    const auto next = parts_.lower_bound(range.end());  // the first that begins behind the range
    return next != parts_.begin() && std::prev(next)->second > range.begin;
  }
  void add(Range range) {
    int64_t begin = range.begin, end = range.end();
    auto part = parts_.upper_bound(end);
    while (part != parts_.begin() && std::prev(part)->second >= begin) {  // they touch
      --part;
      begin = std::min(begin, part->first);
      end = std::max(end, part->second);
      part = parts_.erase(part);
    }
    parts_[begin] = end;
  }

 private:
  std::map<int64_t, int64_t> parts_;  // begin and end of parts that do not touch each other
};

}  // namespace fusedrnn::program
