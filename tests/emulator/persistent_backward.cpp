// Persistent kernels of backward_data alone, for the thread sanitizer: see main().
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

// The number of the seeded bug that is on, in a copy of the headers with bugs: see seeded_bugs.py.
namespace {
int64_t seeded_bug = 0;
}
#include "../../csrc/persistent/backward.h"
#include "../../csrc/persistent/backward_plan.h"

#ifndef FUSEDRNN_ELEMENT
#define FUSEDRNN_ELEMENT BFloat16
#endif
namespace fusedrnn {
using Element = FUSEDRNN_ELEMENT;  // of the tensors in main()
}

namespace fusedrnn::cuda {

struct ChainOptions {
  int64_t exchange, schedule, bug, multiprocessors, spin_limit;
};

// What went wrong, or "".
template <class T>
std::string run_chain(const Cell& cell, const Sizes& sizes, PersistentBackward<T> args,
                      const ChainOptions& options) {
  const auto exchange = Exchange(options.exchange);
  const PersistentPlan plan =
      plan_persistent_backward(cell, sizes, args.batch, args.steps, sizeof(T), exchange,
                               {"", 90, int(options.multiprocessors), int64_t(100) << 10},
                               /*tf32=*/true);
  if (!plan.is_possible()) return plan.why_not;
  // Gradients that are sent in place are right before the workspace in memory.
  const int64_t rows = int64_t(args.steps) * args.batch;
  const auto numbers_of = [&](int s) {
    const int64_t columns = traits(plan.stages[s]).hidden_blocks * args.step[s].width;
    return plan.is_in_place(s) ? rows * columns : 0;
  };
  T* own[kMostStages] = {};  // where gradients are wanted
  int64_t in_front = 0;
  for (int s = 0; s < plan.num_stages; ++s) in_front += numbers_of(s);
  std::vector<Packet> memory((in_front * sizeof(T) + plan.workspace_bytes()) / sizeof(Packet));
  T* at = reinterpret_cast<T*>(memory.data());
  for (int s = 0; s < plan.num_stages; ++s) {
    if (!plan.is_in_place(s)) continue;
    const int64_t first = args.row_step < 0 ? numbers_of(s) * (args.steps - 1) / args.steps : 0;
    own[s] = args.step[s].dhidden_gates - first;
    args.step[s].dhidden_gates = at + first;
    at += numbers_of(s);
  }
  T* const workspace = at;
  prepare(plan, workspace, args, [&](void* begin, int byte, size_t count) {
    auto* const end = static_cast<char*>(begin) + count;
    if (options.bug == 14) begin = workspace;
    memset(begin, byte, size_t(end - static_cast<char*>(begin)));
  });
  args.spin_limit = uint32_t(options.spin_limit);
  seeded_bug = options.bug;

  std::string failure = "there is no such kernel";
  dispatch_stages(plan, [&](auto stages) {
    const auto launch = [&](auto depth) {
      failure = emulated::launch(plan.grid(), kPersistentThreads, size_t(plan.shared_bytes),
                                 uint64_t(options.schedule), [&] {
                                   persistent_backward<T, decltype(depth)::value>(
                                       stages, args, emulated::shared_memory());
                                 });
    };
    if (plan.depth == 1) launch(std::integral_constant<int, 1>{});
  });
  at = reinterpret_cast<T*>(memory.data());
  for (int s = 0; s < plan.num_stages; ++s) {
    if (own[s] != nullptr) std::copy_n(at, numbers_of(s), own[s]);
    at += numbers_of(s);
  }
  return failure;
}

}  // namespace fusedrnn::cuda

