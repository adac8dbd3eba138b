// Counts the memory of a layer before anything is allocated.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "problem.h"
#include "workspace.h"

namespace fusedrnn {

struct WorkspaceBytes {
  int64_t forward, backward;
  int64_t most() const { return std::max(forward, backward); }
};

// Counts the workspace of one direction.  Memory: the types and sizes of a backend, from
// cpu/memory.h or cuda/memory.h.
template <class Memory>
class WorkspaceCount {
 public:
  // Assumes that all gradients are wanted, that noise is drawn and that tensors are contiguous.
  // With for_any, assumes instead everything that can make a call take more: lengths, resets, eps
  // and its gradient; and input, eps and the output's gradient in strides that require a copy, and
  // packed where that takes more, which is where rows are not compact.
  WorkspaceCount(const Problem& problem, bool for_any) {
    static T there{};  // only pointed to, never read
    static A sum{};
    static const int64_t length{}, start{};
    static const bool reset{};
    const auto sequence = [&](int64_t width) -> Sequence<const T> {
      if (for_any) return {&there, width, 0, 0, 0, Memory::kReplays ? &start : nullptr};
      return {&there, width, problem.batch * width, width, 1};
    };
    const Cell& cell = problem.cell;
    layer_.cell = cell;
    layer_.sizes = problem.sizes;
    layer_.seq_len = problem.seq_len;
    layer_.batch = problem.batch;
    layer_.input = sequence(problem.sizes.input);
    if (for_any) {
      const bool has_noise = std::any_of(cell.stages, cell.stages + cell.num_stages,
                                         [](auto& s) { return s.kind == StageKind::Sample; });
      if (has_noise) layer_.eps = sequence(problem.sizes.latent);
      gradients_.eps = &there;
      layer_.mask = {&length, &reset, problem.seq_len, problem.batch, 1};
      layer_.dropout = 0.5;
    }
    for (int p = 0; p < cell.num_projections; ++p) {
      const Projection& projection = cell.projections[p];
      const int64_t rows = projection.blocks * problem.sizes[projection.to];
      const int64_t columns = problem.sizes[projection.from];
      layer_.weight[p] = Matrix<const T>::contiguous(&there, rows, columns);
      if (!problem.is_operand[p]) layer_.weight[p].row_stride = layer_.weight[p].column_stride = 0;
      gradients_.weight[p] = &sum;
      if (!problem.bias || !projection.has_bias) continue;
      layer_.bias[p] = {&there, 1, rows, rows, for_any ? 0 : 1};
      gradients_.bias[p] = &sum;
    }
    gradients_.output = sequence(problem.sizes.output);
    gradients_.h_n = gradients_.c_n = &there;
    gradients_.input = gradients_.hx = gradients_.cx = &there;
  }

  WorkspaceBytes operator()(const Plan& plan) {
    layer_.chunk = plan.steps;
    Arena forward, backward;
    go(plan.forward);
    typename Workspace<Memory>::Forward(layer_, forward);
    go(plan.backward);
    typename Workspace<Memory>::Backward(layer_, gradients_, backward);
    return {forward.size_bytes(), backward.size_bytes()};
  }

 private:
  using T = typename Memory::T;
  using A = Acc<T>;

  void go(const PassPlan& plan) {
    layer_.is_persistent = plan.is_persistent;
    if (plan.is_persistent) layer_.persistent = plan.persistent;
    layer_.overlaps = plan.overlaps && layer_.chunks() > 1;
  }

  Layer<T> layer_{};
  Gradients<T> gradients_{};
};

// The bytes that forward saves for backward in one direction, in addition to input, weights and
// output: the cell states before each chunk, and without recompute the pre-activations.
inline int64_t saved_bytes(const Problem& problem, int64_t steps, int64_t sum_bytes,
                           bool recompute) {
  const int64_t chunks = (problem.seq_len + steps - 1) / steps;
  const int64_t states = has_cell_state(problem.cell) ? chunks * problem.sizes.hidden : 0;
  const int64_t saved =
      recompute ? 0 : problem.seq_len * saved_columns(problem.cell, problem.sizes);
  return sum_bytes * problem.batch * (states + saved);
}

// The peak bytes of a training step for one direction, without weights, and without the input, the
// output's gradient and the input's: the output, the states before the first and after the last
// step, whatever else forward saves, and the larger of two phases.  One phase is forward with its
// workspace.  The other is backward: the gradients of the weights as they are summed, with the
// workspace, or afterwards with the rounded gradients.
template <class T>
int64_t training_bytes(const Problem& problem, int64_t steps, const WorkspaceBytes& workspace) {
  int64_t weights = 0;
  for (int p = 0; p < problem.cell.num_projections; ++p) {
    const Projection& projection = problem.cell.projections[p];
    const bool has_bias = problem.bias && projection.has_bias;
    weights += projection.blocks * problem.sizes[projection.to] *
               (problem.sizes[projection.from] + (has_bias ? 1 : 0));
  }
  const int64_t state =
      problem.sizes.output + (has_cell_state(problem.cell) ? problem.sizes.hidden : 0);
  const int64_t held = problem.batch * (problem.seq_len * problem.sizes.output + 2 * state);
  const int64_t rounded = std::is_same_v<T, Acc<T>> ? 0 : weights;
  const int64_t in_backward = weights * int64_t(sizeof(Acc<T>)) +
                              std::max(workspace.backward, rounded * int64_t(sizeof(T)));
  return held * int64_t(sizeof(T)) + saved_bytes(problem, steps, sizeof(Acc<T>), true) +
         std::max(workspace.forward, in_backward);
}

// A lower bound of the same for torch.nn.LSTM of these sizes on a GPU: for each step and row the
// output, four gates, the cell state and the gradient of the input, which torch always computes;
// and the gradients of the weights.
template <class T>
int64_t lstm_training_bytes(const Problem& problem) {
  const int64_t size = problem.sizes.hidden, input = problem.sizes.input;
  return int64_t(sizeof(T)) * (problem.seq_len * problem.batch * (6 * size + input) +
                               4 * size * (input + size + (problem.bias ? 2 : 0)));
}

}  // namespace fusedrnn
