// A chunk of the adjoint chain as one kernel: see persistent.h for how blocks share units and rows.
//
// Backward, a block owns the same 16 units of each stage, and of each projection's weight the
// columns that its units of the stage before are.  A step of a stage, from the last one to the
// first, is for each tile of the group:
//   1. what does not depend on other blocks.  A stage's backward is linear in the adjoints of its
//      results, so its factors are computed here, all of exp and tanh before the wait;
//   2. the gradient of the projection behind (of the first stage, a step later, if this is the
//      last), 8 rows of it, comes from the others;
//   3. each of 8 warps multiplies its share of it with the transposed weight, all GEMM blocks of
//      some units, and the parts are added up through shared memory, always in the same order;
//   4. half of the warps apply the factors to the sum, a unit of a row per thread, send the
//      gradient of this stage's projection, and write what else GEMMs over the whole chunk read.
// Before all steps, the states beside h are computed again, each unit by the thread that needs it.
//
// In 16 bits, where all packets of a row are full, they go through the gradient that GEMMs read,
// and nobody writes it a second time; each step has rows of its own there.  Elsewhere slots are
// memory for the exchange alone, and with flags two of them are enough.  Who writes a gradient of
// step i (counted backwards) has read, of every block that reads this gradient, what that made of
// step i - 1 of it if there is one stage, and so after it had read step i - 2; with two stages,
// what it made of the same step or of i - 1, all of it after step i - 1 of this one.
//
// The gradient of a float is sent rounded to TF32, and GEMMs read all of its bits.  It is stored
// where the pre-activation or the factor has been that it is the gradient of, by the thread that
// has read that: no thread reads what another one has written there, nor writes what it will read.
#pragma once
#include <tuple>

#include "persistent.h"
#include "persistent_backward_step.h"

namespace fusedrnn::cuda {

// What the stages of a block have in common.
template <class T>
struct AdjointBlock : BlockOfGroup<PersistentBackward<T>> {
  using Base = BlockOfGroup<PersistentBackward<T>>;
  using Base::Base, Base::shared, Base::thread;
  int turn = 0;  // of the two buffers of partial sums
  enum Array { kDh, kDstate };

  // A thread reads and writes only its own number of these.
  FUSEDRNN_DEVICE float& kept(int array, int tile) const {
    return shared[2 * kAdjointSumFloats + (tile * kKeptArrays + array) * kTileThreads +
                  thread.index];
  }
  FUSEDRNN_DEVICE float* next_turn() {
    if (FUSEDRNN_SEEDED_BUG != 7) turn ^= 1;
    return shared + turn * kAdjointSumFloats;
  }

  // Of stage s in step i, counted backwards: a row of one of its GEMM blocks.
  FUSEDRNN_DEVICE Packet* sent(int s, int i, int row, int gates, int gate, int packets) const {
    return Base::sent(s, i, row, gates * packets) + gate * packets;
  }
};

// The gradient of a projection, that of stage `kIndex`, times the block's columns of its weight.
// kDepth: blocks of units that a warp has room for.
template <class Stage, int kIndex, class T, int kDepth, int kPackets>
class AdjointProduct {
  static constexpr int kGates = Stage::kProjection;
  // GEMM blocks whose packets are on their way at once.
  static constexpr int kAhead = kPackets / kDepth < kGates ? kPackets / kDepth : kGates;
  static_assert(kAhead > 0);
  static constexpr int kChains = kPackets / 2;  // sums that do not wait for each other
  using Of = Operands<T>;

 public:
  FUSEDRNN_DEVICE AdjointProduct(AdjointBlock<T>& block) : block_(block) {
    const auto& w = args().weight[kIndex];
    width_ = int(args().step[kIndex].width);
    depth_ = warp_depth(width_, Of::kDepthColumns);
    if (block.first_unit() >= w.columns) return;
    FUSEDRNN_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      FUSEDRNN_UNROLL
      for (int d = 0; d < kDepth; ++d) load_weight(w, gate, d);
    }
  }

