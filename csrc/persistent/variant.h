// Other ways for a persistent kernel to take a step, which the benchmark compares with the way of
// the package (bench/phases.h).  Bits, which may be combined.
#pragma once
#include "arguments.h"
#include "device.h"

namespace fusedrnn::cuda {

enum Variant : unsigned {
  kAsInPackage = 0,
  kRing = 1,        // what a unit reads from memory goes through a ring in shared memory
  kAsksForAll = 2,  // a lane asks again for all packets that it misses, not for the first one alone
  kAsksTwice = 4,   // of two questions on their way each comes half a round trip after the other
};

// kAsksTwice: more questions than may be on their way, so that a late answer harms no later one.
constexpr int kAskedAtMost = 4;
constexpr uint32_t kHalfRoundTrip = 150;  // cycles, to the L2 cache

// Words that a thread copies from memory into shared memory for itself, some items before it needs
// them.  Loads into registers would share a scoreboard with packets, whose test would then wait for
// both.
template <int kWords>
class Ring {
 public:
  static constexpr int kItems = 4, kFloats = kItems * kWords * kTileThreads;

  // `shared` has kFloats for all threads that compute units.
  FUSEDRNN_DEVICE Ring(float* shared) : mine_(shared + thread_index()) {}

  // Starts to copy word i of an item.  At first that is done for kItems items; then, for each item,
  // its words are read, and those of the item that is kItems later are copied.
  FUSEDRNN_DEVICE void copy(int i, const void* from) { copy_async(at(i), from); }
  FUSEDRNN_DEVICE void end_of_item() {
    end_of_copies();
    ++item_;
  }
  FUSEDRNN_DEVICE void wait() const { wait_for_copies<kItems - 1>(); }
  FUSEDRNN_DEVICE float word(int i) const { return *at(i); }

 private:
  FUSEDRNN_DEVICE float* at(int i) const {
    return mine_ + (item_ % kItems * kWords + i) * kTileThreads;
  }
  float* mine_;
  unsigned item_ = 0;  // that is copied next
};
constexpr int kMostRingWords = 6;  // LSTM's pre-activations, cell state and gradient, in backward
constexpr int kRingFloats = Ring<kMostRingWords>::kFloats;

// The shared memory that a variant needs besides, in floats: a ring for each stage, then answers.
FUSEDRNN_HD constexpr int variant_floats(unsigned variant, int depth) {
  const int rings = (variant & kRing) != 0 ? kMostStages * kRingFloats : 0;
  const int answers = (variant & kAsksTwice) != 0 ? kAskedAtMost * depth * kPersistentThreads : 0;
  return rings + answers * int(sizeof(Packet) / sizeof(float));
}

}  // namespace fusedrnn::cuda
