// A chunk of forward steps as one kernel: the weights stay in registers, and blocks send h to each
// other.
//
// A block owns 16 units of each stage.  As many blocks as the widest stage needs form a *group*,
// which holds one copy of the weights.  Groups share the batch among themselves in tiles of 8 rows
// and are independent of each other.  A step of a stage does for each tile of the group:
//   1. The work that does not depend on other blocks: input gates, noise and masks.  What comes
//      from memory is copied or loaded a step or more before.
//   2. The operand arrives from other blocks, 8 rows of it: h, or the result of the stage before.
//   3. Each of 8 warps multiplies its share of the columns (mma: 16 units times 8 rows for each
//      block of the GEMM result, a *gate* below), and the partial sums are added up through shared
//      memory, always in the same order.
//   4. Half of the warps compute the tile, one unit of a row per thread (stages.h, step.h), and
//      send the results, 16 bytes of neighbours of a row in one packet.
//
// A product may take its columns in any order.  The order here makes the 16 bytes that a lane
// loads, neighbours of a row, its operands of two successive mma: words 0 and 1 of the first, 2 and
// 3 of the second.  This holds for eight numbers with m16n8k16 and for four floats with m16n8k8.
//
// float32 operands are rounded to TF32: weights when they are loaded, h when it is sent or loaded.
// Rounding once before the exchange gives the same bits as rounding in every block after it. The h
// in carry, output and the next chunk keeps all of its bits.
//
// Units, columns and rows beyond the actual sizes are zeros in registers; memory has none of them.
//
// Flags: two slots are enough.  Before a block writes the result of step t, it has waited for the
// latest result of each reader, which the reader sent after it was done with step t - 2.
//
// Longer than 350 lines, because its parts are the steps of one loop, in their order.
#pragma once
#include "operand.h"
#include "ring.h"
#include "shared_memory.h"
#include "unit.h"

namespace fusedrnn::cuda {

template <class T>
using PersistentBlock = SharedMemory<PersistentForward<T>, kTurnFloats>;

// Stage `kIndex` of `kStages`.  kDepth: the number of blocks of columns for which a warp has
// registers.
template <class Stage, int kIndex, int kStages, class T, int kDepth>
class PersistentStage {
  static constexpr int kGates = Stage::kHiddenGates;
  static constexpr bool kIsLast = kIndex == kStages - 1;
  static constexpr int kSource =
      (kIndex + kStages - 1) % kStages;  // the stage that makes the operand
  static constexpr bool kHoldsH = kIsLast && !kCarriesResult<Stage>;
  enum Array { kCarryArray, kHArray };
  using Of = Operands<T>;