  // This warp's part of the product of step i, counted backwards, to `turn`.
  FUSEDRNN_DEVICE void run(int i, int tile, float* turn) const {
    const int row = block_.first_row(tile) + thread().g;
    if (args().exchange == Exchange::Flags) {
      block_.template wait_for_senders<kDepth, Of::kDepthColumns>(kIndex, i, tile, depth_, width_);
    }
    float sums[kChains][4] = {};
    Packet x[kGates][kDepth] = {};
    FUSEDRNN_UNROLL
    for (int gate = 0; gate < kAhead; ++gate) {
      FUSEDRNN_UNROLL
      for (int d = 0; d < kDepth; ++d) x[gate][d] = load(i, gate, row, d);
    }
    FUSEDRNN_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      if (args().exchange == Exchange::Packets) block_.wait_for(x[gate], sent(i, gate, row));
      sync_warp();  // mma is for lanes that are together, and some may have waited longer
      FUSEDRNN_UNROLL
      for (int d = 0; d < kDepth; ++d) {
        if (d < depth_) multiply(sums, gate, d, x[gate][d]);
        if (gate + kAhead < kGates) x[gate + kAhead][d] = load(i, gate + kAhead, row, d);
      }
    }
    FUSEDRNN_UNROLL
    for (int j = 0; j < 4; ++j) {
      float sum = sums[0][j];
      FUSEDRNN_UNROLL
      for (int chain = 1; chain < kChains; ++chain) sum += sums[chain][j];
      part(turn, thread().warp, j) = sum;
    }
  }
  // Of the unit that a thread computes.
  FUSEDRNN_DEVICE float total(float* turn) const {
    float sum = 0;
    FUSEDRNN_UNROLL
    for (int w = 0; w < kWarps; ++w) sum += part(turn, w, thread().warp);
    return sum;
  }

 private:
  FUSEDRNN_DEVICE const PersistentBackward<T>& args() const { return block_.args; }
  FUSEDRNN_DEVICE const Thread& thread() const { return block_.thread; }
  // The first of the units that this lane multiplies of its warp's block d, a packet of them.
  FUSEDRNN_DEVICE int unit(int d) const {
    return (thread().warp * depth_ + d) * Of::kDepthColumns + Of::kInPacket * thread().q;
  }
  // Number j of this lane's d, as warp `warp` has summed it up.
  FUSEDRNN_DEVICE float& part(float* turn, int warp, int j) const {
    return turn[(warp * 4 + j) * kWarpSize + thread().lane];
  }
  // A block of units of the weight is read along its rows, by as many lanes of each row as there
  // are for one, and turned in shared memory.
  FUSEDRNN_DEVICE void load_weight(const Matrix<const T>& w, int gate, int d) {
    constexpr int kLanes = kWarpSize / Of::kDepthColumns, kColumns = kTileUnits / kLanes;
    constexpr int kRowWords = kTileUnits / Of::kInWord;
    constexpr int kStagedWords = Of::kDepthColumns * kRowWords;
    static_assert(2 * kAdjointSumFloats >= kWarps * kStagedWords);
    auto* staged = reinterpret_cast<uint32_t*>(block_.shared) + thread().warp * kStagedWords;
    const int in_block = thread().lane / kLanes, first = thread().lane % kLanes * kColumns;
    const int k = (thread().warp * depth_ + d) * Of::kDepthColumns + in_block;
    const int column = block_.first_unit() + first;
    const int count = d < depth_ && k < width_ ? int(w.columns) - column : 0;
    const T* row = w.data + (int64_t(gate) * width_ + k) * w.row_stride + column * w.column_stride;
    FUSEDRNN_UNROLL
    for (int i = 0; i < kColumns; i += Of::kInPacket) {
      const Packet packet = load_operand(row + i * w.column_stride, w.column_stride, count - i);
      FUSEDRNN_UNROLL
      for (int j = 0; j < 4; ++j) {
        staged[in_block * kRowWords + (first + i) / Of::kInWord + j] = packet.word[j];
      }
    }
    if (FUSEDRNN_SEEDED_BUG != 13) sync_warp();
    // Numbers of a column one below the other, as many as are in a word.
    const auto at = [&](int k, int column) {
      if constexpr (Of::kInWord == 1) return staged[k * kRowWords + column];
      const uint32_t* word = staged + k * kRowWords + column / 2;
      const int shift = 16 * (column % 2);
      return ((word[0] >> shift) & 0xffffu) | word[kRowWords] >> shift << 16;
    };
    FUSEDRNN_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int column = thread().g + 8 * (i % 2);
      weight_[gate][d][i / 4][i % 4] =
          at(Of::kInPacket * thread().q + Of::kInWord * (i / 2), column);
    }
    sync_warp();
  }

  FUSEDRNN_DEVICE bool has_packet(int row, int d) const {
    return d < depth_ && unit(d) < width_ && row < args().batch;
  }
  FUSEDRNN_DEVICE const Packet* sent(int i, int gate, int row) const {
    return block_.sent(kIndex, i, row, kGates, gate, packets_of(width_, Of::kInPacket)) +
           unit(0) / Of::kInPacket;
  }
  FUSEDRNN_DEVICE Packet load(int i, int gate, int row, int d) const {
    if (!has_packet(row, d)) return {};
    const Packet* from = sent(i, gate, row) + 4 * d;
    return args().exchange == Exchange::Packets ? load_relaxed(from) : load_plain(from);
  }

  FUSEDRNN_DEVICE void multiply(float (&sums)[kChains][4], int gate, int d, const Packet& x) const {
    FUSEDRNN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int chain = (2 * (gate * kDepth + d) + half) % kChains;
      mma<T>(sums[chain], weight_[gate][d][half], x.word[2 * half], x.word[2 * half + 1]);
    }
  }

  AdjointBlock<T>& block_;
  int width_, depth_;
  uint32_t weight_[kGates][kDepth][2][4];
};

