// The backward_data of a chunk as one kernel; forward.h explains how blocks share units and rows.
//
// In backward a block owns the same 16 units of each stage as in forward.  Of the weight of each
// stage it holds the columns that belong to its units of the stage before.  A step of a stage, with
// stages in reverse order, does for each tile of the group:
//   1. The work that does not depend on other blocks.  A stage's backward is linear in the
//      gradients of its results, so the factors are computed here, which is all of exp and tanh,
//      from inputs that were loaded a step before; then the inputs of the next step are loaded.
//   2. The gradient of the consumer's hidden gates arrives from other blocks, 8 rows of it.  The
//      consumer is the stage that reads this stage's result: the next stage of the same step, or
//      for the last stage the first stage of the following step.
//   3. Each of 8 warps multiplies its share of that gradient with the transposed weight, all GEMM
//      blocks of some units, and the partial sums are added up through shared memory, always in
//      the same order.
//   4. Half of the warps apply the factors of the tile to the sums, one unit of a row per thread,
//      send the gradient of this stage's hidden gates, and write the other gradients that GEMMs
//      over the whole chunk read.
// Before all steps, each thread recomputes the cell states that it needs.
//
// In 16 bits, if the packets of a row are all full, blocks send gradients through the array that
// GEMMs read, so gradients are written only once; each step has its own rows there.  Otherwise
// slots are memory for the exchange alone, and with flags two of them are enough: before a block
// writes a gradient of step i (counted backwards), it has read from every reader of this gradient
// something that the reader sent after it was done with step i - 2.  With one stage, that is the
// reader's own gradient of step i - 1; with two stages, it is the reader's gradient of the other
// stage, of step i or i - 1, which was sent after the reader was done even with step i - 1 of this
// stage.
//
// In float32 a gradient is sent rounded to TF32, but GEMMs read all of its bits.  It is stored in
// the place of the pre-activation or factor whose gradient it is, by the thread that has read that
// place: no thread reads what another thread writes there, nor overwrites what it will read itself.
#pragma once
#include <tuple>

#include "backward_units.h"
#include "variant.h"

namespace fusedrnn::cuda {

// Stage `kIndex` of `kStages`.  Consumer is the stage whose projection reads its result.  kVariant:
// see variant.h.
template <class Stage, class Consumer, int kIndex, int kStages, class T, int kDepth, int kPackets,
          unsigned kVariant>
class BackwardStage : BackwardUnits<Stage, kIndex, kStages, T> {
  using Units = BackwardUnits<Stage, kIndex, kStages, T>;
  using typename Units::Block;
  using Units::args, Units::block_, Units::step, Units::thread, Units::unit, Units::width_;
  using Units::kIsLast;
  static constexpr int kGates = Stage::kHiddenGates;
  // Whether the weights leave enough registers to load the inputs of the next step early.
  static constexpr bool kHasRing = (kVariant & kRing) != 0;
  static constexpr bool kLoadsAhead = !kHasRing && kPackets > 4;
  static_assert(!kCarriesResult<Stage> || kIsLast);

 public:
  FUSEDRNN_DEVICE BackwardStage(Block& block) : Units(block), product_(block), ring_(block) {
    for (int tile = 0; block.has_tile(tile); ++tile) {
      if (!Units::is_there(tile)) continue;
      const int at = Units::row_of_batch(tile) * width_ + unit();
      if constexpr (kIsLast) block.kept(Block::kDh, tile) = step().dout[at];
      if constexpr (Stage::kCellState) block.kept(Block::kDc, tile) = step().dcarry[at];
    }
    if (kLoadsAhead && Units::has_units()) next_ = load(args().steps - 1, 0);
  }