 public:
  FUSEDRNN_DEVICE PersistentStage(PersistentBlock<T>& block)
      : block_(block), input_gates_(block.ring()) {
    const auto& w = args().weight[kIndex];
    width_ = int(step().width);
    columns_ = int(w.columns);
    depth_ = warp_depth(columns_, Of::kDepthColumns);
    first_unit_ = block.first_unit();
    if (!has_units()) return;
    FUSEDRNN_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      FUSEDRNN_UNROLL
      for (int d = 0; d < kDepth; ++d) {
        FUSEDRNN_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int unit = first_unit_ + thread().g + 8 * i;
          const int64_t row = int64_t(gate) * width_ + unit;
          const int count = d < depth_ && unit < width_ ? columns_ - column(d) : 0;
          const T* at = w.data + row * w.row_stride + column(d) * w.column_stride;
          const Packet packet = load_operand(at, w.column_stride, count);
          FUSEDRNN_UNROLL
          for (int k = 0; k < 4; ++k) weight_[gate][d][k / 2][i + 2 * (k % 2)] = packet.word[k];
        }
      }
    }
    row_packets_ = packets_of(columns_, Of::kInPacket);
    from_ = block.sent(kSource, 0, block.first_row(0) + thread().g, row_packets_) +
            column(0) / Of::kInPacket;
    for (int d = 0; d < depth_; ++d) packets_ += column(d) < columns_;
    load_bias(PersistentBlock<T>::kHiddenBias, step().hidden_bias, kGates);
    load_bias(PersistentBlock<T>::kInputBias, step().input_bias, Stage::kInputGates);
    for (int tile = 0; thread().computes() && block.has_tile(tile); ++tile) {
      const int row = row_of_batch(tile);
      const bool is_there = unit() < width_ && row < args().batch;
      if constexpr (Stage::kCarry) {
        block.kept(kCarryArray, tile) = is_there ? widen(step().carry.at(row)[unit()]) : 0.0f;
      }
      if constexpr (kHoldsH) {
        block.kept(kHArray, tile) = is_there ? widen(args().h.at(row)[unit()]) : 0.0f;
      }
    }
    if constexpr (kHasInputGates) {
      next_ = preload(0, 0);
      for (int i = 0; i < input_gates_.kAhead; ++i) copy_input_gates();
    }
  }

  // Step t of the group's rows.
  FUSEDRNN_DEVICE void run(int t) {
    if (!has_units()) return;
    for (int tile = 0; block_.has_tile(tile); ++tile) {
      float* turn = block_.next_turn();
      clock().at(kIndex, Point::Outputs);
      Operand x;
      if constexpr (kAsksFirst) x = ask(t, tile);
      Preloaded preloaded;
      if constexpr (kHasInputGates) {
        preloaded = next_;
        const bool has_more = block_.has_tile(tile + 1);
        next_ = preload(has_more ? t : t + 1, has_more ? tile + 1 : 0);
      } else {
        preloaded = preload(t, tile);
      }
      clock().at(kIndex, Point::Inputs);
      if constexpr (Stage::kNoise) {
        if (step().noise.eps.data == nullptr) draw(t, tile, turn + kSumFloats);
      }
      if constexpr (!kAsksFirst) x = ask(t, tile);
      wait_for(t, tile, x);
      clock().at(kIndex, Point::Arrival);
      sync_warp();  // mma is for lanes that are together, and some may have waited longer
      float sums[kGates][4] = {};
      multiply(sums, x);
      // Now, since the answer to a question that follows at once would come after these numbers.
      if constexpr (kHasInputGates) copy_input_gates();
      FUSEDRNN_UNROLL
      for (int gate = 0; gate < kGates; ++gate) {
        FUSEDRNN_UNROLL
        for (int i = 0; i < 4; ++i) part(turn, thread().warp, gate, i) = sums[gate][i];
      }
      sync_block();
      clock().at(kIndex, Point::Barrier);
      if (thread().computes()) compute(t, tile, preloaded, turn);
      // Warps that compute nothing would ask for packets all the while, and delay the others'. With
      // several tiles there are packets that have arrived.
      if (args().tiles == 1) sync_block();
    }
  }

 private:
  // Other stages have almost nothing to load, and no registers left to load it early.
  static constexpr bool kHasInputGates = Stage::kInputGates > 0;
  // A block that asks too early must ask again, and all blocks share the L2 cache; but drawing
  // noise takes long.  Measured on an H100 (docs/gpu.md).
  static constexpr bool kAsksFirst = kStages > 1;

  // The inputs of a unit that are known before the exchange, as they were loaded.  No arithmetic
  // yet: it would wait for the loads.
  struct Preloaded {
    bool is_there : 1, is_active : 1, is_reset_next : 1;  // in one register
    T eps;
    PersistentUnit unit;
  };

  FUSEDRNN_DEVICE const PersistentForward<T>& args() const { return block_.args; }
  FUSEDRNN_DEVICE const ForwardStep<T, T>& step() const { return args().step[kIndex]; }
  FUSEDRNN_DEVICE const Thread& thread() const { return block_.thread; }
  FUSEDRNN_DEVICE PhaseClock& clock() const { return block_.clock; }
  FUSEDRNN_DEVICE bool has_units() const { return first_unit_ < width_; }
  FUSEDRNN_DEVICE int unit() const { return first_unit_ + thread().unit(); }
  // The first of the columns that this lane multiplies in block d of its warp; a packet holds them.
  FUSEDRNN_DEVICE int column(int d) const {
    return (thread().warp * depth_ + d) * Of::kDepthColumns + Of::kInPacket * thread().q;
  }
  FUSEDRNN_DEVICE int row_of_batch(int tile) const {
    return block_.first_row(tile) + thread().row();
  }
  // Number i of this lane's fragment d (see mma), as summed by warp `warp`.
  FUSEDRNN_DEVICE float& part(float* turn, int warp, int gate, int i) const {
    return turn[((warp * kGates + gate) * 4 + i) * kWarpSize + thread().lane];
  }

  // Called before the first barrier; biases are read after it.
  FUSEDRNN_DEVICE void load_bias(typename PersistentBlock<T>::Bias which, const float* bias,
                                 int gates) const {
    for (int i = thread().index; i < gates * kTileUnits; i += kPersistentThreads) {
      const int gate = i / kTileUnits, in_block = i % kTileUnits;
      const bool is_there = bias != nullptr && first_unit_ + in_block < width_;
      block_.bias(kIndex, which, gate, in_block) =
          is_there ? bias[gate * width_ + first_unit_ + in_block] : 0.0f;
    }
  }

  FUSEDRNN_DEVICE Preloaded preload(int t, int tile) const {
    Preloaded preloaded{};
    const auto& s = step();
    const int b = row_of_batch(tile);
    const RowOfChunk row = block_.row_of_chunk(t, b);
    const Place at = block_.place(t, b);
    preloaded.is_there =
        t < args().steps && thread().computes() && unit() < width_ && b < args().batch;
    if (!preloaded.is_there) return preloaded;
    preloaded.is_active = s.mask.is_active(at);
    if constexpr (Stage::kResult) preloaded.is_reset_next = s.mask.is_reset_next(at);
    if constexpr (Stage::kNoise) {
      if (s.noise.eps.data != nullptr) {
        preloaded.eps = s.noise.eps.at(int64_t(row))[unit()];
      }
    }
    preloaded.unit = zoneout_of<kIsLast, Stage::kCellState>(s.zoneout, at, unit());
    return preloaded;
  }

  // Starts to copy the input gates of the next tile for which it has not.
  FUSEDRNN_DEVICE void copy_input_gates() {
    const int b = row_of_batch(copied_tile_);
    if (copied_t_ < args().steps && thread().computes() && unit() < width_ && b < args().batch) {
      const int64_t columns = Stage::kInputGates * step().width;
      const float* first =
          step().input_gates + block_.row_of_chunk(copied_t_, b) * columns + unit();
      FUSEDRNN_UNROLL
      for (int gate = 0; gate < Stage::kInputGates; ++gate) {
        input_gates_.copy(gate, first + gate * step().width);
      }
    }
    input_gates_.end_of_copy();
    const bool has_more = block_.has_tile(copied_tile_ + 1);
    copied_tile_ = has_more ? copied_tile_ + 1 : 0;
    copied_t_ += has_more ? 0 : 1;
  }

  // One draw is four units, so that the lanes of one warp draw for all of a tile: the last one,
  // which has no units to compute meanwhile.
  FUSEDRNN_DEVICE void draw(int t, int tile, float* noise) const {
    if (thread().warp != kWarps - 1) return;
    const int in_tile = thread().lane / 4, quad = thread().lane % 4;
    const int b = block_.first_row(tile) + in_tile;
    if (b >= args().batch) return;

    float four[4];
    step().noise.draw(block_.place(t, b), uint32_t(first_unit_ / 4 + quad), four);
    FUSEDRNN_UNROLL
    for (int i = 0; i < 4; ++i) noise[in_tile * kNoiseStride + 4 * quad + i] = four[i];
  }

  struct Operand {
    Packet packet[kDepth];
  };

  FUSEDRNN_DEVICE bool is_sent(int t) const { return kIndex > 0 || t > 0; }
  FUSEDRNN_DEVICE int source_step(int t) const { return kIndex == 0 ? t - 1 : t; }

  FUSEDRNN_DEVICE Operand ask(int t, int tile) const {
    const bool is_asked = is_sent(t) && args().exchange == Exchange::Packets;
    const Packet* at = is_asked ? from(t, tile) : from_;
    Operand x{};
    FUSEDRNN_UNROLL
    for (int d = 0; d < kDepth; ++d) {
      load_relaxed_if(is_asked && has_packet(tile, d), at + 4 * d, x.packet[d]);
    }
    clock().at(kIndex, Point::Question);
    return x;
  }

  FUSEDRNN_DEVICE void wait_for(int t, int tile, Operand& x) const {
    if (is_sent(t) && args().exchange == Exchange::Packets) {
      clock().asked(kIndex, 1 + block_.wait_for(x.packet, from(t, tile)));
      return;
    }
    if (is_sent(t)) {
      block_.template wait_for_senders<kDepth, Of::kDepthColumns>(kSource, source_step(t), tile,
                                                                  depth_, columns_);
    }
    const T* h = is_sent(t) ? nullptr : args().h.at(block_.first_row(tile) + thread().g);
    FUSEDRNN_UNROLL
    for (int d = 0; d < kDepth; ++d) {
      if (!has_packet(tile, d)) continue;
      if (is_sent(t)) {
        x.packet[d] = load_plain(from(t, tile) + 4 * d);
      } else {  // h before the chunk
        x.packet[d] = load_operand<true>(h + column(d), 1, columns_ - column(d));
      }
    }
  }

  // The packets of a tile that this lane multiplies, in the memory of the exchange.
  FUSEDRNN_DEVICE const Packet* from(int t, int tile) const {
    return block_.slot(kSource, source_step(t), row_packets_, from_) +
           tile * kTileRows * row_packets_;
  }
  FUSEDRNN_DEVICE bool has_packet(int tile, int d) const {
    return d < packets_ && tile * kTileRows + thread().g < block_.rows;
  }

  FUSEDRNN_DEVICE void multiply(float (&sums)[kGates][4], const Operand& x) const {
    FUSEDRNN_UNROLL
    for (int d = 0; d < kDepth; ++d) {
      if (d >= depth_) continue;
      FUSEDRNN_UNROLL
      for (int half = 0; half < 2; ++half) {
        FUSEDRNN_UNROLL
        for (int gate = 0; gate < kGates; ++gate) {
          mma<T>(sums[gate], weight_[gate][d][half], x.packet[d].word[2 * half],
                 x.packet[d].word[2 * half + 1]);
        }
      }
    }
  }

  FUSEDRNN_DEVICE void compute(int t, int tile, const Preloaded& preloaded, float* turn) const {
    const auto& s = step();
    const int b = row_of_batch(tile);
    float hidden_gates[kGates], pre[Stage::kPre], factors[Stage::kPre];
    FUSEDRNN_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      hidden_gates[gate] =
          block_.bias(kIndex, PersistentBlock<T>::kHiddenBias, gate, thread().unit());
      FUSEDRNN_UNROLL
      for (int w = 0; w < kWarps; ++w) hidden_gates[gate] += part(turn, w, gate, thread().warp);
    }
    clock().after(kIndex, Point::Sums, hidden_gates);
    float input_gates[Stage::kInputGates > 0 ? Stage::kInputGates : 1];
    if constexpr (kHasInputGates) input_gates_.wait();
    FUSEDRNN_UNROLL
    for (int gate = 0; gate < Stage::kInputGates; ++gate) {
      input_gates[gate] =
          input_gates_.word(gate) +
          block_.bias(kIndex, PersistentBlock<T>::kInputBias, gate, thread().unit());
    }
    Stage::combine(input_gates, hidden_gates, pre);
    UnitInput<float> given{};
    given.is_reset_next = preloaded.is_reset_next;
    if constexpr (Stage::kCarry) given.input = block_.kept(kCarryArray, tile);
    if constexpr (Stage::kNoise) {
      const float* drawn = turn + kSumFloats + thread().row() * kNoiseStride + thread().unit();
      given.input = s.noise.eps.data == nullptr ? *drawn : widen(preloaded.eps);
    }
    if constexpr (kHoldsH) given.h = block_.kept(kHArray, tile);

    UnitResult<float> result{};
    if (preloaded.is_active) {
      result = forward_from_pre<Stage>(s, block_.place(t, b), unit(), preloaded.unit, pre, given,
                                       factors);
    } else {  // the state stays; the result of an earlier stage is 0
      result.carry = given.input;
      if constexpr (kIsLast) result.next = kHoldsH ? given.h : given.input;
    }
    clock().after(kIndex, Point::Gates, result.next);
    const T next = narrow<T>(preloaded.is_there ? result.next : 0.0f);
    send(t, tile, next);
    if (!preloaded.is_there) return;
    if constexpr (Stage::kCarry) block_.kept(kCarryArray, tile) = result.carry;
    if constexpr (kHoldsH) block_.kept(kHArray, tile) = widen(next);
    if (preloaded.is_active) {
      const int64_t no_shift = 0;
      store_forward<Stage>(s, block_.row_of_chunk(t, b), no_shift, unit(), preloaded.unit, pre,
                           result.out);
    }
    if (t == args().steps - 1) {
      if constexpr (Stage::kCarry) {
        if (s.carry_out != nullptr) s.carry_out[b * width_ + unit()] = result.carry;
      }
      if (kIsLast && s.operand != nullptr) s.operand[b * width_ + unit()] = next;
    }
  }

  FUSEDRNN_DEVICE void send(int t, int tile, T value) const {
    if (kIsLast && t == args().steps - 1) return;
    const Packet packet = pack_neighbours(value);
    const int row = row_of_batch(tile);
    if (thread().g % Of::kInPacket == 0 && unit() < width_ && row < args().batch) {
      Packet* to =
          block_.sent(kIndex, t, row, packets_of(width_, Of::kInPacket)) + unit() / Of::kInPacket;
      block_.store(to, packet);
      clock().at(kIndex, Point::Store);
      if (args().next != 0) store_plain(to + args().next, not_sent());
    }
    block_.count_sent(kIndex, t, tile);
  }

  PersistentBlock<T>& block_;
  int width_, columns_, depth_, first_unit_;
  int row_packets_ = 0;           // packets in a row of the operand
  int packets_ = 0;               // how many of them this lane multiplies
  const Packet* from_ = nullptr;  // where they start in the first tile and step 0
  Preloaded next_{};              // what the next tile preloads
  Ring<Stage::kInputGates> input_gates_;
  int copied_t_ = 0, copied_tile_ = 0;  // whose input gates are copied next
  uint32_t weight_[kGates][kDepth][2][4];
};