// The block's units of a stage.
template <class Stage, int kIndex, int kStages, class T>
class AdjointUnits {
 public:
  static constexpr bool kIsLast = kIndex == kStages - 1;

  FUSEDRNN_DEVICE AdjointUnits(AdjointBlock<T>& block)
      : block_(block), width_(int(block.args.step[kIndex].width)) {}

  FUSEDRNN_DEVICE const PersistentBackward<T>& args() const { return block_.args; }
  FUSEDRNN_DEVICE const BackwardStep<T, T>& step() const { return args().step[kIndex]; }
  FUSEDRNN_DEVICE const Thread& thread() const { return block_.thread; }
  FUSEDRNN_DEVICE bool has_units() const { return block_.first_unit() < width_; }
  FUSEDRNN_DEVICE int unit() const { return block_.first_unit() + thread().unit(); }
  FUSEDRNN_DEVICE int row_of_batch(int tile) const {
    return block_.first_row(tile) + thread().row();
  }
  FUSEDRNN_DEVICE bool has_tile(int tile) const {
    return tile < args().tiles && block_.first_row(tile) < args().batch;
  }
  FUSEDRNN_DEVICE bool is_there(int tile) const {
    return thread().computes() && unit() < width_ && row_of_batch(tile) < args().batch;
  }
  FUSEDRNN_DEVICE RowOfChunk row_of_chunk(int t, int tile) const {
    return block_.row_of_chunk(t, row_of_batch(tile));
  }
  FUSEDRNN_DEVICE Place place(int t, int tile) const { return block_.place(t, row_of_batch(tile)); }
  FUSEDRNN_DEVICE PersistentUnit unit_at(Place at) const {
    return zoneout_of<kIsLast, Stage::kState>(step().zoneout, at, unit());
  }
  FUSEDRNN_DEVICE void pre_at(const RowOfChunk& row, float (&pre)[Stage::kPre]) const {
    const int64_t no_shift = 0;
    load_pre<Stage>(pre, step(), row, no_shift, unit(), PersistentUnit{});
  }

 protected:
  AdjointBlock<T>& block_;
  int width_;
};

// The states beside h, each from the one before, and what the stage behind has projected.
template <class Stage, int kIndex, int kStages, class T>
class StateUnits : AdjointUnits<Stage, kIndex, kStages, T> {
  using Units = AdjointUnits<Stage, kIndex, kStages, T>;
  using Units::args, Units::block_, Units::step, Units::width_;

 public:
  using Units::Units;

  FUSEDRNN_DEVICE void run() const {
    for (int tile = 0; Units::has_tile(tile); ++tile) {
      if (Units::is_there(tile)) run(tile);
    }
  }