  // Step t of the group's rows; t = -1 finishes dh and dc before the chunk.
  FUSEDRNN_DEVICE void run(int t) {
    if (!Units::has_units()) return;
    const bool ends = t < 0, has_product = this->has_product(t);
    for (int tile = 0; block_.has_tile(tile); ++tile) {
      block_.clock.at(kIndex, Point::Outputs);
      if constexpr (kHasRing) ring_.copy();
      const Preloaded preloaded = before_exchange(t, tile, kLoadsAhead ? next_ : load(t, tile));
      if constexpr (kLoadsAhead) {
        const bool has_more = block_.has_tile(tile + 1);
        next_ = load(has_more ? t : t - 1, has_more ? tile + 1 : 0);
      }
      block_.clock.at(kIndex, Point::Inputs);
      typename Product::Operand x = product_.ask(has_product, source_step(t), tile);
      block_.clock.at(kIndex, Point::Question);
      float* turn = block_.next_turn();
      product_.multiply(has_product, source_step(t), tile, x, turn, kIndex);
      sync_block();
      block_.clock.at(kIndex, Point::Barrier);
      if (!thread().computes()) continue;
      const float sum = has_product ? product_.total(turn) : 0.0f;
      block_.clock.after(kIndex, Point::Sums, sum);
      if (ends) {
        finish(tile, sum);
      } else {
        compute(t, tile, preloaded, sum);
      }
    }
  }

 private:
  // Nothing has been sent yet in the first step, and the last product is not always wanted.
  FUSEDRNN_DEVICE bool has_product(int t) const {
    if (!kIsLast) return t >= 0;
    return t < args().steps - 1 && t >= (args().wants_dh ? -1 : 0);
  }
  // The step, counted backwards, of the gradients that step t multiplies.
  FUSEDRNN_DEVICE int source_step(int t) const { return args().steps - 1 - t - (kIsLast ? 1 : 0); }

  // The inputs of a unit as they were loaded.  No arithmetic yet: it would wait for the loads.
  struct Loaded {
    bool is_there : 1, is_active : 1, is_reset_next : 1;  // in one register
    typename Units::Parts parts;
    std::conditional_t<Stage::kCellState, float, T> carry;
    T grad_output;
  };

  FUSEDRNN_DEVICE Loaded load(int t, int tile) const {
    Loaded loaded{};
    loaded.is_there = t >= 0 && Units::is_there(tile);
    if (!loaded.is_there) return loaded;
    const auto& s = step();
    const RowOfChunk row = Units::row_of_chunk(t, tile);
    const Place at = Units::place(t, tile);
    loaded.is_active = s.mask.is_active(at);
    if (!loaded.is_active) return loaded;
    if constexpr (Stage::kResult) loaded.is_reset_next = s.mask.is_reset_next(at);
    if constexpr (kHasRing) {
      ring_.read(loaded);
      return loaded;
    }
    loaded.parts = Units::parts_at(row);
    if constexpr (Stage::kCellState) {
      loaded.carry = args().cell_states[row * width_ + unit()];
    } else if constexpr (Stage::kCarry) {
      const bool is_first = t == 0 && args().first_carry.data != nullptr;
      const T* h =
          is_first ? args().first_carry.at(Units::row_of_batch(tile)) : s.carry.at(int64_t(row));
      loaded.carry = h[unit()];
    }
    if constexpr (kIsLast) {
      if (s.grad_output.data != nullptr) {
        loaded.grad_output = s.grad_output.at(int64_t(row))[unit()];
      }
    }
    return loaded;
  }

  // The part of a unit's work that needs no other block.  of_result: its gradients for dout = 1;
  // of_state: for a gradient of 1 of the cell state.
  struct Preloaded {
    bool is_there : 1, is_active : 1, is_reset_next : 1;
    bool keeps_h : 1, keeps_state : 1;  // by zoneout, instead of the new value
    float grad_output;
    UnitGradients<Stage, float> of_result, of_state;
  };

