// Persistent kernels of backward_data alone: see persistent.h and main().
#include "persistent.h"

namespace fusedrnn {
namespace {

// What went wrong, or "".
std::string run_chain(const Cell& cell, const Sizes& sizes, PersistentBackward<Element> args,
                      const RunOptions& options) {
  const PersistentPlan plan =
      plan_persistent_backward(cell, sizes, args.batch, args.steps, sizeof(Element),
                               Exchange(options.exchange), kGpu, /*tf32=*/true);
  if (!plan.is_possible()) return plan.why_not;
  // Gradients that are sent in place are right before the workspace in memory.
  const int64_t rows = int64_t(args.steps) * args.batch;
  const auto numbers_of = [&](int s) {
    const int64_t columns = traits(plan.stages[s]).hidden_blocks * args.step[s].width;
    return plan.is_in_place(s) ? rows * columns : 0;
  };
  Element* own[kMostStages] = {};  // where gradients are wanted
  int64_t in_front = 0;
  for (int s = 0; s < plan.num_stages; ++s) in_front += numbers_of(s);
  std::vector<Packet> memory((in_front * sizeof(Element) + plan.workspace_bytes()) /
                             sizeof(Packet));
  Element* at = reinterpret_cast<Element*>(memory.data());
  for (int s = 0; s < plan.num_stages; ++s) {
    if (!plan.is_in_place(s)) continue;
    const int64_t first = args.row_step < 0 ? numbers_of(s) * (args.steps - 1) / args.steps : 0;
    own[s] = args.step[s].dhidden_gates - first;
    args.step[s].dhidden_gates = at + first;
    at += numbers_of(s);
  }
  Element* const workspace = at;
  prepare(plan, workspace, args, [&](void* begin, int byte, size_t count) {
    auto* const end = static_cast<char*>(begin) + count;
    if (options.bug == 14) begin = workspace;
    memset(begin, byte, size_t(end - static_cast<char*>(begin)));
  });
  args.spin_limit = kSpins;
  const std::string failure = launch(plan, options, [&](auto stages, auto depth) {
    persistent_backward<Element, decltype(depth)::value>(stages, args, emulated::shared_memory());
  });
  at = reinterpret_cast<Element*>(memory.data());
  for (int s = 0; s < plan.num_stages; ++s) {
    if (own[s] != nullptr) std::copy_n(at, numbers_of(s), own[s]);
    at += numbers_of(s);
  }
  return failure;
}

// The numbers that a gradient belongs to: as in the driver, in the gradient's memory if both are
// floats.
template <class Gradient>
const float* of_gradient(const std::vector<Gradient>& gradient, const std::vector<float>& other) {
  if constexpr (std::is_same_v<Gradient, float>) return gradient.data();
  return other.data();
}

// direction: of time in memory.
int run(const char* name, int64_t hidden, int64_t direction, const RunOptions& options) {
  const bool is_mean = std::string(name) == "mean_gru";
  const Cell cell = is_mean ? without_noise(*find_cell("stochastic_gru")) : *find_cell(name);
  const int64_t latent = hidden - 16;  // makes the same number of full packets
  const Sizes sizes{1, hidden, latent, is_projected(cell) ? latent : hidden};
  const int64_t first_row =
      direction > 0 ? 0 : kRows - kBatch;  // the first row of the chunk's first step

  PersistentBackward<Element> args{};
  std::vector<Element> weights[kMostStages], d[kMostStages], dinput_gates;
  std::vector<float> projections[kMostStages];
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
    step.mask = mask_of(direction);
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

  const std::string failure = run_chain(cell, sizes, args, options);
  return report(failure, dh, dc, state, operand, deps, dinput_gates, d[0], d[1]);
}

}  // namespace
}  // namespace fusedrnn

// Arguments: cell hidden direction exchange schedule bug.
int main(int, char** arguments) {
  const auto number = [&](int i) { return int64_t(atoi(arguments[i])); };
  return fusedrnn::run(arguments[1], number(2), number(3), {number(4), number(5), number(6)});
}
