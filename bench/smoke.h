// The probes of bench/smoke.cu, which check the functions of csrc/persistent/device.h on a GPU.
// They use nothing else of CUDA, so they run on the emulation too (tests/emulator/smoke.cpp).
#pragma once
#include "../csrc/persistent/device.h"

namespace fusedrnn::smoke {

using namespace cuda;

constexpr int kRows = 16, kColumns = 8;  // the shape of one mma's product

template <class T>
constexpr int kDepth = std::is_same_v<T, float> ? 8 : 16;

// Small whole numbers, whose products and sums are exact in all dtypes; no two rows or columns of a
// matrix are alike.
FUSEDRNN_HD int a_at(int row, int k) { return (3 * row + 5 * k + row * k) % 7 - 3; }
FUSEDRNN_HD int b_at(int k, int column) { return (2 * k + 3 * column + k * column) % 5 - 2; }

template <class T>
FUSEDRNN_HD int product_at(int row, int column) {
  int sum = 0;
  for (int k = 0; k < kDepth<T>; ++k) sum += a_at(row, k) * b_at(k, column);
  return sum;
}

template <class T>
FUSEDRNN_DEVICE uint32_t operand(int first, int second) {
  if constexpr (std::is_same_v<T, float>) {
    return round_to_tf32(float(first));
  } else {
    return narrow<T>(float(first)).bits | uint32_t(narrow<T>(float(second)).bits) << 16;
  }
}

// Run by one warp: computes out[kRows][kColumns] from fragments placed as device.h says.
template <class T>
FUSEDRNN_DEVICE void multiply(float* out) {
  const int lane = thread_index() % kWarpSize, g = lane / 4, q = lane % 4;
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i % 2);
    if constexpr (std::is_same_v<T, float>) {
      a[i] = operand<T>(a_at(row, q + 4 * (i / 2)), 0);
    } else {
      const int k = 2 * q + 8 * (i / 2);
      a[i] = operand<T>(a_at(row, k), a_at(row, k + 1));
    }
  }
  for (int i = 0; i < 2; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      b[i] = operand<T>(b_at(q + 4 * i, g), 0);
    } else {
      b[i] = operand<T>(b_at(2 * q + 8 * i, g), b_at(2 * q + 8 * i + 1, g));
    }
  }
  float d[4] = {};
  mma<T>(d, a, b[0], b[1]);
  for (int i = 0; i < 4; ++i) out[(g + 8 * (i / 2)) * kColumns + 2 * q + i % 2] = d[i];
}

// The memory through which two blocks of one warp send packets, one per lane, to each other and
// count them.
struct Exchange {
  Packet* packets;   // [hops][kWarpSize], preset to all ones if each hop has a slot
  uint32_t* counts;  // one for each block, preset to 0
  uint32_t* wrong;   // the number, from 1 on, of a hop that arrived wrong; preset to 0
  int hops;
  uint32_t spin_limit;  // reads of memory before a hop counts as wrong
};

FUSEDRNN_DEVICE Packet packet_of(int hop) {
  const uint32_t word = uint32_t(hop) * kWarpSize + uint32_t(thread_index());
  return {{word, word + 1, word + 2, word + 3}};
}
FUSEDRNN_DEVICE bool is_as_sent(const Exchange& args, const Packet& got, int hop) {
  const Packet sent = packet_of(hop);
  for (int i = 0; i < 4; ++i) {
    if (got.word[i] == sent.word[i]) continue;
    store_relaxed(args.wrong, uint32_t(hop) + 1);
    return false;
  }
  return true;
}
FUSEDRNN_DEVICE bool has_all(const Packet& p) {
  for (const uint32_t word : p.word) {
    if (word == 0xffffffffu) return false;
  }
  return true;
}

// Hop i is from block i % 2 to the other block, which sends hop i + 1 once hop i has arrived.
FUSEDRNN_DEVICE void hop_by_packets(const Exchange& args) {
  for (int i = 0; i < args.hops; ++i) {
    Packet* slot = args.packets + i * kWarpSize + thread_index();
    if (i % 2 == block_index()) {
      store_relaxed(slot, packet_of(i));
      continue;
    }
    Packet got = load_relaxed(slot);
    for (uint32_t spins = 0; !has_all(got) && spins < args.spin_limit; ++spins) {
      pause();
      got = load_relaxed(slot);
    }
    if (!is_as_sent(args, got, i)) return;
    sync_warp();
  }
}

// Two alternating slots are enough: a block has read a hop before it sends the next one in the
// other slot.
FUSEDRNN_DEVICE void hop_by_flags(const Exchange& args) {
  for (int i = 0; i < args.hops; ++i) {
    Packet* slot = args.packets + i % 2 * kWarpSize + thread_index();
    uint32_t* count = args.counts + i % 2;
    if (i % 2 == block_index()) {
      store_plain(slot, packet_of(i));
      sync_warp();
      if (thread_index() == 0) store_release(count, uint32_t(i) + 1);
      continue;
    }
    for (uint32_t spins = 0; load_acquire(count) < uint32_t(i) + 1 && spins < args.spin_limit;
         ++spins) {
      pause();
    }
    if (!is_as_sent(args, load_plain(slot), i)) return;
    sync_warp();
  }
}

}  // namespace fusedrnn::smoke