  FUSEDRNN_DEVICE Preloaded before_exchange(int t, int tile, const Loaded& loaded) const {
    Preloaded preloaded{};
    preloaded.is_there = loaded.is_there;
    preloaded.is_active = loaded.is_active;
    if (!preloaded.is_active) return preloaded;
    const auto& s = step();
    const Place at = Units::place(t, tile);
    preloaded.is_reset_next = loaded.is_reset_next;
    preloaded.grad_output = widen(loaded.grad_output);
    float pre[Stage::kPre] = {};
    Units::pre_of(loaded.parts, pre);
    const float carry = widen(loaded.carry);
    const PersistentUnit u = Units::unit_at(at);
    preloaded.keeps_h = u.kept_h == 1.0f && s.zoneout.h.rest == 0;
    preloaded.keeps_state = u.kept_cell_state == 1.0f && s.zoneout.cell_state.rest == 0;
    preloaded.of_result = backward_from_pre<Stage>(s, at, unit(), u, pre, carry, 1.0f, 0.0f);
    if constexpr (Stage::kCellState) {
      preloaded.of_state = backward_from_pre<Stage>(s, at, unit(), u, pre, carry, 0.0f, 1.0f);
    }
    return preloaded;
  }

  // sum: the gradient of the result through the consumer's hidden gates.
  FUSEDRNN_DEVICE void compute(int t, int tile, const Preloaded& preloaded, float sum) const {
    float dout = sum, dstate = 0;
    if constexpr (kIsLast) dout += block_.kept(Block::kDh, tile);
    if constexpr (Stage::kCellState) dstate = block_.kept(Block::kDc, tile);
    UnitGradients<Stage, float> d{};
    if (preloaded.is_active) {
      if constexpr (Stage::kResult) {
        if (preloaded.is_reset_next) {
          dstate = 0;
          if (kIsLast) dout = 0;
        }
      }
      dout += preloaded.grad_output;
      d = apply(preloaded, dout, dstate);
    }
    block_.clock.after(kIndex, Point::Gates, d.dhidden_gates);
    send(args().steps - 1 - t, tile, d.dhidden_gates);
    block_.clock.at(kIndex, Point::Store);
    if (!preloaded.is_there) return;
    if constexpr (kIsLast) {  // the product of the first stage adds the rest
      const float dh = kCarriesResult<Stage> ? d.dinput : d.dh;
      block_.kept(Block::kDh, tile) = preloaded.is_active ? dh : dout;
    }
    if constexpr (Stage::kCellState) {
      block_.kept(Block::kDc, tile) = preloaded.is_active ? d.dinput : dstate;
    }
    const int64_t no_shift = 0;
    store_backward<Stage>(step(), Units::row_of_chunk(t, tile), no_shift, unit(), PersistentUnit{},
                          d);
  }

  FUSEDRNN_DEVICE void finish(int tile, float sum) const {
    if (!Units::is_there(tile)) return;
    const int at = Units::row_of_batch(tile) * width_ + unit();
    if constexpr (kIsLast) step().dout[at] = block_.kept(Block::kDh, tile) + sum;
    if constexpr (Stage::kCellState) step().dcarry[at] = block_.kept(Block::kDc, tile);
  }

  FUSEDRNN_DEVICE static float apply(float of_result, float of_state, float dout, float dstate) {
    if constexpr (Stage::kCellState) return of_result * dout + of_state * dstate;
    return of_result * dout;
  }
  FUSEDRNN_DEVICE static UnitGradients<Stage, float> apply(const Preloaded& preloaded, float dout,
                                                           float dstate) {
    const auto &r = preloaded.of_result, &s = preloaded.of_state;
    // A unit that zoneout keeps has no gradient of its new value, even if the gradient of h is NaN.
    const float dnew = preloaded.keeps_h ? 0.0f : dout,
                dnew_cell_state = preloaded.keeps_state ? 0.0f : dstate;
    UnitGradients<Stage, float> d{};
    FUSEDRNN_UNROLL
    for (int k = 0; k < kInputGatesAlone<Stage>; ++k) {
      d.dinput_gates[k] = apply(r.dinput_gates[k], s.dinput_gates[k], dnew, dnew_cell_state);
    }
    FUSEDRNN_UNROLL
    for (int k = 0; k < kGates; ++k) {
      d.dhidden_gates[k] = apply(r.dhidden_gates[k], s.dhidden_gates[k], dnew, dnew_cell_state);
    }
    d.dinput = apply(r.dinput, s.dinput, dnew, dnew_cell_state);
    d.dh = preloaded.keeps_h ? dout : apply(r.dh, s.dh, dout, dstate);
    if (kCarriesResult<Stage> && preloaded.keeps_h) d.dinput = dout;
    if (Stage::kCellState && preloaded.keeps_state) d.dinput += dstate;
    return d;
  }

