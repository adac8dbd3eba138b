// Threads of torch's pool that a call on the CPU may use, and their mode for denormals.
#pragma once
#if __has_include(<pthread.h>)
#include <pthread.h>
#endif

#include <atomic>
#include <optional>

#include "../cpu/denormals.h"
#include "stable.h"

namespace fusedrnn {

// True in a child that was forked after a call had used several threads.  The pool's threads are
// not forked along, and a loop that shares its work would wait for them for ever.
inline std::atomic<bool>& lacks_pool() {
  static std::atomic<bool> lacks{false};
  return lacks;
}

inline int64_t pool_threads() {
  if (lacks_pool()) return 1;
  const int64_t threads = torch::stable::get_num_threads();
#if __has_include(<pthread.h>)
  if (threads > 1) {
    [[maybe_unused]] static const int registered =
        pthread_atfork(nullptr, nullptr, [] { lacks_pool() = true; });
  }
#endif
  return threads;
}

// The number of multiply-adds from which on torch may use several threads for a GEMM.
constexpr int64_t kParallelWork = 10'000'000;

// While it lives, denormals are flushed to zero on this thread, and on the threads of torch's pool
// if GEMMs of `work` multiply-adds use them; then all threads return to their previous mode.
class FlushDenormalsInPool {
 public:
  explicit FlushDenormalsInPool(int64_t work) : threads_(pool_threads()) {
    start_pool();
    caller_.emplace();
    if (work < kParallelWork) threads_ = 1;
    if (threads_ > 1) on_each_thread([] { worker().emplace(); });
  }
  ~FlushDenormalsInPool() {
    if (threads_ > 1) on_each_thread([] { worker().reset(); });
  }

 private:
  static std::optional<cpu::FlushDenormals>& worker() {
    static thread_local std::optional<cpu::FlushDenormals> flush;
    return flush;
  }
  // A thread inherits the mode of the thread that starts it, so the pool must be started before.
  void start_pool() const {
    static thread_local int64_t started = 1;
    if (threads_ > 1 && threads_ != started) on_each_thread([] {});
    started = threads_;
  }
  template <class F>
  void on_each_thread(const F& f) const {
    torch::stable::parallel_for(0, threads_, 1, [&](int64_t, int64_t) { f(); });
  }

  std::optional<cpu::FlushDenormals> caller_;
  int64_t threads_;
};

}  // namespace fusedrnn
