// One stage of a cell applied to a block of rows: load planes -> stage -> store.
//
// The structs are the whole border between the driver and a backend's kernels: plain pointers and
// sizes.  Rows are batch entries of one step, or all (t, b) of a chunk, t slowest; plane k of an
// array with n blocks lies at column k * width of its row.  forward_unit and backward_unit are the
// body that every backend's loop calls; a backend supplies only how lanes are loaded and stored.
//
// T: storage type of the user's tensors.  O: type of the operands of GEMMs (T on a GPU, Acc<T> on
// the CPU).  A = Acc<T>.
//
// A GPU may record the steps of a chunk once and replay them for later chunks.  `shift` then points
// to the rows between the two: arrays of the whole sequence are read and written so much further,
// those of a chunk where they always are.
#pragma once
#include <cstdint>
#include <type_traits>

#include "hd.h"
#include "matrix.h"
#include "philox.h"
#include "scalar.h"
#include "stages.h"

namespace fusedrnn {

// Where a row of a sequence is, counted from its start.  32-bit division, since 64-bit division is
// a function that a GPU calls; the operators take no more than 2^32 rows.
struct Place {
  uint32_t t, b;
  FUSEDRNN_HD Place(int64_t row, int64_t batch)
      : t(uint32_t(row) / uint32_t(batch)), b(uint32_t(row) - t * uint32_t(batch)) {}
};

// Rows at one stride, or null.  in_sequence: in an array of the whole sequence, not of a chunk.
template <class P>
struct Rows {
  P* data;
  int64_t stride;
  bool in_sequence;

  FUSEDRNN_HD P* at(int64_t row, int64_t shift) const {
    return data + (in_sequence ? row + shift : row) * stride;
  }
};

// What rows of a batch do besides computing.  A row is finished from its length on: there it keeps
// its state, and nothing else of it counts.  Where `reset` is set, its state is zero before the
// step.  Rows are counted from the start of the sequence, t = row / batch.
struct Mask {
  const int64_t* lengths;  // [batch], or null: none is finished
  const bool* reset;       // [seq_len, batch], or null
  int64_t seq_len, batch;
  int direction;  // 1, or -1 if time runs backwards

  FUSEDRNN_HD bool any() const { return lengths != nullptr || reset != nullptr; }
  FUSEDRNN_HD bool is_active(int64_t row) const {
    if (lengths == nullptr) return true;
    const Place place(row, batch);
    return place.t < lengths[place.b];
  }
  FUSEDRNN_HD bool is_reset(int64_t row) const { return reset != nullptr && reset[row]; }
  // Of an active row: whether its state is zeroed before the step that it takes next.
  FUSEDRNN_HD bool is_reset_next(int64_t row) const {
    if (reset == nullptr) return false;
    const int64_t next = row + direction * batch;
    return next >= 0 && next < seq_len * batch && is_reset(next) && is_active(next);
  }
  // Whether the row takes its first step, from the initial state.
  FUSEDRNN_HD bool is_first(int64_t row) const {
    const int64_t before = row - direction * batch;
    return before < 0 || before >= seq_len * batch || (direction < 0 && !is_active(before));
  }
};

// Where eps of a row comes from: the user's tensor, else Philox, whose counter is the row's place.
template <class T>
struct Noise {
  Rows<const T> eps;    // null: drawn from the seed
  const int64_t* seed;  // one element, or null if eps is given
  int64_t batch, layer;
  int64_t first_step;  // of the sequence, where it is a part of a longer one

  // That of four units, 4 block and on.  row: counted from the start of the sequence.
  template <class A>
  FUSEDRNN_HD void draw(int64_t row, uint32_t block, A (&normal)[4]) const {
    const Place place(row, batch);
    normal4(uint64_t(*seed), uint32_t(first_step) + place.t, place.b, block, uint32_t(layer),
            normal);
  }
};

// The Philox counter's last word, for what is drawn beside a layer's noise.
constexpr uint32_t kDropoutStream = 4u << 29, kZoneoutStream = 2u << 29, kStateStream = 3u << 29;

// Zoneout (Krueger et al. 2017): with some probability a unit keeps its h, and with another its
// state beside h, instead of the new value.  Without a seed it takes the expectation of the two.
struct Zoneout {
  const int64_t* seed;
  int64_t layer, batch, first_step;  // as those of Noise
  double h, state;                   // probabilities

