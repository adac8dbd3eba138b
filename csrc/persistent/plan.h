// The plan of a persistent forward kernel, made from sizes alone.
#pragma once
#include <algorithm>

#include "../base/gpus.h"
#include "../cell/layout.h"
#include "arguments.h"

namespace fusedrnn::cuda {

// element_bytes: size of the tensors' dtype.  steps: of the longest chunk.  batch: at least 1.
// tf32: whether products of float32 may be rounded to TF32.  free: multiprocessors to leave to
// other kernels, if one copy of the weights then still fits.
inline PersistentPlan plan_persistent(const Cell& cell, const Sizes& sizes, int64_t batch,
                                      int64_t steps, int64_t element_bytes, Exchange exchange,
                                      const Gpu& device, bool tf32 = false, int64_t free = 0) {
  PersistentPlan plan;
  const auto refuse = [&](const std::string& why) {
    plan.why_not = why;
    return plan;
  };
  if (element_bytes > 4) return refuse("Persistent kernels are for bfloat16, float16 and float32.");
  if (device.compute_capability < 80) {
    return refuse("The GPU is older than compute capability 8.0.");
  }
  if (element_bytes == 4 && !tf32) {
    return refuse(
        "float32 products would be rounded to TF32, which torch is not told to allow "
        "(torch.backends.cudnn.rnn.fp32_precision).");
  }
  static_assert(kMostStages == kMaxStages);
  int64_t widest = 0, most_columns = 0;
  plan.exchange = exchange;
  plan.num_stages = cell.num_stages;
  for (int s = 0; s < cell.num_stages; ++s) {
    plan.stages[s] = cell.stages[s].kind;
    const Projection& projection = cell.projections[cell.stages[s].projection];
    widest = std::max(widest, sizes[projection.to]);
    most_columns = std::max(most_columns, sizes[projection.from]);
  }
  if (!dispatch_stages(plan, [](auto) {})) {
    return refuse("There is no such kernel for the stages of this cell.");
  }
  const int packet_numbers = int(16 / element_bytes), depth_columns = 4 * packet_numbers;
  const int64_t limit = kMostDepth * kWarps * depth_columns;
  if (std::max(widest, most_columns) > limit) {
    return refuse("A size of " + std::to_string(std::max(widest, most_columns)) + " is above the " +
                  std::to_string(limit) + " that registers have room for in " +
                  (element_bytes == 4 ? "float32." : "16 bits."));
  }
  plan.blocks = int((widest + kTileUnits - 1) / kTileUnits);
  if (plan.blocks > device.multiprocessors) {
    return refuse("The weights need " + std::to_string(plan.blocks) +
                  " multiprocessors and the GPU has " + std::to_string(device.multiprocessors) +
                  ".");
  }
  const int64_t all_tiles = (batch + kTileRows - 1) / kTileRows;
  const int64_t with_room = std::max<int64_t>((device.multiprocessors - free) / plan.blocks, 1);
  const int64_t most_groups = std::min(with_room, all_tiles);
  plan.tiles = int((all_tiles + most_groups - 1) / most_groups);
  plan.groups = int((all_tiles + plan.tiles - 1) / plan.tiles);
  const int needed = warp_depth(int(most_columns), depth_columns);
  plan.depth = needed <= 2 ? needed : kMostDepth;
  const int64_t kept_floats = int64_t(plan.tiles) * kKeptArrays * kTileThreads;
  int ring_words = 0;
  for (int s = 0; s < cell.num_stages; ++s) {
    ring_words = std::max(ring_words, int(traits(plan.stages[s]).input_blocks));
  }
  plan.shared_bytes = int64_t(sizeof(float)) *
                      (2 * kTurnFloats + kBiasFloats + kept_floats + ring_floats(ring_words));
  plan.shared_limit = device.shared_bytes;
  if (plan.shared_bytes > device.shared_bytes) {
    return refuse("A batch of " + std::to_string(batch) + " needs " +
                  std::to_string(plan.shared_bytes) + " bytes of shared memory and a block has " +
                  std::to_string(device.shared_bytes) + ".");
  }
  if (steps * plan.tiles > INT32_MAX) {
    return refuse("A chunk of " + std::to_string(steps) + " steps is too long to be counted.");
  }
  // Packets of different steps cannot be distinguished by their bits, so each step has its own.
  const int64_t slots = exchange == Exchange::Packets ? steps : std::min<int64_t>(steps, 2);
  for (int s = 0; s < cell.num_stages; ++s) {
    const int64_t width = sizes[cell.projections[cell.stages[s].projection].to];
    plan.sent_bytes[s] = slots * batch * packets_of(int(width), packet_numbers) * 16;
    if (exchange == Exchange::Flags) {
      plan.count_bytes[s] = int64_t(plan.grid()) * kSenders * int64_t(sizeof(uint32_t));
    }
  }
  return plan;
}

}  // namespace fusedrnn::cuda
