// Threads that work on the loops of one call.
//
// A barrier waits for the slowest thread, and so for one that the kernel does not run because other
// processes have its core: for milliseconds, at each of thousands of loops.  Here a loop waits only
// for what a thread has begun.  All else is taken over by those that run, and whoever waits for
// long gives up its core.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>

namespace fusedrnn::cpu {

// The leader hands out loops, one after another; members call work().  Members may come late or
// never.
class Team {
 public:
  // members: including the leader.
  explicit Team(int64_t members);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Calls f(first, last) for ranges of [0, count), each of at least `grain` items but for the last
  // ones, and returns after all of them.  work: how much all are, in elements of a stage.  An
  // exception of any of them is thrown here.  Only the leader may call this, and f may not.
  template <class F>
  void share(int64_t count, int64_t grain, int64_t work, const F& f) {
    run(count, grain, work, {&f, [](const void* body, int64_t first, int64_t last) {
                               (*static_cast<const F*>(body))(first, last);
                             }});
  }

  // Helps with all loops until the leader ends the work.  member: from 1 on.
  void work(int64_t member);
  // No loop comes any more.
  void end();

  // The team that the calling thread leads, or null.
  static Team* led() { return of_this_thread(); }

  // While it lives, the calling thread leads the team, whose work ends with it.
  class Leading {
   public:
    explicit Leading(Team& team) : team_(team) { of_this_thread() = &team; }
    ~Leading() {
      of_this_thread() = nullptr;
      team_.end();
    }
    Leading(const Leading&) = delete;
    Leading& operator=(const Leading&) = delete;

   private:
    Team& team_;
  };

 private:
  struct Body {
    const void* body;
    void (*call)(const void* body, int64_t first, int64_t last);
  };
  // What is left of a member's share: the first item in the lower half, the end in the upper one.
  // On a cache line of its own.
  struct alignas(64) Share {
    std::atomic<uint64_t> range{0};
  };

  static Team*& of_this_thread();
  void run(int64_t count, int64_t grain, int64_t work, const Body& body);
  void run_part(int64_t offset, int64_t count, int64_t grain);
  void wake();
  void take_all(int64_t member);
  bool take(Share& share);
  void finish(int64_t items);
  void wait_for_taken();
  bool wait_for_loop(uint32_t seen);

  const int64_t members_;
  const std::unique_ptr<Share[]> shares_;
  // Written by the leader between loops, and read by who has taken a range of it.
  Body body_{};
  int64_t offset_ = 0;
  std::atomic<int64_t> block_{1};
  int64_t missed_ = 0;  // the work since members were all awake, or were woken

  alignas(64) std::atomic<uint32_t> loops_{0};  // begun so far; members wait for the next one
  std::atomic<bool> is_over_{false};
  std::atomic<int32_t> sleepers_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};  // items of the loop
  std::atomic<bool> leader_sleeps_{false};

  std::mutex mutex_;
  std::condition_variable loop_begins_, loop_is_done_;
  std::exception_ptr error_;
};

}  // namespace fusedrnn::cpu
