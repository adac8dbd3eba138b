// The plan of a persistent kernel for backward_data, made from sizes alone.
#pragma once
#include "backward_arguments.h"
#include "plan.h"

namespace fusedrnn::cuda {

// Like plan_persistent().  The same blocks hold the same weights, transposed; they exchange
// gradients of projections, all GEMM blocks of each.  In 16 bits, if the packets of a row are all
// full, a row of packets has the layout that GEMMs read, and blocks exchange through the gradient
// array itself.  In float32 that is not possible: the array holds pre-activations until the kernel
// has read them.
inline PersistentPlan plan_persistent_backward(const Cell& cell, const Sizes& sizes, int64_t batch,
                                               int64_t steps, int64_t element_bytes,
                                               Exchange exchange, const Gpu& device,
                                               bool tf32 = false, int64_t free = 0) {
  // The shared memory that forward needs must not decide whether backward can run.
  Gpu other = device;
  other.shared_bytes = INT64_MAX;
  PersistentPlan plan =
      plan_persistent(cell, sizes, batch, steps, element_bytes, exchange, other, tf32, free);
  if (!plan.is_possible()) return plan;
  plan.shared_limit = device.shared_bytes;
  const int packet_numbers = int(16 / element_bytes);
  int64_t widest = 0;
  for (int s = 0; s < cell.num_stages; ++s) {
    const CellStage& stage = cell.stages[s];
    const int64_t width = sizes[cell.projections[stage.projection].to];
    widest = std::max(widest, width);
    const bool is_in_place = element_bytes == 2 && width % packet_numbers == 0;
    plan.sent_bytes[s] *= is_in_place ? 0 : traits(stage.kind).hidden_blocks;
  }
  const int needed = warp_depth(int(widest), 4 * packet_numbers);
  plan.depth = needed <= 2 ? needed : kMostDepth;
  const int64_t kept_floats = int64_t(plan.tiles) * kKeptArrays * kTileThreads;
  plan.shared_bytes = int64_t(sizeof(float)) * (2 * kBackwardSumFloats + kBiasFloats + kept_floats);
  if (plan.shared_bytes > device.shared_bytes) {
    plan.why_not = "A batch of " + std::to_string(batch) + " needs " +
                   std::to_string(plan.shared_bytes) + " bytes of shared memory and a block has " +
                   std::to_string(device.shared_bytes) + ".";
  }
  return plan;
}

}  // namespace fusedrnn::cuda
