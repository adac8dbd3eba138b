// Plans for each cell: a persistent kernel that exists, or a reason for none; the workspace of
// matrix products; and the length of chunks.  And which programs are chains.
#include <cstdio>
#include <iterator>

#include "../../csrc/cuda/memory.h"
#include "../../csrc/driver/planner.h"
#include "../../csrc/persistent/backward_plan.h"

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

// The workspace for splitting the long sums of weights' gradients: powers of two, and small next to
// the chunk.
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

// Bytes of backward over chunks of `steps` steps if the gradient of one weight is not wanted.
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

// Backward knows only the number of forward's chunks.
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

static std::string text(const Plan& plan) {
  std::string all = std::to_string(plan.steps) + plan.why_steps + char('0' + plan.lacks_room);
  for (const PassPlan& pass : {plan.forward, plan.backward}) {
    const cuda::PersistentPlan& kernel = pass.persistent;
    all += kernel.why_not;
    for (const int64_t number :
         {int64_t(pass.is_persistent), int64_t(pass.is_refused), int64_t(pass.overlaps),
          int64_t(kernel.exchange), int64_t(kernel.stages[0]), int64_t(kernel.num_stages),
          int64_t(kernel.blocks), int64_t(kernel.groups), int64_t(kernel.tiles),
          int64_t(kernel.depth), kernel.shared_bytes, kernel.shared_limit,
          kernel.workspace_bytes(2)}) {
      all += ' ' + std::to_string(number);
    }
  }
  return all;
}

// Remembered plans are those that would be made now, whatever has changed since.
static void check_remembered() {
  using Memory = cuda::Memory<BFloat16>;
  const auto like = [](const char* cell, const Gpu* gpu) {
    Problem p;
    p.cell = *find_cell(cell);
    p.sizes = {512, 512, 0, 512};
    p.seq_len = 1000;
    p.batch = 64;
    p.backend = "auto";
    p.gpu = gpu;
    return p;
  };
  static const Gpu gpu = kKnownGpus[1];
  const Problem first = like("lstm", &gpu);
  std::vector<Gpu> gpus(7, gpu);
  gpus[0].name = "another";
  gpus[1].compute_capability = 80;
  gpus[2].multiprocessors = 12;
  gpus[3].shared_bytes = 1 << 10;
  gpus[4].tflops.of_16_bits = 1;
  gpus[5].device = 1;
  gpus[6].most_blocks = [](const cuda::PersistentKernel*) { return int64_t(1) << 20; };
  std::vector<Problem> changed{like("gru", &gpu)};
  for (const Gpu& other : gpus) changed.push_back(like("lstm", &other));
  const auto with = [&](const auto& change) {
    changed.push_back(first);
    change(changed.back());
  };
  with([](Problem& p) { p.cell.name = "another"; });
  with([](Problem& p) { p.cell.stages[0].kind = StageKind::Gru; });
  with([](Problem& p) { p.cell.projections[1].blocks = 3; });
  with([](Problem& p) { p.cell.projections[1].has_bias = false; });
  with([](Problem& p) { p.sizes.input = 64; });
  with([](Problem& p) { p.sizes.hidden = p.sizes.output = 1024; });
  with([](Problem& p) { p.sizes.latent = 1; });
  with([](Problem& p) { p.bias = false; });
  with([](Problem& p) { p.seq_len = 50; });
  with([](Problem& p) { p.batch = 8; });
  with([](Problem& p) { p.chunk_size = 10; });
  with([](Problem& p) { p.workspace_bytes = 100 << 20; });
  with([](Problem& p) { p.chunks = 3; });
  with([](Problem& p) { p.backend = "stepwise"; });
  with([](Problem& p) { p.exchange = cuda::Exchange::Flags; });
  with([](Problem& p) { p.overlap = true; });
  with([](Problem& p) { p.free_multiprocessors = 100; });
  with([](Problem& p) { p.tf32 = true; });
  with([](Problem& p) { p.refusal[0] = "Forward is refused."; });
  with([](Problem& p) { p.refusal[1] = "Backward is refused."; });
  for (size_t i = 0; i < first.is_operand.size(); ++i) {
    with([&](Problem& p) { p.is_operand[i] = false; });
  }

  RememberedPlans known;
  int64_t wrong = 0;
  const auto check_one = [&](const Problem& problem) {
    const std::string fresh = text(plan_by_sizes<Memory>(problem));
    wrong += text(known(problem, plan_by_sizes<Memory>)) != fresh;
    wrong += text(plan_layer<Memory>(problem)) != fresh;
  };
  int64_t others = 0, alike = 0;
  for (const Problem& problem : changed) {
    alike += problem == first;
    check_one(first);
    check_one(problem);
    others += text(plan_by_sizes<Memory>(problem)) != text(plan_by_sizes<Memory>(first));
  }
  expect("changes that are none", alike, 0);
  expect("changes that change the plan", others >= 12, true);
  const size_t all = changed.size() + 1;
  expect("plans", int64_t(known.size()), int64_t(all));
  for (const Problem& problem : changed) check_one(problem);
  expect("plans, asked again", int64_t(known.size()), int64_t(all));

  // A remembered plan whose caller has freed the GPU's name.
  {
    const std::string name = "H100";
    Gpu passing = gpu;
    passing.name = name.c_str();
    check_one(like("gru", &passing));
  }
  check_one(like("gru", &gpu));

  Problem many = first;
  for (many.seq_len = 1; many.seq_len < 100; ++many.seq_len) check_one(many);
  expect("plans at most", int64_t(known.size()), int64_t(RememberedPlans::kMost));
  Problem impossible = first;
  impossible.workspace_bytes = 1;
  for (int i = 0; i < 2; ++i) {
    bool failed = false;
    try {
      known(impossible, plan_by_sizes<Memory>);
    } catch (const std::runtime_error&) {
      failed = true;
    }
    expect("an error", failed, true);
  }
  expect("plans that would be others now", wrong, 0);
}

