// Which way a layer goes through its steps, and why; and how much memory that takes.
#pragma once
#include <algorithm>
#include <string>

#include "cuda/persistent_backward_plan.h"
#include "plan.h"
#include "workspace.h"

namespace fusedrnn {

struct Plan {
  bool is_persistent = false;
  cuda::PersistentPlan persistent;  // also of the way that is not gone
  std::string reason;               // a sentence
  double step_us = 0;               // of the recurrence on a GPU, by the model
};

// Microseconds that a stage of a step takes: of the model in docs/performance.md, not measured yet.
// A persistent kernel's grow with the columns and with the rows of a group, a launched one's
// hardly.
constexpr double kExchangeUs = 0.6, kTileUs = 0.1, kLaunchedUs = 4.0;

inline double persistent_us(const cuda::PersistentPlan& plan) {
  return kExchangeUs + kTileUs * plan.depth * plan.tiles;
}

enum class Pass { Forward, Backward };

// backend: "auto", "stepwise" or "persistent".  gpu: null for the CPU.  For the rest see
// plan_persistent.
inline Plan make_plan(Pass pass, const std::string& backend, const Cell& cell, const Sizes& sizes,
                      int64_t batch, int64_t steps, int64_t element_bytes, cuda::Exchange exchange,
                      const Gpu* gpu, bool tf32) {
  Plan plan;
  if (gpu == nullptr) {
    plan.persistent.why_not = "There are such kernels for GPUs only.";
  } else {
    const auto make =
        pass == Pass::Forward ? cuda::plan_persistent : cuda::plan_persistent_backward;
    plan.persistent =
        make(cell, sizes, std::max<int64_t>(batch, 1), steps, element_bytes, exchange, *gpu, tf32);
  }
  if (backend == "stepwise") {
    plan.reason = "It was asked for.";
  } else if (!plan.persistent.is_possible()) {
    plan.reason = plan.persistent.why_not;
  } else if (backend == "persistent") {
    plan.is_persistent = true;
    plan.reason = "It was asked for.";
  } else {
    plan.is_persistent = persistent_us(plan.persistent) < kLaunchedUs;
    const std::string tiles = std::to_string(plan.persistent.tiles);
    plan.reason = plan.is_persistent
                      ? "The weights fit into the registers of " +
                            std::to_string(plan.persistent.blocks) + " multiprocessors."
                      : "Launched kernels are faster than a persistent one with " + tiles +
                            " tiles of rows for each copy of the weights.";
  }
  if (gpu != nullptr) {
    plan.step_us =
        cell.num_stages * (plan.is_persistent ? persistent_us(plan.persistent) : kLaunchedUs);
  }
  return plan;
}

// Whether a second stream finds multiprocessors that the kernel for whole chunks leaves it.
inline bool leaves_room(const Plan& plan, const Gpu* gpu) {
  constexpr int kLeast = 4;  // one in so many is to be free
  return plan.is_persistent &&
         kLeast * (gpu->multiprocessors - plan.persistent.grid()) >= gpu->multiprocessors;
}

struct WorkspaceBytes {
  int64_t forward, backward;
};

// Of one layer and direction, with tensors as they come from torch and all gradients wanted.
// Memory: the backend's types and sizes, cpu/memory.h or cuda/memory.h.
template <class Memory>
WorkspaceBytes workspace_bytes(const Cell& cell, const Sizes& sizes, bool bias, int64_t seq_len,
                               int64_t batch, int64_t chunk, const Plan& forward_plan,
                               const Plan& backward_plan) {
  using T = typename Memory::T;
  static T there{};  // nothing is read
  const auto sequence = [&](int64_t width) {
    return Sequence<const T>{&there, width, batch * width, width, 1};
  };
  Layer<T> layer{};
  Gradients<T> gradients{};
  layer.cell = cell;
  layer.sizes = sizes;
  layer.seq_len = seq_len;
  layer.batch = batch;
  layer.chunk = chunk;
  layer.input = sequence(sizes.input);
  layer.is_persistent = forward_plan.is_persistent;
  layer.persistent = forward_plan.persistent;
  gradients.output = sequence(sizes.output);
  gradients.input = &there;
  for (const Parameter& p : layer_layout(cell, sizes, bias)) {
    if (p.columns != 0) {
      layer.weight[p.projection] = Matrix<const T>::contiguous(&there, p.rows, p.columns);
    } else {
      layer.bias[p.projection] = Matrix<const T>::contiguous(&there, 1, p.rows);
      static Acc<T> sum{};
      gradients.bias[p.projection] = &sum;
    }
  }
  using Space = Workspace<Memory>;
  Arena forward, backward;
  typename Space::Forward(layer, forward);
  layer.is_persistent = backward_plan.is_persistent;
  layer.persistent = backward_plan.persistent;
  typename Space::Backward(layer, gradients, backward);
  return {forward.size_bytes(), backward.size_bytes()};
}

}  // namespace fusedrnn