namespace fusedrnn {
namespace {

uint64_t random_state = 7;
float random_number() {  // in [-1, 1)
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return float(int32_t(random_state >> 32)) * 0x1p-31f;
}
std::vector<float> random_floats(int64_t count) {
  std::vector<float> numbers(count);
  for (float& x : numbers) x = random_number();
  return numbers;
}
std::vector<Element> random_tensor(int64_t count) {
  std::vector<Element> numbers(count);
  for (auto& x : numbers) x = narrow<Element>(random_number());
  return numbers;
}
// The numbers that a gradient belongs to: as in the driver, in the gradient's memory if both are
// floats.
template <class Gradient>
const float* of_gradient(const std::vector<Gradient>& gradient, const std::vector<float>& other) {
  if constexpr (std::is_same_v<Gradient, float>) return gradient.data();
  return other.data();
}

// Runs one chunk of several blocks and tiles; prints a number that depends on every bit of its
// results. direction: of time in memory.
int run(const char* name, int64_t hidden, int64_t direction, const cuda::ChainOptions& options) {
  const bool is_mean = std::string(name) == "mean_gru";
  const Cell cell = is_mean ? without_noise(*find_cell("stochastic_gru")) : *find_cell(name);
  constexpr int64_t kSteps = 5, kBatch = 27, kRows = kSteps * kBatch;
  const int64_t latent = hidden - 16;  // makes the same number of full packets
  const Sizes sizes{1, hidden, latent, is_projected(cell) ? latent : hidden};
  const int64_t first_row =
      direction > 0 ? 0 : kRows - kBatch;  // the first row of the chunk's first step
  std::vector<int64_t> lengths(kBatch, kSteps);
  lengths[2] = 3;
  const std::unique_ptr<bool[]> reset(new bool[kRows]());
  reset[kBatch + 4] = true;

  cuda::PersistentBackward<Element> args{};
  std::vector<Element> weights[cuda::kMostStages], d[cuda::kMostStages], dinput_gates;
  std::vector<float> projections[cuda::kMostStages];
  const auto input_gates = random_floats(kRows * 4 * hidden);
  const auto h = random_tensor((kSteps + 1) * kBatch * sizes.output);
  const auto grad_output = random_tensor(kRows * sizes.output);
  const auto first_cell_state = random_floats(kBatch * hidden);
  auto state = random_floats(kRows * hidden), dh = random_floats(kBatch * sizes.output);
  auto dc = random_floats(kBatch * hidden);
  auto operand = random_tensor(kRows * hidden), deps = random_tensor(kRows * latent);
  dinput_gates = random_tensor(kRows * 4 * hidden);
  for (int s = 0; s < cell.num_stages; ++s) {
    const Projection& p = cell.projections[cell.stages[s].projection];
    const StageTraits facts = traits(cell.stages[s].kind);
    auto& step = args.step[s];
    step.width = sizes[p.to];
    step.is_last = s == cell.num_stages - 1;
    step.first_row = first_row;
    step.mask = {lengths.data(), reset.get(), kSteps, kBatch, int(direction)};
    const int64_t columns = facts.hidden_blocks * step.width;
    weights[s] = random_tensor(columns * sizes[p.from]);
    args.weight[s] = Matrix<const Element>::contiguous(weights[s].data(), columns, sizes[p.from]);
    projections[s] = random_floats(kRows * columns);
    d[s] = random_tensor(kRows * columns);
    const int64_t alone = (facts.input_blocks - facts.shared_blocks) * step.width;
    step.input_gates = of_gradient(dinput_gates, input_gates) + first_row * alone;
    step.hidden_gates = of_gradient(d[s], projections[s]) + first_row * columns;
    if (facts.has_factors) step.pre = step.hidden_gates, step.factor_blocks = 2;
    step.dhidden_gates = d[s].data() + first_row * columns;
    step.dinput_gates = dinput_gates.data() + first_row * alone;
    step.deps = deps.data() + first_row * latent;
    if (step.is_last) {
      step.dout = dh.data();
      step.grad_output = {grad_output.data() + first_row * sizes.output, sizes.output, true};
    }
    if (facts.has_cell_state) {
      step.dcarry = dc.data();
      args.first_cell_state = first_cell_state.data();
      args.cell_states = state.data() + first_row * hidden;
      if (!step.is_last) args.operand = operand.data() + first_row * hidden;
    } else if (facts.has_carry) {
      step.carry = {h.data() + first_row * hidden, hidden, true};
      args.first_carry = {h.data() + kRows * hidden, hidden, false};
    }
  }
  args.steps = kSteps;
  args.batch = kBatch;
  args.row_step = int(direction * kBatch);
  args.wants_dh = true;

  const std::string failure = cuda::run_chain(cell, sizes, args, options);
  if (!failure.empty()) {
    printf("%s\n", failure.c_str());
    return 1;
  }
  uint64_t hash = 0;
  const auto add = [&](const auto& numbers) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(numbers.data());
    for (size_t i = 0; i < numbers.size() * sizeof numbers[0]; ++i) hash = hash * 31 + bytes[i];
  };
  add(dh), add(dc), add(state), add(operand), add(deps), add(dinput_gates), add(d[0]), add(d[1]);
  printf("%016llx\n", static_cast<unsigned long long>(hash));
  return 0;
}

}  // namespace
}  // namespace fusedrnn

// Arguments: cell hidden direction exchange schedule bug.
int main(int, char** arguments) {
  const auto number = [&](int i) { return int64_t(atoi(arguments[i])); };
  return fusedrnn::run(arguments[1], number(2), number(3),
                       {number(4), number(5), number(6), 8, 3000});
}