// The stages of a cell one after the other.
template <class T, int kDepth, int kIndex, int kStages, class... Stages>
struct PersistentStages {
  FUSEDRNN_DEVICE PersistentStages(PersistentBlock<T>&) {}
  FUSEDRNN_DEVICE void run(int) {}
};
template <class T, int kDepth, int kIndex, int kStages, class Stage, class... Stages>
struct PersistentStages<T, kDepth, kIndex, kStages, Stage, Stages...> {
  PersistentStage<Stage, kIndex, kStages, T, kDepth> stage;
  PersistentStages<T, kDepth, kIndex + 1, kStages, Stages...> others;

  FUSEDRNN_DEVICE PersistentStages(PersistentBlock<T>& block) : stage(block), others(block) {}
  FUSEDRNN_DEVICE void run(int t) {
    stage.run(t);
    others.run(t);
  }
};

// The kernel.  Its grid has groups * blocks blocks of kPersistentThreads threads, all of which must
// run at once.
template <class T, int kDepth, class... Stages>
FUSEDRNN_DEVICE void persistent_forward(StageList<Stages...>, const PersistentForward<T>& args,
                                        unsigned char* shared) {
  static_assert(sizeof...(Stages) <= 2, "two slots may not be enough");
  static_assert(((Stages::kInputGates > 0) + ...) <= 1, "a block has memory for one ring");
  PersistentBlock<T> block(args, shared);
  PersistentStages<T, kDepth, 0, int(sizeof...(Stages)), Stages...> stages(block);
  block.clock.start();
  for (int t = 0; t < args.steps; ++t) stages.run(t);
  end(args);
}

}  // namespace fusedrnn::cuda
