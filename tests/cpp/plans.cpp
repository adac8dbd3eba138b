// What is planned for each cell: a persistent kernel that there is, or none, for a reason.  What
// matrix products may take.  And how long chunks are.
#include <cstdio>
#include <iterator>

#include "../../csrc/cuda/memory.h"
#include "../../csrc/cuda/persistent_backward_plan.h"
#include "../../csrc/planner.h"

using namespace fusedrnn;

static int failures = 0;

static void check(const Cell& cell, bool has_kernels) {
  const Sizes sizes{64, 64, 32, is_projected(cell) ? 32 : 64};
  const Gpu gpu = kKnownGpus[1];
  const auto exchange = cuda::Exchange::Packets;
  const cuda::PersistentPlan forward = plan_persistent(cell, sizes, 8, 4, 2, exchange, gpu);
  const cuda::PersistentPlan backward =
      plan_persistent_backward(cell, sizes, 8, 4, 2, exchange, gpu);
  for (const cuda::PersistentPlan* plan : {&forward, &backward}) {
    const bool is_there = dispatch_stages(*plan, [](auto) {});
    if (plan->is_possible() != has_kernels || is_there != has_kernels) ++failures;
    std::printf("%s: %s\n", cell.name, plan->is_possible() ? "yes" : plan->why_not.c_str());
  }
}

static void expect(const char* what, int64_t got, int64_t wanted) {
  if (got != wanted) ++failures;
  std::printf("%s: %lld, expected %lld\n", what, (long long)(got), (long long)(wanted));
}

template <class T>
static int64_t gemm_mib(int64_t rows, int64_t size) {
  return cuda::Memory<T>::gemm_workspace_bytes({rows, 0, 8 * size, 3 * size * size}) >> 20;
}

// To split the long sums of gradients of weights, in powers of two and little beside the chunk.
static void check_gemm_workspace() {
  expect("no weights", cuda::Memory<float>::gemm_workspace_bytes({1 << 20, 0, 0, 0}) >> 20, 2);
  expect("256 rows", gemm_mib<BFloat16>(256, 256), 2);
  expect("2,048 rows", gemm_mib<BFloat16>(2048, 512), 4);
  expect("16,384 rows", gemm_mib<BFloat16>(16384, 256), 16);
  expect("131,072 rows", gemm_mib<BFloat16>(131072, 256), 16);  // 42 parts of 3/4 MiB
  expect("of doubles", gemm_mib<double>(131072, 256), 16);
  expect("wide", gemm_mib<BFloat16>(131072, 1024), 16);
  expect("as wide as one part", gemm_mib<BFloat16>(131072, 1600), 16);
  expect("too wide for a part", gemm_mib<BFloat16>(131072, 2048), 2);
  expect("a narrow layer", gemm_mib<BFloat16>(int64_t(1) << 32, 8), 16);
  expect("the most", gemm_mib<double>(1, int64_t(1) << 24), 2);
}

// Bytes of backward over chunks of so many steps, where the gradient of one weight is not wanted.
static int64_t backward_bytes(int64_t steps, int frozen) {
  using T = BFloat16;
  static T there{};
  static float sum{};
  Layer<T> layer{};
  layer.cell = *find_cell("lstm");
  layer.sizes = {256, 1536, 0, 1536};
  layer.seq_len = 2 * steps;
  layer.batch = 64;
  layer.chunk = steps;
  layer.input = {&there, 256, 64 * 256, 256, 1};
  Gradients<T> gradients{};
  gradients.input = &there;
  for (int p = 0; p < layer.cell.num_projections; ++p) {
    const Projection& projection = layer.cell.projections[p];
    const int64_t rows = projection.blocks * layer.sizes[projection.to];
    layer.weight[p] = Matrix<const T>::contiguous(&there, rows, layer.sizes[projection.from]);
    if (p != frozen) gradients.weight[p] = &sum;
  }
  Arena arena;
  Workspace<cuda::Memory<T>>::Backward(layer, gradients, arena);
  return arena.size_bytes();
}

static void check_frozen_weights() {
  for (int64_t steps = 1; steps < 2000; steps *= 2) {
    for (int frozen : {0, 1}) {
      const int64_t all = backward_bytes(steps, -1), some = backward_bytes(steps, frozen);
      expect("a frozen weight takes more", some > all, false);
    }
  }
}

// Backward knows of forward's chunks how many they are.
static void check_chunks() {
  int64_t others = 0;
  for (int64_t seq_len = 1; seq_len <= 260; ++seq_len) {
    for (const int64_t batch : {1, 3, 8, 24, 32, 96, 128, 160}) {
      const Chunks chunks(seq_len, batch, /*on_gpu=*/true);
      for (int64_t bound = 1; bound <= seq_len; ++bound) {
        const int64_t within = chunks.within(bound), at_least = chunks.at_least(bound);
        others += within > bound || at_least < bound;
        for (const int64_t steps : {within, at_least}) {
          others += chunks.steps_of((seq_len + steps - 1) / steps) != steps;
        }
      }
    }
  }
  expect("chunks of another length", others, 0);
}

int main() {
  check_gemm_workspace();
  check_chunks();
  check_frozen_weights();
  for (const Cell& cell : kCells) {
    check(cell, true);
    check(without_noise(cell), true);
  }
  // A row of the table for which nobody has compiled kernels.
  Cell stochastic_lstm = *find_cell("stochastic_gru");
  stochastic_lstm.name = "stochastic_lstm";
  stochastic_lstm.stages[1].kind = StageKind::Lstm;
  check(stochastic_lstm, false);
  return failures;
}
