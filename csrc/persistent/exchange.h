// How blocks of a persistent kernel hand results to each other while it runs.
//
// A stage sends packets of rows of the batch; those of one step make up a slot.  Two protocols give
// the same bits:
//   Packets: each step has its own slot, preset to all ones.  No number is sent with those bits,
//       since NaN is always sent as 0x7fff or 0x7fffffff, so a word with other bits has arrived.
//   Flags: each warp that sends counts what it has sent, and a reader waits for the counts of the
//       warps that send to it.  Steps may alternate between two slots; the header of each kernel
//       says why two are enough for up to two stages.
#pragma once
#include "arguments.h"
#include "device.h"
#include "phase_clock.h"

namespace fusedrnn::cuda {

static_assert(sizeof(Packet) == kPacketBytes);

// A type's numbers as operands of mma.
template <class T>
struct Operands {
  static constexpr bool kRounds = std::is_same_v<T, float>;
  static constexpr int kInWord = 4 / sizeof(T), kInPacket = 4 * kInWord;
  static constexpr int kDepthColumns = 4 * kInPacket;  // the columns of two mma

  FUSEDRNN_DEVICE static uint32_t bits(T number) {
    if constexpr (kRounds) {
      return round_to_tf32(number);
    } else {
      return number.bits;
    }
  }
};

// A thread's place in its block.
struct Thread {
  int index = thread_index();
  int lane = index % kWarpSize, warp = index / kWarpSize;
  int g = lane / 4, q = lane % 4;  // its place in fragments, see mma

  // The unit and row that it computes after the product, if its warp does: warp w takes number w of
  // each lane's d (see mma).
  FUSEDRNN_DEVICE bool computes() const { return warp < kSenders; }
  FUSEDRNN_DEVICE int unit() const { return g + 8 * (warp / 2); }
  FUSEDRNN_DEVICE int row() const { return 2 * q + warp % 2; }
};

// Whether to read again, after `spins` reads, memory that another block has not written yet. A
// thread that gives up continues with what it has, all others then do so too, and the kernel ends
// with an error.  Calling give_up() right here would cost registers that the weights need.
FUSEDRNN_DEVICE bool may_spin(const ExchangeArguments& args, uint32_t spins) {
  constexpr uint32_t kLooksAlone = 64;  // reads between checks whether another thread has given up
  if (spins % kLooksAlone != kLooksAlone - 1) return true;
  if (spins < args.spin_limit && load_relaxed(args.given_up) != kGivenUp) return true;
  store_relaxed(args.given_up, kGivenUp);
  return false;
}
FUSEDRNN_DEVICE void end(const ExchangeArguments& args) {
  if (load_relaxed(args.given_up) == kGivenUp) give_up();
}

// A packet with the preset bits.
FUSEDRNN_DEVICE Packet not_sent() { return {{~0u, ~0u, ~0u, ~0u}}; }
FUSEDRNN_DEVICE bool has_arrived(const Packet& p) {
  const uint32_t low = p.word[0] > p.word[1] ? p.word[0] : p.word[1];
  const uint32_t high = p.word[2] > p.word[3] ? p.word[2] : p.word[3];
  return (low > high ? low : high) != 0xffffffffu;
}

// Packs neighbours of a row, which are in every fourth lane; the first of these lanes gets the
// packet.
template <class T>
FUSEDRNN_DEVICE Packet pack_neighbours(T value) {
  using Of = Operands<T>;
  constexpr uint32_t nan = Of::kInWord == 2 ? 0x7fffu : 0x7fffffffu, all_ones = 2 * nan + 1;
  uint32_t bits = Of::bits(value);
  if (bits == all_ones) bits = nan;  // PTX does not specify the NaN of a narrowing conversion
  Packet packet;
  packet.word[0] = Of::kInWord == 2 ? bits | shuffle_down(bits, 4) << 16 : bits;
  packet.word[1] = shuffle_down(packet.word[0], 4 * Of::kInWord);
  packet.word[2] = shuffle_down(packet.word[0], 8 * Of::kInWord);
  packet.word[3] = shuffle_down(packet.word[0], 12 * Of::kInWord);
  return packet;
}

// A row in arrays of the chunk.  One wide product gives its offset: the rows of a step have fewer
// than 2^31 numbers, since blocks keep some numbers of each unit in shared memory.
struct RowOfChunk {
  int t, b, row_step;

  FUSEDRNN_DEVICE explicit operator int64_t() const { return wide_product(t, row_step) + b; }
  FUSEDRNN_DEVICE friend int64_t operator*(const RowOfChunk& row, int64_t columns) {
    return wide_product(row.t, row.row_step * int(columns)) + row.b * int(columns);
  }
};

// A block's place in the grid, and its exchange with the blocks of its group.  Steps are counted in
// the order of work.
template <class Args>
struct BlockOfGroup {
  const Args& args;
  Thread thread;
  int group, index;  // index: of the block in its group
  int rows;          // rows of the batch that the group has

  uint32_t first_t;  // of the chunk's first step, counted from the start of the sequence
  float* shared;
  PhaseClock clock;

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

  // Where stage s sends step i, from row `row` of the batch on.
  FUSEDRNN_DEVICE Packet* sent(int s, int i, int row, int row_packets) const {
    return slot(s, i, row_packets, args.sent[s].first + int64_t(row) * row_packets);
  }
  // The same place, given the place in step 0.
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
  // Called by a warp after it has stored everything that it sends for stage s in step i.
  FUSEDRNN_DEVICE void count_sent(int s, int i, int tile) const {
    if (args.exchange == Exchange::Packets) return;
    sync_warp();
    if (thread.lane != 0) return;
    uint32_t* count = counts(s, index) + thread.warp;
    store_release(count, count_of(i, tile));
  }

  // Packets: reads again the packets (every fourth one from `from` on) that have not arrived. Where
  // a group has several tiles, many lanes wait most of the time and would use up the bandwidth of
  // the L2 cache if each read all packets that it misses.  So a lane reads only the first missing
  // one, and once that has arrived, all others at once.  Measured on an H100 (docs/gpu.md). Returns
  // how often it has read, each time after the answer.
  template <int kCount>
  FUSEDRNN_DEVICE uint32_t wait_for(Packet (&x)[kCount], const Packet* from) const {
    int asked_for = kCount;
    for (uint32_t spins = 0;; ++spins) {
      int first = kCount;  // the first that is missing
      FUSEDRNN_UNROLL
      for (int d = kCount - 1; d >= 0; --d) first = has_arrived(x[d]) ? first : d;
      if (first == kCount || !may_spin(args, spins)) return spins;
      pause();
      const bool asks_for_all = args.tiles == 1 || first > asked_for;
      FUSEDRNN_UNROLL
      for (int d = 0; d < kCount; ++d) {
        if (d == first || (asks_for_all && !has_arrived(x[d]))) x[d] = load_relaxed(from + 4 * d);
      }
      asked_for = first;
    }
  }
  // Flags: waits for the senders of this warp's columns, `depth` blocks (at most kDepth) of the
  // units of stage s.  Each lane waits for one sending warp.
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