 private:
  FUSEDRNN_DEVICE void run(int tile) const {
    const int steps = args().operand != nullptr ? args().steps : args().steps - 1;
    ForwardStep<T, T> forward{};  // what forward_from_pre reads of it; h stands in the output
    forward.zoneout = step().zoneout;
    RowOfChunk row = Units::row_of_chunk(0, tile);
    float state = args().first_state[Units::row_of_batch(tile) * width_ + Units::unit()];
    args().state[row * width_ + Units::unit()] = state;
    if (steps <= 0) return;
    float pre[Stage::kPre];
    Units::pre_at(row, pre);
    for (int t = 0; t < steps; ++t) {
      const RowOfChunk next_row = Units::row_of_chunk(t + 1, tile);
      const Place at = Units::place(t, tile);
      float next_pre[Stage::kPre] = {}, factors[Stage::kPre], operand = 0;
      if (t + 1 < steps) Units::pre_at(next_row, next_pre);  // on their way meanwhile
      if (step().mask.is_active(at)) {
        UnitInput<float> given{};
        given.input = state;
        given.is_reset_next = step().mask.is_reset_next(at);
        const UnitResult<float> result = forward_from_pre<Stage>(
            forward, at, Units::unit(), Units::unit_at(at), pre, given, factors);
        state = result.carry;
        operand = result.next;
      }
      if (t + 1 < args().steps) args().state[next_row * width_ + Units::unit()] = state;
      if (args().operand != nullptr) {
        args().operand[row * width_ + Units::unit()] = narrow<T>(operand);
      }
      row = next_row;
      FUSEDRNN_UNROLL
      for (int k = 0; k < Stage::kPre; ++k) pre[k] = next_pre[k];
    }
  }
};

// Stage `kIndex` of `kStages`, and the projection that reads its result: that of the stage Behind.
template <class Stage, class Behind, int kIndex, int kStages, class T, int kDepth, int kPackets>
class AdjointStage : AdjointUnits<Stage, kIndex, kStages, T> {
  using Units = AdjointUnits<Stage, kIndex, kStages, T>;
  using Units::args, Units::block_, Units::step, Units::thread, Units::unit, Units::width_;
  using Units::kIsLast;
  using Block = AdjointBlock<T>;
  static constexpr int kGates = Stage::kProjection;
  static_assert(!kCarriesResult<Stage> || kIsLast);

 public:
  FUSEDRNN_DEVICE AdjointStage(Block& block) : Units(block), product_(block) {
    for (int tile = 0; Units::has_tile(tile); ++tile) {
      if (!Units::is_there(tile)) continue;
      const int at = Units::row_of_batch(tile) * width_ + unit();
      if constexpr (kIsLast) block.kept(Block::kDh, tile) = step().dout[at];
      if constexpr (Stage::kState) block.kept(Block::kDstate, tile) = step().dcarry[at];
    }
  }

  // Step t of the group's rows; -1: dh and the state's adjoint before the chunk.
  FUSEDRNN_DEVICE void run(int t) {
    if (!Units::has_units()) return;
    const int i = args().steps - 1 - t;
    const bool ends = t < 0;
    // The first time there is nothing yet, and what would come in the end may not be wanted.
    const bool has_product = kIsLast ? i > 0 && (!ends || args().wants_dh) : !ends;
    for (int tile = 0; Units::has_tile(tile); ++tile) {
      Early early{};
      if (!ends) early = before_exchange(t, tile);
      float sum = 0;
      if (has_product) sum = product(kIsLast ? i - 1 : i, tile);
      if (!thread().computes()) continue;
      if (ends) {
        finish(tile, sum);
      } else {
        compute(t, i, tile, early, sum);
      }
    }
  }

 private:
  // What a unit needs that is known before the exchange.  of_state: with the state's adjoint 1
  // instead of the result's.
  struct Early {
    bool is_there, is_active, is_reset_next;
    bool keeps_h, keeps_state;  // by zoneout, instead of what is new
    float grad_output;
    UnitAdjoints<Stage, float> of_result, of_state;
  };