  FUSEDRNN_DEVICE void send(int i, int tile, const float (&dhidden_gates)[kGates]) const {
    constexpr int kInPacket = Operands<T>::kInPacket;
    const int row = Units::row_of_batch(tile);
    const bool sends = thread().g % kInPacket == 0 && unit() < width_ && row < args().batch;
    FUSEDRNN_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      const Packet packet = pack_neighbours(narrow<T>(dhidden_gates[gate]));
      if (!sends) continue;
      block_.store(block_.sent(kIndex, i, row, kGates, gate, packets_of(width_, kInPacket)) +
                       unit() / kInPacket,
                   packet);
    }
    block_.count_sent(kIndex, i, tile);
  }

  using Product = BackwardProduct<Consumer, (kIndex + 1) % kStages, T, kDepth, kPackets>;
  Product product_;
  Loaded next_{};  // the inputs of the next tile
  std::conditional_t<kHasRing, UnitsRing<Stage, kIndex, kStages, T>, NoRing> ring_;
};

// The stages of a cell up to `kIndex`, in reverse order.
template <class T, int kDepth, unsigned kVariant, int kIndex, class... Stages>
struct BackwardStages {
  static constexpr int kStages = sizeof...(Stages);
  using All = std::tuple<Stages...>;
  using Stage = std::tuple_element_t<kIndex, All>;
  using Consumer = std::tuple_element_t<(kIndex + 1) % kStages, All>;
  static constexpr int kPackets = packets_ahead(8 * kDepth * (Stages::kHiddenGates + ...));
  BackwardStage<Stage, Consumer, kIndex, kStages, T, kDepth, kPackets, kVariant> stage;
  BackwardStages<T, kDepth, kVariant, kIndex - 1, Stages...> before;

  FUSEDRNN_DEVICE BackwardStages(BackwardBlock<T>& block) : stage(block), before(block) {}
  FUSEDRNN_DEVICE static void load_biases(BackwardBlock<T>& block) {
    BackwardUnits<Stage, kIndex, kStages, T>(block).load_biases();
    decltype(before)::load_biases(block);
  }
  FUSEDRNN_DEVICE static void recompute_cell_states(BackwardBlock<T>& block) {
    if constexpr (Stage::kCellState) CellStateUnits<Stage, kIndex, kStages, T>(block).run();
    decltype(before)::recompute_cell_states(block);
  }
  FUSEDRNN_DEVICE void run(int t) {
    stage.run(t);
    before.run(t);
  }
};
template <class T, int kDepth, unsigned kVariant, class... Stages>
struct BackwardStages<T, kDepth, kVariant, -1, Stages...> {
  FUSEDRNN_DEVICE BackwardStages(BackwardBlock<T>&) {}
  FUSEDRNN_DEVICE static void load_biases(BackwardBlock<T>&) {}
  FUSEDRNN_DEVICE static void recompute_cell_states(BackwardBlock<T>&) {}
  FUSEDRNN_DEVICE void run(int) {}
};

// The kernel.  Its grid has groups * blocks blocks of kPersistentThreads threads, all of which must
// run at once.
template <class T, int kDepth, unsigned kVariant = kAsInPackage, class... Stages>
FUSEDRNN_DEVICE void persistent_backward(StageList<Stages...>, const PersistentBackward<T>& args,
                                         unsigned char* shared) {
  static_assert(sizeof...(Stages) <= 2, "two slots may not be enough");
  using All = BackwardStages<T, kDepth, kVariant, int(sizeof...(Stages)) - 1, Stages...>;
  BackwardBlock<T> block(args, shared);
  All::load_biases(block);
  sync_block();
  All::recompute_cell_states(block);
  All stages(block);
  sync_block();  // weights were transposed in the memory that is going to hold sums
  block.clock.start();
  for (int t = args.steps - 1; t >= -1; --t) stages.run(t);
  end(args);
}

}  // namespace fusedrnn::cuda
