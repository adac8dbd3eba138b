// The threads of a call on the CPU: one region of torch's pool, within which a team shares out the
// loops.
#pragma once
#include <exception>
#include <thread>

#include "../base/checked.h"
#include "../cpu/denormals.h"
#include "../cpu/step.h"
#include "../cpu/team.h"
#include "cpu_threads.h"
#include "stable.h"

namespace fusedrnn {

// The numbers of multiply-adds, as forward counts them, from which on a pass has a team: of all
// rows, and of one for a forward and for a backward pass.  With fewer for each row, to read what
// another thread has written takes longer than to compute it.  Backward reads more of that, since
// gradients of weights are sums over all rows.
constexpr int64_t kTeamWork = 1'000'000, kTeamRowWork[] = {250, 1'000};

// Calls f on this thread, as the leader of a team of the pool's threads.
template <class F>
void lead_team(int64_t threads, const F& f) {
  cpu::Team team(threads);
  const std::thread::id caller = std::this_thread::get_id();
  bool has_led = false;
  std::exception_ptr error;  // passing through torch, it would lose its type
  const auto lead = [&] {
    has_led = true;
    const cpu::FlushDenormals flush;
    const cpu::Team::Leading leading(team);
    try {
      f();
    } catch (...) {
      error = std::current_exception();
    }
  };
  // A thread of each index, if the pool gives as many; all are the caller's within another region.
  torch::stable::parallel_for(0, threads, 1, [&](int64_t index, int64_t) {
    if (std::this_thread::get_id() != caller) {
      const cpu::FlushDenormals flush;
      team.work(index);
    } else if (!has_led) {
      lead();
    }
  });
  if (!has_led) lead();
  if (error != nullptr) std::rethrow_exception(error);
}

// Calls f, a pass whose GEMMs take `row_work` multiply-adds for each of `rows` in forward, with
// denormals flushed and on as many threads as are worth it.
template <class F>
void with_team(int64_t rows, int64_t row_work, bool is_backward, const F& f) {
  const int64_t threads = pool_threads(), work = times(rows, row_work);
  const bool has_team = cpu::Team::led() != nullptr;  // in a handler of a signal, within a call
  // Torch's GEMMs have one thread within a region of its pool.
  const bool is_little = work < kTeamWork || row_work < kTeamRowWork[is_backward];
  if (threads == 1 || has_team || is_little || !cpu::multiplies()) {
    const FlushDenormalsInPool flush(has_team ? 0 : work);
    f();
  } else {
    lead_team(threads, f);
  }
}

}  // namespace fusedrnn