  FUSEDRNN_DEVICE Early before_exchange(int t, int tile) const {
    Early early{};
    early.is_there = Units::is_there(tile);
    if (!early.is_there) return early;
    const auto& s = step();
    const RowOfChunk row = Units::row_of_chunk(t, tile);
    const Place at = Units::place(t, tile);
    early.is_active = s.mask.is_active(at);
    if (!early.is_active) return early;
    if constexpr (Stage::kResult) early.is_reset_next = s.mask.is_reset_next(at);
    float pre[Stage::kPre] = {}, carry = 0;
    if constexpr (!Stage::kLinear) Units::pre_at(row, pre);
    if constexpr (Stage::kState) {
      carry = args().state[row * width_ + unit()];
    } else if constexpr (Stage::kCarry) {
      const bool is_first = t == 0 && args().first_carry.data != nullptr;
      const T* h =
          is_first ? args().first_carry.at(Units::row_of_batch(tile)) : s.carry.at(int64_t(row));
      carry = widen(h[unit()]);
    }
    if constexpr (kIsLast) {
      if (s.grad_output.data != nullptr) {
        early.grad_output = widen(s.grad_output.at(int64_t(row))[unit()]);
      }
    }
    const PersistentUnit u = Units::unit_at(at);
    early.keeps_h = u.kept_h == 1.0f && s.zoneout.h.rest == 0;
    early.keeps_state = u.kept_state == 1.0f && s.zoneout.state.rest == 0;
    early.of_result = backward_from_pre<Stage>(s, at, unit(), u, pre, carry, 1.0f, 0.0f);
    if constexpr (Stage::kState) {
      early.of_state = backward_from_pre<Stage>(s, at, unit(), u, pre, carry, 0.0f, 1.0f);
    }
    return early;
  }

  FUSEDRNN_DEVICE float product(int i, int tile) {
    float* turn = block_.next_turn();
    product_.run(i, tile, turn);
    if (FUSEDRNN_SEEDED_BUG != 1) sync_block();
    return thread().computes() ? product_.total(turn) : 0.0f;
  }

  // sum: what the projection behind gives of the result's adjoint
  FUSEDRNN_DEVICE void compute(int t, int i, int tile, const Early& early, float sum) {
    float dout = sum, dstate = 0;
    if constexpr (kIsLast) dout += block_.kept(Block::kDh, tile);
    if constexpr (Stage::kState) dstate = block_.kept(Block::kDstate, tile);
    UnitAdjoints<Stage, float> d{};
    if (early.is_active) {
      if constexpr (Stage::kResult) {
        if (early.is_reset_next) {
          dstate = 0;
          if (kIsLast) dout = 0;
        }
      }
      dout += early.grad_output;
      d = apply(early, dout, dstate);
    }
    send(i, tile, d.dprojection);
    if (!early.is_there) return;
    if constexpr (kIsLast) {  // the projection of the first stage adds the rest
      const float dh = kCarriesResult<Stage> ? d.dinput : d.dh;
      block_.kept(Block::kDh, tile) = early.is_active ? dh : dout;
    }
    if constexpr (Stage::kState) {
      block_.kept(Block::kDstate, tile) = early.is_active ? d.dinput : dstate;
    }
    const int64_t no_shift = 0;
    store_backward<Stage>(step(), Units::row_of_chunk(t, tile), no_shift, unit(), PersistentUnit{},
                          d);
  }

  FUSEDRNN_DEVICE void finish(int tile, float sum) const {
    if (!Units::is_there(tile)) return;
    const int at = Units::row_of_batch(tile) * width_ + unit();
    if constexpr (kIsLast) step().dout[at] = block_.kept(Block::kDh, tile) + sum;
    if constexpr (Stage::kState) step().dcarry[at] = block_.kept(Block::kDstate, tile);
  }

