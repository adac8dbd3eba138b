// Limits on the size of a call.
#pragma once
#include <cstdint>

namespace fusedrnn {

// Philox counters and row numbers have 32 bits; the top bits of the layer's word tell apart what
// the random numbers are for (step.h).
inline constexpr int64_t kMostRows = (int64_t(1) << 32) - 1, kMostLayers = (1 << 29) - 1;
// The most elements that a layer may have: its rows and features together times its features
// (check_sizes in driver/problem.h).  Byte counts in planner.h then stay far below 2^63.
inline constexpr int64_t kMostNumbers = int64_t(1) << 50;

}  // namespace fusedrnn
