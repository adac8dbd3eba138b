// How the loops of a call on the CPU are shared out among its threads: each loop by itself, or all
// steps of a chunk by the rows of the batch.
#pragma once
#include <algorithm>

#include "../base/matrix.h"
#include "../cpu/denormals.h"
#include "../cpu/team.h"
#include "cpu_threads.h"
#include "stable.h"

namespace fusedrnn {

// While it lives, what this thread is told to do for all rows of the batch it does for a share of
// them, by itself.
struct RowShare {
  RowShare(int64_t first, int64_t last) : first(first), last(last) { of_this_thread = this; }
  ~RowShare() { of_this_thread = nullptr; }
  RowShare(const RowShare&) = delete;
  RowShare& operator=(const RowShare&) = delete;

  template <class C>
  Matrix<C> of(const Matrix<C>& all) const {
    return all.row_range(first, last - first);
  }

  const int64_t first, last;
  static inline thread_local const RowShare* of_this_thread = nullptr;
};

// The number of elements of a stage per thread below which one thread does all: to share them would
// cost as much as it saves, by a barrier of torch's pool or in a team, whose threads take a loop up
// in less than a microsecond.
constexpr int64_t kStageGrain = 4'096, kTeamGrain = 1'024;
// The number of terms of a product that take as long as one element of a stage.
constexpr int64_t kTermsPerElement = 16;

// Calls f for ranges of [0, count), where each item is as much work as `size` elements of a stage.
template <class F>
void parallel(int64_t count, int64_t size, const F& f) {
  cpu::Team* const team = cpu::Team::led();
  const int64_t least = team == nullptr ? kStageGrain : kTeamGrain;
  const int64_t grain = std::max<int64_t>(1, least / std::max<int64_t>(size, 1));
  const bool is_within = RowShare::of_this_thread != nullptr;
  if (count <= grain || is_within || lacks_pool()) return f(0, count);
  if (team != nullptr) return team->share(count, grain, count * size, f);
  torch::stable::parallel_for(0, count, grain, [&](int64_t first, int64_t last) {
    const cpu::FlushDenormals flush;
    f(first, last);
  });
}
// The same for the rows of a batch, or of this thread's share of it.
template <class F>
void of_rows(int64_t rows, int64_t width, const F& f) {
  const RowShare* const share = RowShare::of_this_thread;
  if (share != nullptr) return f(share->first, share->last);
  parallel(rows, width, f);
}
// The same for copies by torch, which shares them by itself where there is no team.  To copy a few
// elements takes as long as one element of a stage.
template <class F>
void share_copies(int64_t count, int64_t elements, const F& f) {
  if (cpu::Team::led() == nullptr) return f(0, count);
  parallel(count, (elements + 3) / 4, f);
}

// The rows per thread from which on it pays that each thread reads all weights, and the number of
// them that a thread takes at once, if there are as many.
constexpr int64_t kLeastRows = 2, kRowsAtOnce = 8;

inline bool can_share_rows(int64_t rows) {
  return cpu::Team::led() != nullptr && !lacks_pool() &&
         rows >= kLeastRows * torch::stable::get_num_threads();
}
// Calls f(first) for shares of the rows.  work: the multiply-adds of all of them.
template <class F>
void share_rows(int64_t rows, int64_t work, const F& f) {
  cpu::Team::led()->share(rows, kRowsAtOnce, work / kTermsPerElement,
                          [&](int64_t first, int64_t last) {
                            const RowShare share(first, last);
                            f(first);
                          });
}

}  // namespace fusedrnn
