// When threads of a persistent kernel pass which point of a step, for the benchmark alone
// (bench/phases.h), which defines FUSEDRNN_PHASE_CLOCKS.  Without that, clocks are compiled to
// nothing.
#pragma once
#include "arguments.h"
#include "device.h"

namespace fusedrnn::cuda {

// Points of a stage's work on a tile, in their order; those from Sums on only for a thread that
// computes a unit.
enum class Point {
  Outputs,   // what follows the last store is done: outputs, kept states
  Inputs,    // inputs have been asked for; in backward, factors have been computed
  Question,  // the first packets have been asked for
  Arrival,   // the last of the packets has come
  Barrier,   // the products of all warps are in shared memory
  Sums,      // they have been added up
  Gates,     // the unit has been computed
  Store,     // and sent
};
constexpr int kPoints = 8;

#if !defined(FUSEDRNN_PHASE_CLOCKS)
struct PhaseClock {
  FUSEDRNN_DEVICE void start() const {}
  FUSEDRNN_DEVICE void at(int, Point) const {}
  template <class Results>
  FUSEDRNN_DEVICE void after(int, Point, const Results&) const {}
  FUSEDRNN_DEVICE void asked(int, uint32_t) const {}
};
#else
// What an observer writes down.  kind: a point, or what follows.
struct PhaseEvent {
  uint32_t stage_and_kind;  // kKinds * stage + kind
  uint32_t value;           // the clock, or for kQuestions how many
};
constexpr uint32_t kQuestions = kPoints, kStart = kPoints + 1, kKinds = kPoints + 2;

// Lane 0 of the first and of the last warp of four blocks of a grid: the first block, the last one,
// and two between.  In a small grid they are fewer.
constexpr int kObservedBlocks = 4, kObservers = 2 * kObservedBlocks;
FUSEDRNN_HD constexpr int observed_block(int observer, int blocks) {
  return observer / 2 * (blocks - 1) / (kObservedBlocks - 1);
}
FUSEDRNN_HD constexpr int observed_warp(int observer) { return observer % 2 == 0 ? 0 : kWarps - 1; }

struct PhaseLog {
  PhaseEvent* events;  // of observer 0; null if nothing is to be written down
  int64_t of_each;     // events for which each observer has memory
};
FUSEDRNN_DEVICE_MEMORY PhaseLog phase_log;

class PhaseClock {
 public:
  FUSEDRNN_DEVICE PhaseClock() {
    if (phase_log.events == nullptr || thread_index() % kWarpSize != 0) return;
    for (int i = 0; i < kObservers; ++i) {
      if (block_index() != observed_block(i, grid_blocks())) continue;
      if (thread_index() / kWarpSize != observed_warp(i)) continue;
      is_observer_ = true;
      next_ = phase_log.events + i * phase_log.of_each;
    }
  }

  // Before the first step.
  FUSEDRNN_DEVICE void start() { note(0, kStart, clock_after(0)); }
  // The thread has reached a point.
  FUSEDRNN_DEVICE void at(int stage, Point point) { note(stage, uint32_t(point), clock_after(0)); }
  // The same, as soon as it also has a float or an array of floats.
  template <class Results>
  FUSEDRNN_DEVICE void after(int stage, Point point, const Results& results) {
    note(stage, uint32_t(point), clock_after(bits_of(results)));
  }
  // The thread has asked for packets `times` times, each time after the answer.
  FUSEDRNN_DEVICE void asked(int stage, uint32_t times) { note(stage, kQuestions, times); }

 private:
  FUSEDRNN_DEVICE static uint32_t bits_of(float x) { return Traits<float>::bits(x); }
  template <int kCount>
  FUSEDRNN_DEVICE static uint32_t bits_of(const float (&numbers)[kCount]) {
    uint32_t bits = 0;
    FUSEDRNN_UNROLL
    for (int i = 0; i < kCount; ++i) bits ^= bits_of(numbers[i]);
    return bits;
  }
  // Without a branch, which would change the step.
  FUSEDRNN_DEVICE void note(int stage, uint32_t kind, uint32_t value) {
    store_if(is_observer_, &next_->stage_and_kind, kKinds * uint32_t(stage) + kind, value);
    ++next_;
  }

  bool is_observer_ = false;
  PhaseEvent* next_ = nullptr;
};
#endif

}  // namespace fusedrnn::cuda