  // What mix() makes the expectation with: 1 - probability, which a float has lost where that is
  // near 1.  Where something is drawn, 0.
  template <class A>
  FUSEDRNN_HD A rest(double probability) const {
    return seed == nullptr ? A(1 - probability) : A(0);
  }

  // How much each of four units, 4 block and on, keeps: 0 or 1, or the probability.  row: counted
  // from the start of the sequence.
  template <class A>
  FUSEDRNN_HD void kept(double probability, uint32_t stream, int64_t row, uint32_t block,
                        A (&kept)[4]) const {
    if (seed == nullptr || probability == 0) {
      for (int j = 0; j < 4; ++j) kept[j] = A(probability);
      return;
    }
    const Place place(row, batch);
    uint32_t words[4] = {uint32_t(first_step) + place.t, place.b, block, uint32_t(layer) | stream};
    philox4x32(words, uint32_t(uint64_t(*seed)), uint32_t(uint64_t(*seed) >> 32));
    const auto threshold = uint64_t(probability * 0x1p32);
    for (int j = 0; j < 4; ++j) kept[j] = words[j] < threshold ? A(1) : A(0);
  }
};

// Pre-activations come from `pre` [rows, kPre * width], or where that is null from side and
// projection, [rows, k * width] each, with biases [k * width] that may be null.  Where they are
// added up (kAddsUp), the first kShared blocks of projection are sums, and side has the others.
template <class T, class O>
struct ForwardStep {
  using A = Acc<T>;
  static constexpr bool kAddsUp = false;  // but for stages that share all blocks
  int64_t width, first_row;
  const int64_t* shift;  // or null: 0
  const A *pre, *side, *side_bias, *projection, *projection_bias;
  Rows<const A> carry;  // h_{t-1} unrounded, or the state
  bool is_last;         // of the cell: the result is h
  Rows<const O> h;      // h_{t-1}, for a last stage that does not carry it
  Noise<T> noise;
  Mask mask;
  Zoneout zoneout;
  // The result, [rows, width]; each may be null.  operand is what the next projection reads: the
  // result rounded to T, whatever O is, so that backward can rebuild it from the output.
  O* operand;
  Rows<T> output;
  A* carry_out;
  // What backward wants, [rows, kPre * width]; each may be null.  keep is in the sequence, factors
  // may be projection's memory.
  A *keep, *factors;
};

template <class T, class O>
struct BackwardStep {
  using A = Acc<T>;
  static constexpr bool kAddsUp = true;
  int64_t width, first_row;
  const int64_t* shift;  // or null: 0
  // pre: in the sequence, or if the stage has factors these
  const A *pre, *side, *side_bias, *projection, *projection_bias;
  Rows<const O> carry;  // h_{t-1} as it stands in the output
  bool is_last;         // of the cell: dout is the adjoint of h
  const A* state;       // [rows, width], of the step before
  Mask mask;
  Zoneout zoneout;
  A* dout;                    // [rows, width], adjoint from the step or stage behind
  Rows<const T> grad_output;  // added to dout
  O *dside, *dprojection;     // may be the memory of side and projection, or of factors
  A* dcarry;                  // [rows, width]: dout's memory; of a state: its adjoint, in and out
  T* deps;                    // [rows, width] in the sequence, or null
};

template <int kBlocks, class V, class A, class Unit>
FUSEDRNN_HD void load_blocks(V* values, const A* plane, const A* bias, int64_t width, int64_t row,
                             int64_t column, const Unit& unit) {
  for (int k = 0; k < kBlocks; ++k) {
    values[k] = unit.load(plane + (row * kBlocks + k) * width + column);
    if (bias != nullptr) values[k] = values[k] + unit.load(bias + k * width + column);
  }
}

template <int kBlocks, class V, class P, class Unit>
FUSEDRNN_HD void store_blocks(const V* values, P* plane, int64_t width, int64_t row, int64_t column,
                              const Unit& unit) {
  for (int k = 0; k < kBlocks; ++k) {
    unit.store(plane + (row * kBlocks + k) * width + column, values[k]);
  }
}

// pre_row: where the row is in step.pre
template <class Stage, class V, class Step, class Unit>
FUSEDRNN_HD void load_pre(V* pre, const Step& step, int64_t row, int64_t pre_row, int64_t column,
                          const Unit& unit) {
  if (step.pre != nullptr) {
    using A = std::remove_reference_t<decltype(*step.pre)>;
    const A* no_bias = nullptr;
    return load_blocks<Stage::kPre>(pre, step.pre, no_bias, step.width, pre_row, column, unit);
  }
  V side[Stage::kSide > 0 ? Stage::kSide : 1], projection[Stage::kProjection];
  load_blocks<Stage::kProjection>(projection, step.projection, step.projection_bias, step.width,
                                  row, column, unit);
  if constexpr (Step::kAddsUp || kSideAlone<Stage> == 0) {
    const auto* bias = step.side_bias;
    for (int k = 0; k < Stage::kShared; ++k) {
      side[k] = bias == nullptr ? V{} : unit.load(bias + k * step.width + column);
    }
    if (bias != nullptr) bias += Stage::kShared * step.width;
    load_blocks<kSideAlone<Stage>>(side + Stage::kShared, step.side, bias, step.width, row, column,
                                   unit);
  } else {
    load_blocks<Stage::kSide>(side, step.side, step.side_bias, step.width, row, column, unit);
  }
  Stage::combine(side, projection, pre);
}

// A stage on a value, which may be a SIMD vector.  Specialised for values that are several numbers
// without arithmetic of their own.
template <class Stage, class V>
struct Lanes {
  FUSEDRNN_HD static V forward(const V* pre, V input, V* factors, V* state) {
    return Stage::forward(pre, input, factors, state);
  }
  FUSEDRNN_HD static void backward(const V* pre, V carry, V dout, V dstate, V* dside,
                                   V* dprojection, V* dinput) {
    Stage::backward(pre, carry, dout, dstate, dside, dprojection, dinput);
  }
};

// Whether h_{t-1} is what the stage carries; else, if it is the last, it stands beside the carry.
template <class Stage>
inline constexpr bool kCarriesResult = Stage::kCarry && !Stage::kState;

template <int kBlocks, class P, class Unit>
FUSEDRNN_HD void clear_blocks(P* plane, int64_t width, int64_t row, int64_t column,
                              const Unit& unit) {
  typename Unit::Value zeros[kBlocks > 0 ? kBlocks : 1] = {};
  store_blocks<kBlocks>(zeros, plane, width, row, column, unit);
}

// What zoneout makes of a state a and the new value b: k a + rest b, or where rest is 0 and k is 1
// or 0, one of them alone: the other one may be NaN or inf.
template <class V, class A>
FUSEDRNN_HD V mix(const V& k, A rest, const V& a, const V& b) {
  const V fresh = math::select(k == 0.0f, b, k * a + rest * b);
  return rest == 0 ? math::select(k == 1.0f, a, fresh) : fresh;
}

// x, or 0 where k is 1, whatever x is there.
template <class V>
FUSEDRNN_HD V unless_one(const V& k, const V& x) {
  return math::select(k == 1.0f, V{}, x);
}

// What an active unit reads beside its pre-activations, and what it makes of all.
template <class V>
struct UnitInput {
  V input;  // the carry, or eps
  V h;      // h_{t-1}: for the zoneout of a last stage that does not carry it
  bool is_reset_next;
};
template <class V>
struct UnitResult {
  V out;          // goes to the output
  V next, carry;  // go on to the next projection, still to be rounded, and to the next step
};

// row: as in arrays of the chunk
template <class Stage, class T, class O, class V, class Unit>
FUSEDRNN_HD UnitResult<V> forward_from_pre(const ForwardStep<T, O>& step, int64_t row,
                                           int64_t column, const Unit& unit, const V* pre,
                                           const UnitInput<V>& given, V* factors) {
  const int64_t shift = step.shift == nullptr ? 0 : *step.shift;
  const int64_t from_start = step.first_row + row + shift;
  using A = Acc<T>;
  const V input = given.input;
  V state{};
  V out = Lanes<Stage, V>::forward(pre, input, factors, &state);
  if constexpr (Stage::kState) {
    if (step.zoneout.state > 0) {
      const V kept = unit.kept(step.zoneout, step.zoneout.state, kStateStream, from_start, column);
      state = mix(kept, step.zoneout.template rest<A>(step.zoneout.state), input, state);
    }
  }
  if constexpr (Stage::kResult) {
    if (step.is_last && step.zoneout.h > 0) {
      const V h = kCarriesResult<Stage> ? input : given.h;
      const V kept = unit.kept(step.zoneout, step.zoneout.h, kZoneoutStream, from_start, column);
      out = mix(kept, step.zoneout.template rest<A>(step.zoneout.h), h, out);
    }
  }

  V next = out, carry = Stage::kState ? state : out;
  if constexpr (Stage::kResult) {
    if (given.is_reset_next) {
      carry = V{};
      if (step.is_last) next = V{};
    }
  }
  return {out, next, carry};
}

// To the arrays of the sequence.
template <class Stage, class T, class O, class V, class Unit>
FUSEDRNN_HD void store_forward(const ForwardStep<T, O>& step, int64_t row, int64_t column,
                               const Unit& unit, const V* pre, const V& out) {
  const int64_t shift = step.shift == nullptr ? 0 : *step.shift;
  if (step.output.data != nullptr) unit.store(step.output.at(row, shift) + column, out);
  if (step.keep != nullptr) {
    store_blocks<Stage::kPre>(pre, step.keep, step.width, row + shift, column, unit);
  }
}

template <class Stage, class T, class O, class Unit>
FUSEDRNN_HD void forward_unit(const ForwardStep<T, O>& step, int64_t row, int64_t column,
                              const Unit& unit) {
  using V = typename Unit::Value;
  const int64_t width = step.width, shift = step.shift == nullptr ? 0 : *step.shift;
  const int64_t at = row * width + column, from_start = step.first_row + row + shift;
  if (!step.mask.is_active(from_start)) {
    if constexpr (Stage::kCarry) {
      if (step.carry_out != nullptr)
        unit.store(step.carry_out + at, unit.load(step.carry.at(row, 0) + column));
    }
    // h waits as well; of what feeds another stage, GEMMs over all rows of a chunk read it.
    if (!step.is_last && step.operand != nullptr) unit.store(step.operand + at, V{});
    if constexpr (Stage::kFactors) {
      if (step.factors != nullptr) {
        clear_blocks<Stage::kPre>(step.factors, width, row, column, unit);
      }
    }
    return;
  }
  V pre[Stage::kPre], factors[Stage::kPre];
  UnitInput<V> given{};
  load_pre<Stage>(pre, step, row, row + shift, column, unit);
  if constexpr (Stage::kCarry) given.input = unit.load(step.carry.at(row, 0) + column);
  if constexpr (Stage::kNoise) {
    given.input = step.noise.eps.data == nullptr
                      ? unit.drawn(step.noise, from_start, column)
                      : unit.load(step.noise.eps.at(row, shift) + column);
  }
  if constexpr (Stage::kResult && !kCarriesResult<Stage>) {
    if (step.is_last && step.zoneout.h > 0) given.h = unit.load(step.h.at(row, 0) + column);
  }
  if constexpr (Stage::kResult) given.is_reset_next = step.mask.is_reset_next(from_start);

  const UnitResult<V> result =
      forward_from_pre<Stage>(step, row, column, unit, pre, given, factors);
  if (step.operand != nullptr) {
    unit.store(step.operand + at, unit.template round_to<T>(result.next));
  }
  if (step.carry_out != nullptr) unit.store(step.carry_out + at, result.carry);
  store_forward<Stage>(step, row, column, unit, pre, result.out);
  if constexpr (Stage::kFactors) {
    if (step.factors != nullptr) {
      store_blocks<Stage::kPre>(factors, step.factors, width, row, column, unit);
    }
  }
}

// The adjoints of an active unit's inputs.
template <class Stage, class V>
struct UnitAdjoints {
  V dside[kSideAlone<Stage> > 0 ? kSideAlone<Stage> : 1], dprojection[Stage::kProjection];
  V dinput;  // of the carry, or of eps
  V dh;      // of h_{t-1}, past the stage
};

// Linear in dout and dstate, the adjoints of the unit's results.  row: as in arrays of the chunk
template <class Stage, class T, class O, class V, class Unit>
FUSEDRNN_HD UnitAdjoints<Stage, V> backward_from_pre(const BackwardStep<T, O>& step, int64_t row,
                                                     int64_t column, const Unit& unit, const V* pre,
                                                     const V& carry, V dout, V dstate) {
  const int64_t shift = step.shift == nullptr ? 0 : *step.shift;
  const int64_t from_start = step.first_row + row + shift;
  V dh{}, dkept{};  // of h_{t-1} and of the state, past the stage
  V kept_h{}, kept_state{};
  using A = Acc<T>;
  const A rest_h = step.zoneout.template rest<A>(step.zoneout.h),
          rest_state = step.zoneout.template rest<A>(step.zoneout.state);
  if constexpr (Stage::kResult) {
    if (step.is_last && step.zoneout.h > 0) {
      kept_h = unit.kept(step.zoneout, step.zoneout.h, kZoneoutStream, from_start, column);
      dh = mix(kept_h, rest_h, dout, V{});
      dout = mix(kept_h, rest_h, V{}, dout);
    }
  }
  if constexpr (Stage::kState) {
    if (step.zoneout.state > 0) {
      kept_state = unit.kept(step.zoneout, step.zoneout.state, kStateStream, from_start, column);
      dkept = mix(kept_state, rest_state, dstate, V{});
      dstate = mix(kept_state, rest_state, V{}, dstate);
    }
  }
  UnitAdjoints<Stage, V> d;
  Lanes<Stage, V>::backward(pre, carry, dout, dstate, d.dside, d.dprojection, &d.dinput);
  if constexpr (Stage::kCarry) {
    // A unit that keeps its states has no gradient beside theirs, even if its gates are NaN.
    const bool keeps_states = !Stage::kState || (step.zoneout.state > 0 && rest_state == 0);
    if (step.is_last && step.zoneout.h > 0 && rest_h == 0 && keeps_states) {
      const V kept = Stage::kState ? mix(kept_h, rest_h, kept_state, V{}) : kept_h;
      for (int k = 0; k < kSideAlone<Stage>; ++k) d.dside[k] = unless_one(kept, d.dside[k]);
      for (V& gradient : d.dprojection) gradient = unless_one(kept, gradient);
      d.dinput = unless_one(kept, d.dinput);
    }
    d.dinput = d.dinput + (Stage::kState ? dkept : dh);
  }
  d.dh = dh;
  return d;
}

// To the arrays that GEMMs read, dprojection unless it is null, and the gradient of eps.
template <class Stage, class T, class O, class V, class Unit>
FUSEDRNN_HD void store_backward(const BackwardStep<T, O>& step, int64_t row, int64_t column,
                                const Unit& unit, const UnitAdjoints<Stage, V>& d) {
  const int64_t width = step.width, shift = step.shift == nullptr ? 0 : *step.shift;
  if (step.dprojection != nullptr) {
    store_blocks<Stage::kProjection>(d.dprojection, step.dprojection, width, row, column, unit);
  }
  store_blocks<kSideAlone<Stage>>(d.dside, step.dside, width, row, column, unit);
  if constexpr (Stage::kNoise) {
    if (step.deps != nullptr) unit.store(step.deps + (row + shift) * width + column, d.dinput);
  }
}

template <class Stage, class T, class O, class Unit>
FUSEDRNN_HD void backward_unit(const BackwardStep<T, O>& step, int64_t row, int64_t column,
                               const Unit& unit) {
  using V = typename Unit::Value;
  const int64_t width = step.width, shift = step.shift == nullptr ? 0 : *step.shift;
  const int64_t at = row * width + column, from_start = step.first_row + row + shift;
  if (!step.mask.is_active(from_start)) {  // its adjoints wait where they are
    return store_backward<Stage>(step, row, column, unit, UnitAdjoints<Stage, V>{});
  }
  V pre[Stage::kPre], carry{}, dstate{};
  if constexpr (Stage::kLinear) {
    for (V& p : pre) p = V{};  // not there
  } else {
    load_pre<Stage>(pre, step, row, Stage::kFactors ? row : row + shift, column, unit);
  }
  V dout = unit.load(step.dout + at);
  if constexpr (Stage::kState) {
    carry = unit.load(step.state + at);
    dstate = unit.load(step.dcarry + at);
  } else if constexpr (Stage::kCarry) {
    carry = unit.load(step.carry.at(row, shift) + column);
  }
  if constexpr (Stage::kResult) {
    if (step.mask.is_reset_next(from_start)) {
      dstate = V{};
      if (step.is_last) dout = V{};
    }
  }
  if (step.grad_output.data != nullptr) {
    dout = dout + unit.load(step.grad_output.at(row, shift) + column);
  }

  const auto d = backward_from_pre<Stage>(step, row, column, unit, pre, carry, dout, dstate);
  if constexpr (Stage::kResult && !kCarriesResult<Stage>) {
    if (step.is_last) unit.store(step.dout + at, d.dh);  // the GEMM adds the rest
  }
  store_backward<Stage>(step, row, column, unit, d);
  if constexpr (Stage::kCarry) unit.store(step.dcarry + at, d.dinput);
}

// Inverted dropout of a layer's input (Srivastava et al. 2014), and of its gradient: an element is
// zero with some probability, else scaled up.  Which ones is a function of the seed and of the
// element's place, so that nobody keeps them.
template <class O>
struct DropoutStep {
  int64_t width, first_row, batch;
  const int64_t* seed;
  int64_t layer, first_step;  // as those of Noise
  uint64_t threshold;         // of 32 random bits, below which an element is zero
  double scale;
  O* x;  // [rows, width]
};

// Four neighbours from `column` on.
template <class O>
FUSEDRNN_HD void dropout_unit(const DropoutStep<O>& step, int64_t row, int64_t column) {
  const Place place(step.first_row + row, step.batch);
  uint32_t words[4] = {uint32_t(step.first_step) + place.t, place.b, uint32_t(column / 4),
                       uint32_t(step.layer) | kDropoutStream};
  philox4x32(words, uint32_t(uint64_t(*step.seed)), uint32_t(uint64_t(*step.seed) >> 32));
  O* x = step.x + row * step.width + column;
  for (int j = 0; j < 4 && column + j < step.width; ++j) {
    const bool is_zero = words[j] < step.threshold;
    x[j] = narrow<O>(is_zero ? Acc<O>(0) : Acc<O>(widen(x[j]) * Acc<O>(step.scale)));
  }
}

// x of finished rows is nobody's business: it may be NaN, and must not get into sums over all rows.
template <class O>
struct ClearStep {
  int64_t width, first_row;
  Mask mask;
  O* x;  // [rows, width]
};

template <class O, class Unit>
FUSEDRNN_HD void clear_unit(const ClearStep<O>& step, int64_t row, int64_t column,
                            const Unit& unit) {
  if (!step.mask.is_active(step.first_row + row)) {
    unit.store(step.x + row * step.width + column, typename Unit::Value{});
  }
}

// Sums over the rows of a chunk, each of them added to what is there: of all matrices at once,
// since on a GPU a launch costs more than the sum.
template <class O>
struct ColumnSums {
  static constexpr int kMost = 4;
  const O* data[kMost];
  int64_t columns[kMost], row_stride[kMost];
  Acc<O>* sum[kMost];
  int count;
  int64_t rows;  // of each

