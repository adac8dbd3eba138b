// Remembers plans by everything that they depend on: to plan a layer for a GPU takes longer than to
// launch a kernel.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "problem.h"

namespace fusedrnn {

// A field that is added to one of these structs breaks the structured binding here, and so the
// build, until the comparison is updated.
inline bool operator==(const Sizes& a, const Sizes& b) {
  const auto fields = [](const Sizes& s) {
    const auto& [input, hidden, latent, output] = s;
    return std::tie(input, hidden, latent, output);
  };
  return fields(a) == fields(b);
}

inline bool operator==(const Projection& a, const Projection& b) {
  const auto fields = [](const Projection& p) {
    const auto& [name, blocks, to, from, has_bias] = p;
    return std::pair(name, std::tie(blocks, to, from, has_bias));
  };
  const auto [name_a, others_a] = fields(a);
  const auto [name_b, others_b] = fields(b);
  return others_a == others_b && std::strcmp(name_a, name_b) == 0;
}

inline bool operator==(const CellStage& a, const CellStage& b) {
  const auto& [kind_a, projection_a] = a;
  const auto& [kind_b, projection_b] = b;
  return kind_a == kind_b && projection_a == projection_b;
}

inline bool operator==(const Cell& a, const Cell& b) {
  const auto& [name_a, projections_a, projection_a, stages_a, stage_a] = a;
  const auto& [name_b, projections_b, projection_b, stages_b, stage_b] = b;
  return projections_a == projections_b && stages_a == stages_b &&
         std::equal(projection_a, projection_a + projections_a, projection_b) &&
         std::equal(stage_a, stage_a + stages_a, stage_b) && std::strcmp(name_a, name_b) == 0;
}

inline bool operator==(const Tflops& a, const Tflops& b) {
  const auto fields = [](const Tflops& t) {
    const auto& [of_16_bits, tf32, float32, float64] = t;
    return std::tie(of_16_bits, tf32, float32, float64);
  };
  return fields(a) == fields(b);
}

inline bool operator==(const Gpu& a, const Gpu& b) {
  const auto fields = [](const Gpu& g) {
    const auto& [name, capability, multiprocessors, shared_bytes, tflops, device, most_blocks] = g;
    return std::pair(
        name, std::tie(capability, multiprocessors, shared_bytes, tflops, device, most_blocks));
  };
  const auto [name_a, others_a] = fields(a);
  const auto [name_b, others_b] = fields(b);
  return others_a == others_b && std::strcmp(name_a, name_b) == 0;
}

// Only for problems that have a GPU.
inline bool operator==(const Problem& a, const Problem& b) {
  const auto fields = [](const Problem& p) {
    const auto& [cell, sizes, bias, seq_len, batch, chunk_size, workspace_bytes, chunks, backend,
                 exchange, overlap, free_multiprocessors, gpu, tf32, refusal, is_operand] = p;
    return std::tie(seq_len, batch, chunks, sizes, bias, chunk_size, workspace_bytes, exchange,
                    overlap, free_multiprocessors, tf32, is_operand, backend, refusal, *gpu, cell);
  };
  return fields(a) == fields(b);
}

// The latest plans of one thread, most recently used first; the least recently used one is
// forgotten.
class RememberedPlans {
 public:
  // make(problem) makes a plan that is not remembered.  If it throws, nothing is remembered.
  template <class Make>
  const Plan& operator()(const Problem& problem, const Make& make) {
    auto found = std::find_if(plans_.begin(), plans_.end(),
                              [&](const auto& known) { return known->problem == problem; });
    if (found == plans_.end()) {
      auto made = std::make_unique<Known>(problem, make(problem));
      if (plans_.size() == kMost) plans_.pop_back();
      found = plans_.insert(plans_.end(), std::move(made));
    }
    std::rotate(plans_.begin(), found, found + 1);
    return plans_.front()->plan;
  }
  size_t size() const { return plans_.size(); }

  static constexpr size_t kMost = 64;

 private:
  // A plan and its problem, with a copy of the GPU's properties, because the caller's may be gone
  // by the next call.
  struct Known {
    std::string gpu_name;
    Gpu gpu;
    Problem problem;
    Plan plan;

    Known(const Problem& asked, Plan made)
        : gpu_name(asked.gpu->name), gpu(*asked.gpu), problem(asked), plan(std::move(made)) {
      gpu.name = gpu_name.c_str();
      problem.gpu = &gpu;
    }
    Known(const Known&) = delete;
    Known& operator=(const Known&) = delete;
  };
  std::vector<std::unique_ptr<Known>> plans_;
};

}  // namespace fusedrnn
