// How blocks of a persistent kernel hand results to each other while it runs.
//
// What a stage sends in a step, packets of rows of the batch, stands in a slot.  There are two
// protocols, which give the same bits:
//   Packets: each step has a slot of its own, preset to all ones.  No number is sent as that,
//       since there is one NaN, 0x7fff or 0x7fffffff, so a word that is something else has arrived.
//   Flags: each warp that sends counts what it has sent, and who reads waits for the counts of
//       those who send to it.  Steps may take turns with two slots; each kernel says why these are
//       enough for up to two stages.
#pragma once
#include "arguments.h"
#include "device.h"

namespace fusedrnn::cuda {

static_assert(sizeof(Packet) == kPacketBytes);

// Numbers of a type as operands of mma.
template <class T>
struct Operands {
  static constexpr bool kRounds = std::is_same_v<T, float>;
  static constexpr int kInWord = 4 / sizeof(T), kInPacket = 4 * kInWord;
  static constexpr int kDepthColumns = 4 * kInPacket;  // those of two mma

  FUSEDRNN_DEVICE static uint32_t bits(T number) {
    if constexpr (kRounds) {
      return round_to_tf32(number);
    } else {
      return number.bits;
    }
  }
};

// Where a thread stands.
struct Thread {
  int index = thread_index();
  int lane = index % kWarpSize, warp = index / kWarpSize;
  int g = lane / 4, q = lane % 4;  // of fragments, see mma

  // What it computes in the end, if its warp does: warp w takes number w of each lane's d.
  FUSEDRNN_DEVICE bool computes() const { return warp < kSenders; }
  FUSEDRNN_DEVICE int unit() const { return g + 8 * (warp / 2); }
  FUSEDRNN_DEVICE int row() const { return 2 * q + warp % 2; }
};

// Whether to look again at what has not been there `looks` times.  A thread that gives up goes on
// without, as then do all, and the kernel ends with an error: a call here, in the middle of things,
// would cost registers that the weights need.
FUSEDRNN_DEVICE bool may_spin(const ExchangeArguments& args, uint32_t spins) {
  constexpr uint32_t kLooksAlone = 64;  // before it asks whether another thread has given up
  if (spins % kLooksAlone != kLooksAlone - 1) return true;
  if (spins < args.spin_limit && load_relaxed(args.given_up) != kGivenUp) return true;
  store_relaxed(args.given_up, kGivenUp);
  return false;
}
FUSEDRNN_DEVICE void end(const ExchangeArguments& args) {
  if (load_relaxed(args.given_up) == kGivenUp) give_up();
}

// As what is preset.
FUSEDRNN_DEVICE Packet not_sent() { return {{~0u, ~0u, ~0u, ~0u}}; }
FUSEDRNN_DEVICE bool has_arrived(const Packet& p) {
  const uint32_t low = p.word[0] > p.word[1] ? p.word[0] : p.word[1];
  const uint32_t high = p.word[2] > p.word[3] ? p.word[2] : p.word[3];
  return (low > high ? low : high) != 0xffffffffu;
}

// The values of lanes that have neighbours of a row, which are four apart; the first of them gets
// all.
template <class T>
FUSEDRNN_DEVICE Packet pack_neighbours(T value) {
  using Of = Operands<T>;
  constexpr uint32_t nan = Of::kInWord == 2 ? 0x7fffu : 0x7fffffffu, all_ones = 2 * nan + 1;
  uint32_t bits = Of::bits(value);
  if (bits == all_ones) bits = nan;  // PTX does not say to which NaN it narrows
  Packet packet;
  packet.word[0] = Of::kInWord == 2 ? bits | shuffle_down(bits, 4) << 16 : bits;
  packet.word[1] = shuffle_down(packet.word[0], 4 * Of::kInWord);
  packet.word[2] = shuffle_down(packet.word[0], 8 * Of::kInWord);
  packet.word[3] = shuffle_down(packet.word[0], 12 * Of::kInWord);
  return packet;
}

// A row of arrays of the chunk.  One wide product gives its offset: a step has fewer than 2^31
// numbers in all of its rows, since blocks keep some of each unit in their shared memory.
struct RowOfChunk {
  int t, b, row_step;

  FUSEDRNN_DEVICE explicit operator int64_t() const { return wide_product(t, row_step) + b; }
  FUSEDRNN_DEVICE friend int64_t operator*(const RowOfChunk& row, int64_t columns) {
    return wide_product(row.t, row.row_step * int(columns)) + row.b * int(columns);
  }
};

// A block's place among the others, and its exchange with those of its group.  Steps are counted in
// the order of work.
template <class Args>
struct BlockOfGroup {
  const Args& args;
  Thread thread;
  int group, index;  // which block of which group
  int rows;          // of the batch that the group has