  void add(const Matrix<const O>& m, Acc<O>* to) {
    data[count] = m.data;
    columns[count] = m.columns;
    row_stride[count] = m.row_stride;
    sum[count++] = to;
    rows = m.rows;
  }
  int64_t all_columns() const {
    int64_t all = 0;
    for (int i = 0; i < count; ++i) all += columns[i];
    return all;
  }
};

// h_{t-1} of the rows of a chunk, for GEMMs and for backward(): what the step read.
template <class T, class O>
struct GatherStep {
  int64_t width, first_row;
  Rows<const T> before;  // h_{t-1} as the output has it, of rows that have one
  const T* hx;           // [batch, width]
  Mask mask;
  O* h;  // [rows, width]
};

template <class T, class O, class Unit>
FUSEDRNN_HD void gather_unit(const GatherStep<T, O>& step, int64_t row, int64_t column,
                             const Unit& unit) {
  using V = typename Unit::Value;
  const Mask& mask = step.mask;
  const int64_t from_start = step.first_row + row;
  V h{};
  if (mask.is_active(from_start)) {
    if (mask.is_first(from_start)) {  // hx has been reset by whoever gave it
      h = unit.load(step.hx + Place(from_start, mask.batch).b * step.width + column);
    } else if (!mask.is_reset(from_start)) {
      h = unit.load(step.before.at(row, 0) + column);
    }
  }
  unit.store(step.h + row * step.width + column, h);
}

}  // namespace fusedrnn