  FUSEDRNN_DEVICE static float apply(float of_result, float of_state, float dout, float dstate) {
    if constexpr (Stage::kState) return of_result * dout + of_state * dstate;
    return of_result * dout;
  }
  FUSEDRNN_DEVICE static UnitAdjoints<Stage, float> apply(const Early& early, float dout,
                                                          float dstate) {
    const auto &r = early.of_result, &s = early.of_state;
    // Of what is kept, what is new has the factor 0, and no gradient even if the adjoint is NaN.
    const float dnew = early.keeps_h ? 0.0f : dout, dnew_state = early.keeps_state ? 0.0f : dstate;
    UnitAdjoints<Stage, float> d{};
    FUSEDRNN_UNROLL
    for (int k = 0; k < kSideAlone<Stage>; ++k) {
      d.dside[k] = apply(r.dside[k], s.dside[k], dnew, dnew_state);
    }
    FUSEDRNN_UNROLL
    for (int k = 0; k < kGates; ++k) {
      d.dprojection[k] = apply(r.dprojection[k], s.dprojection[k], dnew, dnew_state);
    }
    d.dinput = apply(r.dinput, s.dinput, dnew, dnew_state);
    d.dh = early.keeps_h ? dout : apply(r.dh, s.dh, dout, dstate);
    if (kCarriesResult<Stage> && early.keeps_h) d.dinput = dout;
    if (Stage::kState && early.keeps_state) d.dinput += dstate;
    return d;
  }

  FUSEDRNN_DEVICE void send(int i, int tile, const float (&dprojection)[kGates]) const {
    if (FUSEDRNN_SEEDED_BUG == 8) return;
    constexpr int kInPacket = Operands<T>::kInPacket;
    const int row = Units::row_of_batch(tile);
    const bool sends = thread().g % kInPacket == 0 && unit() < width_ && row < args().batch;
    FUSEDRNN_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      const Packet packet = pack_neighbours(narrow<T>(dprojection[gate]));
      if (!sends) continue;
      block_.store(block_.sent(kIndex, i, row, kGates, gate, packets_of(width_, kInPacket)) +
                       unit() / kInPacket,
                   packet);
    }
    block_.count_sent(kIndex, i, tile);
  }

  AdjointProduct<Behind, (kIndex + 1) % kStages, T, kDepth, kPackets> product_;
};

// The stages of a cell up to `kIndex`, from the last one on.
template <class T, int kDepth, int kIndex, class... Stages>
struct AdjointStages {
  static constexpr int kStages = sizeof...(Stages);
  using All = std::tuple<Stages...>;
  using Stage = std::tuple_element_t<kIndex, All>;
  using Behind = std::tuple_element_t<(kIndex + 1) % kStages, All>;
  static constexpr int kPackets = packets_ahead(8 * kDepth * (Stages::kProjection + ...));
  AdjointStage<Stage, Behind, kIndex, kStages, T, kDepth, kPackets> stage;
  AdjointStages<T, kDepth, kIndex - 1, Stages...> before;

  FUSEDRNN_DEVICE AdjointStages(AdjointBlock<T>& block) : stage(block), before(block) {}
  FUSEDRNN_DEVICE static void rebuild_states(AdjointBlock<T>& block) {
    if constexpr (Stage::kState) StateUnits<Stage, kIndex, kStages, T>(block).run();
    decltype(before)::rebuild_states(block);
  }
  FUSEDRNN_DEVICE void run(int t) {
    stage.run(t);
    before.run(t);
  }
};
template <class T, int kDepth, class... Stages>
struct AdjointStages<T, kDepth, -1, Stages...> {
  FUSEDRNN_DEVICE AdjointStages(AdjointBlock<T>&) {}
  FUSEDRNN_DEVICE static void rebuild_states(AdjointBlock<T>&) {}
  FUSEDRNN_DEVICE void run(int) {}
};

// The kernel.  A grid of groups * blocks, kPersistentThreads each, all of them there at once.
template <class T, int kDepth, class... Stages>
FUSEDRNN_DEVICE void persistent_backward(StageList<Stages...>, const PersistentBackward<T>& args,
                                         unsigned char* shared) {
  static_assert(sizeof...(Stages) <= 2, "two slots may not be enough");
  if (FUSEDRNN_SEEDED_BUG == 5 && thread_index() / kWarpSize == kWarps - 1) return;
  using All = AdjointStages<T, kDepth, int(sizeof...(Stages)) - 1, Stages...>;
  AdjointBlock<T> block(args, shared);
  All::rebuild_states(block);
  All stages(block);
  if (FUSEDRNN_SEEDED_BUG != 12)
    sync_block();  // weights have been turned where sums are going to be
  for (int t = args.steps - 1; t >= -1; --t) stages.run(t);
  end(args);
}

}  // namespace fusedrnn::cuda