// A program that is not in the table.
constexpr cells::Program kStochasticLstm = {
    "stochastic_lstm",
    /*inputs=*/{Width::Input},
    /*sequences=*/{Width::Hidden},
    /*carries=*/{{Width::Hidden, 0}, {Width::Hidden}},
    /*values=*/{{Width::Latent}, {Width::Hidden, 0, 0}, {Width::Hidden, cells::kNone, 1}},
    /*products=*/
    {{"ih", cells::input(0), 4, Width::Hidden},
     {"zh", cells::value(0), 4, Width::Hidden},
     {"hz", cells::carry(0), 2, Width::Latent, false}},
    /*stages=*/
    {{StageKind::Sample, {cells::draw(0), cells::array(2)}, {0}},
     {StageKind::Lstm, {cells::carry(1), cells::array(0), cells::array(1)}, {1, 2}}}};
constexpr Cell kChain = chain_of(kStochasticLstm);
static_assert(kChain.num_projections == 3 && kChain.num_stages == 2);
static_assert(kChain.projections[1].from == Width::Latent && !kChain.projections[2].has_bias);
static_assert(kChain.stages[0].kind == StageKind::Sample && kChain.stages[0].projection == 2);
static_assert(recurrent_stage(kChain) == 1 && has_cell_state(kChain) && !is_projected(kChain));

// Expects that a program is no chain, by a rule whose text begins so.
static void refuse(const cells::Program& program, const std::string& rule) {
  std::string why;
  try {
    chain_of(program);
  } catch (const std::runtime_error& error) {
    why = error.what();
  }
  const std::string expected = std::string("fusedrnn: ") + program.name + " is no chain: " + rule;
  if (why.compare(0, expected.size(), expected) != 0) ++failures;
  std::printf("%s, expected %s\n", why.c_str(), expected.c_str());
}

static void check_rules_of_chains() {
  using namespace cells;
  const auto with = [](const auto& change) {
    cells::Program program = kStochasticLstm;
    change(program);
    return program;
  };
  const auto stages = [&](const cells::Stage& first, const cells::Stage& second) {
    return with([&](auto& program) { program.stages = {first, second}; });
  };
  const cells::Stage sample = kStochasticLstm.stages[0], lstm = kStochasticLstm.stages[1];
  refuse(with([](auto& p) { p.inputs = {Width::Input, Width::Hidden}; }), "it must have one input");
  refuse(with([&](auto& p) { p.stages = {lstm}; }), "it must have one or two stages");
  refuse(with([](auto& p) {
           p.products = {p.products[0], p.products[1], {"xz", input(0), 2, Width::Latent}};
         }),
         "product 0, and no other");
  refuse(with([](auto& p) {
           p.products = {p.products[0], {"zh", value(0), 3, Width::Hidden}, p.products[2]};
         }),
         "a stage must have as many columns");
  refuse(stages(sample, {StageKind::Lstm, {carry(1), array(0), array(1)}, {1}}),
         "a stage must read and make");
  refuse(stages(sample, {StageKind::Lstm, {value(0), array(0), array(1)}, {1, 2}}),
         "a stage must read its carry");
  refuse(stages(sample, {StageKind::Lstm, {carry(1), array(1), array(1)}, {1, 2}}),
         "input gates must be");
  refuse(stages({StageKind::Sample, {draw(0), array(0)}, {0}}, lstm), "hidden gates must be");
  refuse(stages({StageKind::Sample, {draw(0), array(1)}, {0}}, lstm), "the first stage must read");
  refuse(stages(sample, {StageKind::Linear, {array(1)}, {1}}), "one stage must have a carry");
  refuse(stages(sample, {StageKind::Lstm, {carry(0), array(0), array(1)}, {1, 2}}),
         "the one carry besides h");
  refuse(with([](auto& p) { p.values = {p.values[0], {Width::Hidden}, p.values[2]}; }),
         "the result of the last stage");
}

int main() {
  check_gemm_workspace();
  check_remembered();
  check_chunks();
  check_frozen_weights();
  for (const Cell& cell : kCells) {
    check(cell, true);
    check(without_noise(cell), true);
  }
  check(kChain, false);  // there are no kernels for its stages
  check_rules_of_chains();
  return failures;
}
