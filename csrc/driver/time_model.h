// A model of the time of a pass on a GPU (docs/gpu.md): its work step by step, and its work once
// per chunk of steps.
#pragma once
#include <algorithm>

#include "problem.h"

namespace fusedrnn {

// Microseconds, estimated before a GPU was at hand.  Part `fit` of `make gpu-check` prints what
// they are on a GPU; docs/gpu.md has what it printed, and why these numbers have not followed it
// yet.
//
// A stage of a step in a persistent kernel takes an exchange between blocks, and some time for each
// tile of a group's rows and each 256 columns of weights; in backward also for each gate, since the
// gradients of all gates are exchanged.  A launched stage takes a GEMM and a kernel, whose time
// hardly grows with size.
constexpr double kExchangeUs = 0.6, kTileUs = 0.1, kLaunchedUs = 4.0;
// A persistent backward recomputes the cell states first, step by step; this is for a step of a
// tile.
constexpr double kStateUs = 0.45;
// A GEMM over a whole chunk, without its arithmetic; any other kernel, copy or preset of memory.
constexpr double kGemmUs = 4.0, kLaunchUs = 3.0;
// A persistent kernel without its steps: to start all blocks, load their weights, and end.
constexpr double kKernelUs = 10.0;
// The CPU's time to enqueue a kernel, GEMM or copy.
constexpr double kHostUs = 2.0;

// The time of all stages of a step.
inline double persistent_us(Pass pass, const Cell& cell, const cuda::PersistentPlan& plan) {
  double us = 0;
  for (int s = 0; s < plan.num_stages; ++s) {
    const int gates = pass == Pass::Forward ? 1 : traits(plan.stages[s]).hidden_blocks;
    us += kExchangeUs + kTileUs * gates * plan.depth * plan.tiles;
  }
  const bool recomputes_cell_state = pass == Pass::Backward && has_cell_state(cell);
  return us + (recomputes_cell_state ? kStateUs * plan.tiles : 0);
}
inline double launched_us(Pass pass, const Cell& cell) {
  const bool recomputes_cell_state = pass == Pass::Backward && has_cell_state(cell);
  return kLaunchedUs * cell.num_stages + (recomputes_cell_state ? kLaunchUs : 0);
}
inline double step_us(Pass pass, const Problem& problem, const PassPlan& plan) {
  if (problem.gpu == nullptr) return 0;
  return plan.is_persistent ? persistent_us(pass, problem.cell, plan.persistent)
                            : launched_us(pass, problem.cell);
}

// The work of a pass that is done once per chunk.
struct ChunkWork {
  int64_t gemms = 0, launches = 0;  // launches: other than GEMMs and persistent kernels
  double products = 0;              // multiply-adds of these GEMMs per row
};

// Assumes contiguous tensors and that all gradients are wanted.
inline ChunkWork chunk_work(Pass pass, const Problem& problem, const PassPlan& plan,
                            int64_t element_bytes, bool recompute) {
  const Cell& cell = problem.cell;
  const Sizes& sizes = problem.sizes;
  ChunkWork work;
  const auto add = [&](int64_t columns, Width from, int64_t count = 1) {
    work.products += double(columns) * sizes[from];
    work.gemms += count;
  };
  const auto columns_of = [&](int blocks, int s) {
    return blocks * sizes[cell.projections[cell.stages[s].projection].to];
  };
  const int recurrent_stage = fusedrnn::recurrent_stage(cell);
  const StageTraits of_recurrent = traits(cell.stages[recurrent_stage].kind);
  const int64_t input_gates = columns_of(of_recurrent.input_blocks, recurrent_stage);
  if (pass == Pass::Forward) {
    add(input_gates, Width::Input);
    work.launches +=
        !plan.is_persistent && has_cell_state(cell);  // a copy of the cell state before the chunk
    return work;
  }
  const bool is_split = of_recurrent.shared_blocks < of_recurrent.input_blocks;
  const int64_t parts = is_split ? 2 : 1;                // the shared columns, and the rest
  add(input_gates, Width::Input, parts);                 // gradient of the input's weight
  add(input_gates, Width::Input, parts);                 // gradient of the input
  if (recompute) add(input_gates, Width::Input, parts);  // the input's projection again
  for (int s = 0; s < cell.num_stages; ++s) {
    const CellStage& stage = cell.stages[s];
    const int64_t columns = columns_of(traits(stage.kind).hidden_blocks, s);
    const Width from = cell.projections[stage.projection].from;
    add(columns, from);
    if (recompute && s <= recurrent_stage) add(columns, from);
  }
  work.launches += recurrent_stage;                 // earlier stages, over all rows
  work.launches += problem.bias ? 2 : 0;            // column sums
  work.launches += element_bytes == 2 && is_split;  // rounding the input's gradient
  work.launches +=
      plan.is_persistent || has_cell_state(cell);  // a preset, or a copy of the cell state
  return work;
}

// The microseconds of a chunk.
struct ChunkUs {
  double steps = 0, fixed = 0, host = 0;
};
inline ChunkUs chunk_us(Pass pass, const Problem& problem, const PassPlan& plan,
                        int64_t element_bytes, int64_t steps, bool recompute = true) {
  const ChunkWork work = chunk_work(pass, problem, plan, element_bytes, recompute);
  ChunkUs us;
  us.steps = double(steps) * step_us(pass, problem, plan);
  us.fixed = double(work.gemms) * kGemmUs + double(work.launches) * kLaunchUs +
             (plan.is_persistent ? kKernelUs : 0);
  // A launched stage is a GEMM and a kernel.
  const int64_t in_steps = plan.is_persistent ? 1 : 2 * problem.cell.num_stages * steps;
  us.host = double(work.gemms + work.launches + in_steps) * kHostUs;
  return us;
}

// Whether, in a training step, the fixed costs of chunks of `steps` steps are at most 3% of the
// time of their steps.
inline bool costs_little(const Problem& problem, const Plan& plan, int64_t element_bytes,
                         int64_t steps) {
  constexpr double kMost = 0.03;
  double all = 0, of_steps = 0;
  for (const Pass pass : {Pass::Forward, Pass::Backward}) {
    const PassPlan& way = pass == Pass::Forward ? plan.forward : plan.backward;
    const ChunkUs us = chunk_us(pass, problem, way, element_bytes, steps);
    all += std::max(us.steps + us.fixed, us.host);
    of_steps += us.steps;
  }
  return all <= (1 + kMost) * of_steps;
}

// The microseconds of a pass over the whole sequence, with GEMMs over whole chunks at the rate of
// the data sheet; 0 on the CPU and where the rate is not known.
inline double pass_us(Pass pass, const Problem& problem, const Plan& plan, int64_t element_bytes,
                      bool recompute) {
  if (problem.gpu == nullptr) return 0;
  const Tflops all = tflops_of(*problem.gpu);
  const double tflops = element_bytes == 8   ? all.float64
                        : element_bytes == 2 ? all.of_16_bits
                        : problem.tf32       ? all.tf32
                                             : all.float32;
  if (tflops == 0) return 0;
  const PassPlan& way = pass == Pass::Forward ? plan.forward : plan.backward;
  const ChunkWork work = chunk_work(pass, problem, way, element_bytes, recompute);
  const auto of_chunk = [&](int64_t steps) {
    if (steps == 0) return 0.0;
    const ChunkUs us = chunk_us(pass, problem, way, element_bytes, steps, recompute);
    const double rows = double(steps) * double(problem.batch);
    return std::max(us.steps + us.fixed + 2 * rows * work.products / (1e6 * tflops), us.host);
  };
  const int64_t whole = problem.seq_len / plan.steps;
  return double(whole) * of_chunk(plan.steps) + of_chunk(problem.seq_len - whole * plan.steps);
}

}  // namespace fusedrnn
