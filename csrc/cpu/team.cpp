#include "team.h"

#include <algorithm>
#include <chrono>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fusedrnn::cpu {
namespace {

// About as long as it takes to fall asleep and to be woken.
constexpr std::chrono::microseconds kSpin{30};
// The work from which on sleeping members are woken: what that costs the leader is then a small
// part of it.
constexpr int64_t kWorthWaking = 32'768;
// A member takes its share in so many blocks: the others then have something to take over.
constexpr int64_t kBlocksOfShare = 4;
// Ranges have 32 bits for each end.
constexpr int64_t kMostItems = int64_t{1} << 30;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Whether `is_true` becomes true while this thread spins.
template <class F>
bool spin_until(const F& is_true) {
  constexpr int kLooks = 32;  // between two looks at the clock
  for (int i = 0; i < kLooks; ++i) {
    if (is_true()) return true;
    pause();
  }
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kLooks; ++i) {
      if (is_true()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

uint64_t range_of(int64_t first, int64_t last) { return uint64_t(first) | uint64_t(last) << 32; }

}  // namespace

Team::Team(int64_t members) : members_(members), shares_(new Share[size_t(members)]) {}

Team*& Team::of_this_thread() {
  static thread_local Team* team = nullptr;
  return team;
}

void Team::run(int64_t count, int64_t grain, int64_t work, const Body& body) {
  body_ = body;
  missed_ += work;
  for (int64_t first = 0; first < count; first += kMostItems) {
    run_part(first, std::min(count - first, kMostItems), grain);
  }
}

void Team::run_part(int64_t offset, int64_t count, int64_t grain) {
  offset_ = offset;
  const int64_t blocks = members_ * kBlocksOfShare;
  block_.store(std::max(grain, (count + blocks - 1) / blocks), std::memory_order_relaxed);
  unfinished_.store(count, std::memory_order_relaxed);
  // Each of these gives what is above to whoever takes a range: a member that still looks for what
  // is left of the last loop may be the first.
  for (int64_t m = 0; m < members_; ++m) {
    shares_[m].range.store(range_of(count * m / members_, count * (m + 1) / members_),
                           std::memory_order_release);
  }
  loops_.fetch_add(1);
  if (sleepers_.load() == 0) {
    missed_ = 0;
  } else if (missed_ >= kWorthWaking) {
    missed_ = 0;
    wake();
  }
  take_all(0);
  wait_for_taken();
  if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Team::work(int64_t member) {
  uint32_t seen = 0;
  while (wait_for_loop(seen)) {
    seen = loops_.load();
    take_all(member);
  }
}

void Team::end() {
  is_over_.store(true);
  loops_.fetch_add(1);
  if (sleepers_.load() > 0) wake();
}

void Team::wake() {
  // Whoever is falling asleep waits by then, or has seen the loop.
  std::unique_lock(mutex_).unlock();
  loop_begins_.notify_all();
}

// False if there will be none.
bool Team::wait_for_loop(uint32_t seen) {
  // The end is looked for by itself: a member that has seen a loop begin, and is held up, counts
  // loops only after the end has been counted, too.
  const auto has_begun = [&] { return loops_.load() != seen || is_over_.load(); };
  if (!spin_until(has_begun)) {
    std::unique_lock lock(mutex_);
    sleepers_.fetch_add(1);  // before the look at loops_; the leader has it the other way round
    loop_begins_.wait(lock, has_begun);
    sleepers_.fetch_sub(1);
  }
  return !is_over_.load();
}

// The member's own share first, then what the others have left.
void Team::take_all(int64_t member) {
  for (int64_t i = 0; i < members_; ++i) {
    Share& share = shares_[(member + i) % members_];
    while (take(share)) {
    }
  }
}

bool Team::take(Share& share) {
  uint64_t range = share.range.load(std::memory_order_acquire);
  int64_t first, last;
  do {
    first = int64_t(range & UINT32_MAX);
    last = int64_t(range >> 32);
    if (first >= last) return false;
    last = std::min(last, first + block_.load(std::memory_order_relaxed));
  } while (!share.range.compare_exchange_weak(range, range_of(last, int64_t(range >> 32)),
                                              std::memory_order_acq_rel,
                                              std::memory_order_acquire));
  // From here on the loop cannot end, nor what it calls change, before finish().
  try {
    body_.call(body_.body, offset_ + first, offset_ + last);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (error_ == nullptr) error_ = std::current_exception();
  }
  finish(last - first);
  return true;
}

void Team::finish(int64_t items) {
  if (unfinished_.fetch_sub(items) != items) return;
  if (!leader_sleeps_.load()) return;
  std::unique_lock(mutex_).unlock();
  loop_is_done_.notify_one();
}

void Team::wait_for_taken() {
  const auto is_done = [&] { return unfinished_.load() == 0; };
  if (spin_until(is_done)) return;
  std::unique_lock lock(mutex_);
  // Before the look at unfinished_; finish() has it the other way round.
  leader_sleeps_.store(true);
  loop_is_done_.wait(lock, is_done);
  leader_sleeps_.store(false);
}

}  // namespace fusedrnn::cpu
