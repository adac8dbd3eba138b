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
#include "scalar.h"
#include "stages.h"

namespace fusedrnn {

// [rows, width], or null.  in_sequence: in an array of the whole sequence, not of a chunk.
template <class P>
struct Rows {
  P* data;
  bool in_sequence;

  FUSEDRNN_HD P* at(int64_t row, int64_t shift, int64_t width) const {
    return data + (in_sequence ? row + shift : row) * width;
  }
};

// Where eps of row `first_row + row` comes from: the user's tensor, else Philox.  The counter of a
// row is t = row / batch, b = row % batch, so first_row must count from the start of the sequence.
template <class T>
struct Noise {
  Rows<const T> eps;    // null: drawn from the seed
  const int64_t* seed;  // one element, or null if eps is given
  int64_t batch, layer;
};

// Pre-activations come from `pre` [rows, kPre * width], or where that is null from side and
// projection, [rows, k * width] each, with biases [k * width] that may be null.
template <class T, class O>
struct ForwardStep {
  using A = Acc<T>;
  int64_t width, first_row;
  const int64_t* shift;  // or null: 0
  const A *pre, *side, *side_bias, *projection, *projection_bias;
  const A* carry;  // [rows, width], h_{t-1} unrounded
  Noise<T> noise;
  // The result, [rows, width]; each may be null.  operand is what the next projection reads: the
  // result rounded to T, whatever O is, so that backward can rebuild it from the output.
  O* operand;
  T* output;  // in the sequence
  A* carry_out;
  // What backward wants, [rows, kPre * width]; each may be null.  keep is in the sequence, factors
  // may be projection's memory.
  A *keep, *factors;
};

template <class T, class O>
struct BackwardStep {
  using A = Acc<T>;
  int64_t width, first_row;
  const int64_t* shift;  // or null: 0
  // pre: the stage's factors if it has some, else in the sequence
  const A *pre, *side, *side_bias, *projection, *projection_bias;
  const T* carry;             // [rows, width], h_{t-1} as it stands in the output: in the sequence
  const A* dout;              // [rows, width], adjoint from the step or stage behind
  Rows<const T> grad_output;  // added to dout
  O *dside, *dprojection;     // may be the memory of what they are the gradients of, or of factors
  A* dcarry;                  // [rows, width], may be dout
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
  load_blocks<Stage::kSide>(side, step.side, step.side_bias, step.width, row, column, unit);
  load_blocks<Stage::kProjection>(projection, step.projection, step.projection_bias, step.width,
                                  row, column, unit);
  Stage::combine(side, projection, pre);
}

// A stage on a value, which may be a SIMD vector.  Specialised for values that are several numbers
// without arithmetic of their own.
template <class Stage, class V>
struct Lanes {
  FUSEDRNN_HD static V forward(const V* pre, V input, V* factors) {
    return Stage::forward(pre, input, factors);
  }
  FUSEDRNN_HD static void backward(const V* pre, V carry, V dout, V* dside, V* dprojection,
                                   V* dinput) {
    Stage::backward(pre, carry, dout, dside, dprojection, dinput);
  }
};

template <class Stage, class T, class O, class Unit>
FUSEDRNN_HD void forward_unit(const ForwardStep<T, O>& step, int64_t row, int64_t column,
                              const Unit& unit) {
  using V = typename Unit::Value;
  const int64_t width = step.width, shift = step.shift == nullptr ? 0 : *step.shift;
  const int64_t at = row * width + column, at_in_sequence = at + shift * width;
  V pre[Stage::kPre], factors[Stage::kPre], input{};
  load_pre<Stage>(pre, step, row, row, column, unit);
  if constexpr (Stage::kCarry) input = unit.load(step.carry + at);
  if constexpr (Stage::kNoise) {
    input = step.noise.eps.data == nullptr
                ? unit.drawn(step.noise, step.first_row + row + shift, column)
                : unit.load(step.noise.eps.at(row, shift, width) + column);
  }

  const V out = Lanes<Stage, V>::forward(pre, input, factors);

  if (step.operand != nullptr) unit.store(step.operand + at, unit.template round_to<T>(out));
  if (step.output != nullptr) unit.store(step.output + at_in_sequence, out);
  if (step.carry_out != nullptr) unit.store(step.carry_out + at, out);
  if (step.keep != nullptr) {
    store_blocks<Stage::kPre>(pre, step.keep, width, row + shift, column, unit);
  }
  if constexpr (Stage::kFactors) {
    if (step.factors != nullptr) {
      store_blocks<Stage::kPre>(factors, step.factors, width, row, column, unit);
    }
  }
}

template <class Stage, class T, class O, class Unit>
FUSEDRNN_HD void backward_unit(const BackwardStep<T, O>& step, int64_t row, int64_t column,
                               const Unit& unit) {
  using V = typename Unit::Value;
  const int64_t width = step.width, shift = step.shift == nullptr ? 0 : *step.shift;
  const int64_t at = row * width + column, at_in_sequence = at + shift * width;
  V pre[Stage::kPre], carry{};
  load_pre<Stage>(pre, step, row, Stage::kFactors ? row : row + shift, column, unit);
  if constexpr (Stage::kCarry) carry = unit.load(step.carry + at_in_sequence);
  V dout = unit.load(step.dout + at);
  if (step.grad_output.data != nullptr) {
    dout = dout + unit.load(step.grad_output.at(row, shift, width) + column);
  }

  V dside[Stage::kSide > 0 ? Stage::kSide : 1], dprojection[Stage::kProjection], dinput;
  Lanes<Stage, V>::backward(pre, carry, dout, dside, dprojection, &dinput);

  store_blocks<Stage::kProjection>(dprojection, step.dprojection, width, row, column, unit);
  store_blocks<Stage::kSide>(dside, step.dside, width, row, column, unit);
  if constexpr (Stage::kCarry) unit.store(step.dcarry + at, dinput);
  if constexpr (Stage::kNoise) {
    if (step.deps != nullptr) unit.store(step.deps + at_in_sequence, dinput);
  }
}

}  // namespace fusedrnn
