// How large a call may be.
#pragma once
#include <cstdint>

namespace fusedrnn {

// Philox counters and row numbers have 32 bits, some of which tell layers apart (step.h).
inline constexpr int64_t kMostRows = (int64_t(1) << 32) - 1, kMostLayers = (1 << 29) - 1;
// Of all arrays of a call that grow with the rows, and of all weights, counted together: numbers.
// So nothing that planner.h counts in bytes comes near 2^63.
inline constexpr int64_t kMostNumbers = int64_t(1) << 50;

}  // namespace fusedrnn
