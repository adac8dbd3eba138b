// One stage of a cell applied to a block of rows: load planes -> stage -> store.
//
// The structs are the whole border between the driver and a backend's kernels: plain pointers and
// sizes.  Rows are batch entries of one step, or all (t, b) of a chunk, t slowest; plane k of an
// array with n blocks lies at column k * width of its row.  forward_unit and backward_unit are the
// body that every backend's loop calls; a backend supplies only how lanes are loaded and stored.
//
// T: storage type of the user's tensors.  O: type of the operands of GEMMs (T on a GPU, Acc<T> on
// the CPU).  A = Acc<T>.
#pragma once
#include <cstdint>

#include "hd.h"
#include "scalar.h"
#include "stages.h"

namespace fusedrnn {

// Where eps of row `first_row + row` comes from: the user's tensor, else Philox.  The counter of a
// row is t = row / batch, b = row % batch, so first_row must count from the start of the sequence.
template <class T>
struct Noise {
  const T* eps;         // [rows, width], or null: drawn from the seed
  const int64_t* seed;  // one element, or null if eps is given
  int64_t batch, layer;
};

template <class T, class O>
struct ForwardStep {
  using A = Acc<T>;
  int64_t width, first_row;
  const A *side, *side_bias;              // [rows, kSide * width], [kSide * width] or null
  const A *projection, *projection_bias;  // [rows, kProjection * width], likewise
  const A* carry;                         // [rows, width], h_{t-1} unrounded
  Noise<T> noise;
  // The result, [rows, width]; each may be null.  operand is what the next projection reads: the
  // result rounded to T, whatever O is, so that backward can rebuild it from the output.
  O* operand;
  T* output;
  A* carry_out;
  A* factors;  // [rows, kProjection * width] of a kFactors stage, may be projection, or null
};

template <class T, class O>
struct BackwardStep {
  using A = Acc<T>;
  int64_t width, first_row;
  const A *side, *side_bias;
  const A *projection, *projection_bias;  // factors and null for a kFactors stage
  const T* carry;                         // [rows, width], h_{t-1} as it stands in the output
  const A* dout;                          // [rows, width], adjoint from the step or stage behind
  const T* grad_output;                   // [rows, width], added to dout, or null
  O *dside, *dprojection;                 // as side and projection, and may be the same memory
  A* dcarry;                              // [rows, width], may be dout
  T* dnoise;                              // [rows, width] or null
};

template <class V, int kBlocks, class A, class Unit>
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

// The inputs of a stage at one place, the same for forward and backward.
template <class Stage, class V, bool kForward>
struct StageInputs {
  V side[Stage::kSide > 0 ? Stage::kSide : 1], projection[Stage::kProjection], carry;

  template <class Step, class Unit>
  FUSEDRNN_HD StageInputs(const Step& step, int64_t row, int64_t column, const Unit& unit)
      : carry{} {
    if constexpr (Stage::kNoise && kForward) {
      side[0] = unit.noise(step.noise, row, column, step.width);
    } else if constexpr (!Stage::kNoise) {
      load_blocks<V, Stage::kSide>(side, step.side, step.side_bias, step.width, row, column, unit);
    }
    load_blocks<V, Stage::kProjection>(projection, step.projection, step.projection_bias,
                                       step.width, row, column, unit);
    if constexpr (Stage::kCarry) carry = unit.load(step.carry + row * step.width + column);
  }
};

template <class Stage, class T, class O, class Unit>
FUSEDRNN_HD void forward_unit(const ForwardStep<T, O>& step, int64_t row, int64_t column,
                              const Unit& unit) {
  using V = typename Unit::Value;
  const StageInputs<Stage, V, true> in(step, row, column, unit);
  V factors[Stage::kProjection];
  const V out = Stage::forward(in.side, in.projection, in.carry, factors);
  const int64_t at = row * step.width + column;
  if (step.operand != nullptr) unit.store(step.operand + at, unit.template round_to<T>(out));
  if (step.output != nullptr) unit.store(step.output + at, out);
  if (step.carry_out != nullptr) unit.store(step.carry_out + at, out);
  if constexpr (Stage::kFactors) {
    if (step.factors != nullptr) {
      store_blocks<Stage::kProjection>(factors, step.factors, step.width, row, column, unit);
    }
  }
}

template <class Stage, class T, class O, class Unit>
FUSEDRNN_HD void backward_unit(const BackwardStep<T, O>& step, int64_t row, int64_t column,
                               const Unit& unit) {
  using V = typename Unit::Value;
  const StageInputs<Stage, V, false> in(step, row, column, unit);
  const int64_t at = row * step.width + column;
  V dout = unit.load(step.dout + at);
  if (step.grad_output != nullptr) dout = dout + unit.load(step.grad_output + at);

  V dside[Stage::kSide > 0 ? Stage::kSide : 1], dprojection[Stage::kProjection], dcarry;
  Stage::backward(in.side, in.projection, in.carry, dout, dside, dprojection, &dcarry);

  store_blocks<Stage::kProjection>(dprojection, step.dprojection, step.width, row, column, unit);
  if constexpr (Stage::kNoise) {
    if (step.dnoise != nullptr) unit.store(step.dnoise + at, dside[0]);
  } else {
    store_blocks<Stage::kSide>(dside, step.dside, step.width, row, column, unit);
  }
  if constexpr (Stage::kCarry) unit.store(step.dcarry + at, dcarry);
}

}  // namespace fusedrnn
