// Numbers that a thread reads from memory some items before it needs them; an item is one tile of a
// step.
#pragma once
#include "arguments.h"
#include "device.h"

namespace fusedrnn::cuda {

// They are copied into shared memory, and not loaded into registers: such loads would share a
// scoreboard with those of packets, so that the wait for a packet would also wait for them, from
// memory outside of the L2 cache about as long as for the other blocks.
template <int kWords>
class Ring {
 public:
  static constexpr int kAhead = 3;
  static_assert(kAhead < kRingItems);

  // `shared` has ring_floats(kWords).  The thread is one of those that compute units.
  FUSEDRNN_DEVICE Ring(float* shared) : mine_(shared + thread_index()) {}

  // Starts to copy word i of the item that is kAhead after the present one; before the first one,
  // kAhead items are copied.
  FUSEDRNN_DEVICE void copy(int i, const void* from) { copy_async(at(copied_, i), from); }
  FUSEDRNN_DEVICE void end_of_copy() {
    end_of_copies();
    ++copied_;
  }
  // Word i of the present item, for which the next one has been copied and wait() called.
  FUSEDRNN_DEVICE void wait() const { wait_for_copies<kAhead>(); }
  FUSEDRNN_DEVICE float word(int i) const { return *at(copied_ - 1 - kAhead, i); }

 private:
  FUSEDRNN_DEVICE float* at(unsigned item, int i) const {
    return mine_ + (item % kRingItems * kWords + i) * kTileThreads;
  }
  float* mine_;
  unsigned copied_ = 0;  // items
};

}  // namespace fusedrnn::cuda