  uint32_t first_t;  // of the chunk's first step, counted from the start of the sequence
  float* shared;

  FUSEDRNN_DEVICE BlockOfGroup(const Args& args, unsigned char* shared)
      : args(args), group(block_index() / args.blocks), index(block_index() % args.blocks),
        rows(rows_of(args, block_index() / args.blocks)),
        first_t(Place::of_row(args.step[0].first_row, args.batch).t),
        shared(reinterpret_cast<float*>(shared)) {}

  FUSEDRNN_DEVICE int first_unit() const { return index * kTileUnits; }
  FUSEDRNN_DEVICE int first_row(int tile) const { return (group * args.tiles + tile) * kTileRows; }
  FUSEDRNN_DEVICE bool has_tile(int tile) const { return tile * kTileRows < rows; }

  FUSEDRNN_DEVICE RowOfChunk row_of_chunk(int t, int row) const { return {t, row, args.row_step}; }
  FUSEDRNN_DEVICE Place place(int t, int row) const {
    return {first_t + uint32_t(args.row_step < 0 ? -t : t), uint32_t(row)};
  }

  // What stage s sends of step i, from one row of the batch on.
  FUSEDRNN_DEVICE Packet* sent(int s, int i, int row, int row_packets) const {
    return slot(s, i, row_packets, args.sent[s].first + int64_t(row) * row_packets);
  }
  // The same from where it is of step 0.
  template <class P>
  FUSEDRNN_DEVICE P* slot(int s, int i, int row_packets, P* of_step_0) const {
    const Slots& slots = args.sent[s];
    const int slot = i & slots.mask;
    return of_step_0 + wide_product(slot, slots.rows * row_packets);
  }
  FUSEDRNN_DEVICE void store(Packet* to, const Packet& packet) const {
    if (args.exchange == Exchange::Packets) {
      store_relaxed(to, packet);
    } else {
      store_plain(to, packet);
    }
  }
  // Of a warp that has stored all that it sends of stage s in step i.
  FUSEDRNN_DEVICE void count_sent(int s, int i, int tile) const {
    if (args.exchange == Exchange::Packets) return;
    sync_warp();
    if (thread.lane != 0) return;
    uint32_t* count = counts(s, index) + thread.warp;
    store_release(count, count_of(i, tile));
  }

  // Packets: loads again what has not been there, every fourth packet from `from` on.  Many lanes
  // wait most of the time, and would fill the L2 cache's bandwidth if each asked for all that it
  // lacks: it asks for the first of these, and once that has come for all others at once.
  template <int kCount>
  FUSEDRNN_DEVICE void wait_for(Packet (&x)[kCount], const Packet* from) const {
    int asked_for = kCount;
    for (uint32_t spins = 0;; ++spins) {
      int first = kCount;  // that is missing
      FUSEDRNN_UNROLL
      for (int d = kCount - 1; d >= 0; --d) first = has_arrived(x[d]) ? first : d;
      if (first == kCount || !may_spin(args, spins)) return;
      pause();
      const bool has_come = first > asked_for;
      FUSEDRNN_UNROLL
      for (int d = 0; d < kCount; ++d) {
        if (d == first || (has_come && !has_arrived(x[d]))) x[d] = load_relaxed(from + 4 * d);
      }
      asked_for = first;
    }
  }
  // Flags: of each warp `depth` of kDepth blocks of columns, which are units of stage s.  A lane
  // waits for one sender each.
  template <int kDepth, int kDepthColumns>
  FUSEDRNN_DEVICE void wait_for_senders(int s, int i, int tile, int depth, int columns) const {
    constexpr int in_block = kDepthColumns / kTileUnits;
    static_assert(kDepth * in_block * kSenders <= kWarpSize);
    const int sender = thread.warp * depth * in_block + thread.lane / kSenders;
    if (thread.lane < depth * in_block * kSenders && sender * kTileUnits < columns) {
      const uint32_t* count = counts(s, sender) + thread.lane % kSenders;
      const uint32_t wanted = count_of(i, tile);
      for (uint32_t spins = 0; int32_t(load_acquire(count) - wanted) < 0; ++spins) {
        if (!may_spin(args, spins)) break;
        pause();
      }
    }
    sync_warp();
  }

 private:
  FUSEDRNN_DEVICE static int rows_of(const Args& args, int group) {
    const int most = args.tiles * kTileRows, left = args.batch - group * most;
    return left < most ? left : most;
  }
  FUSEDRNN_DEVICE uint32_t* counts(int s, int sender) const {
    return args.counts[s] + (int64_t(group) * args.blocks + sender) * kSenders;
  }
  FUSEDRNN_DEVICE uint32_t count_of(int i, int tile) const {
    return uint32_t(i) * uint32_t(args.tiles) + uint32_t(tile) + 1;
  }
};

}  // namespace fusedrnn::cuda
