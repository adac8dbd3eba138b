// A block's shared memory, in forward and in backward.
#pragma once
#include "exchange.h"

namespace fusedrnn::cuda {

// The shared memory of a block's stages: kTurn numbers for each of two buffers, then biases, then
// values that are kept from step to step, then a ring.
template <class Args, int kTurn>
struct SharedMemory : BlockOfGroup<Args> {
  using Base = BlockOfGroup<Args>;
  using Base::Base, Base::shared, Base::thread;
  int turn = 0;  // which of the two buffers of partial sums is in use

  // Each thread reads and writes only its own number.
  FUSEDRNN_DEVICE float& kept(int array, int tile) const {
    const int before = 2 * kTurn + kBiasFloats;
    return shared[before + (tile * kKeptArrays + array) * kTileThreads + thread.index];
  }
  FUSEDRNN_DEVICE float* ring() const { return &kept(0, Base::args.tiles) - thread.index; }
  enum Bias { kHiddenBias, kInputBias };
  FUSEDRNN_DEVICE float& bias(int stage, Bias which, int gate, int unit) const {
    const int row = (stage * 2 + which) * kMostGates + gate;
    return shared[2 * kTurn + row * kTileUnits + unit];
  }

  FUSEDRNN_DEVICE float* next_turn() {
    turn ^= 1;
    return shared + turn * kTurn;
  }
};

}  // namespace fusedrnn::cuda
