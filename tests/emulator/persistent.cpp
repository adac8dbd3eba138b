// Persistent kernels of forward alone: see persistent.h and main().
#include "persistent.h"

namespace fusedrnn {
namespace {

int run(const char* name, const RunOptions& options) {
  const Cell& cell = *find_cell(name);
  constexpr int64_t kHidden = 40, kLatent = 24, kProjected = 20;
  const Sizes sizes{1, kHidden, kLatent, is_projected(cell) ? kProjected : kHidden};
  const PersistentPlan plan = plan_persistent(cell, sizes, kBatch, kSteps, sizeof(Element),
                                              Exchange(options.exchange), kGpu, /*tf32=*/true);
  if (!plan.is_possible()) return report(plan.why_not);

  std::vector<Element> weights[kMostStages];
  std::vector<float> biases[kMostStages];
  for (int s = 0; s < cell.num_stages; ++s) {
    const Projection& p = cell.projections[cell.stages[s].projection];
    weights[s] = random_tensor(p.blocks * sizes[p.to] * sizes[p.from]);
    biases[s] = random_floats(p.blocks * sizes[p.to]);
  }
  const int64_t gates = traits(cell.stages[recurrent_stage(cell)].kind).input_blocks;
  const auto input_gates = random_floats(kRows * gates * kHidden);
  const auto h = random_tensor(kBatch * sizes.output);
  auto h_out = h, output = random_tensor(kRows * sizes.output);
  auto carry = random_floats(kBatch * kHidden);
  const int64_t seed = 3;

  PersistentForward<Element> args{};
  for (int s = 0; s < cell.num_stages; ++s) {
    const Projection& p = cell.projections[cell.stages[s].projection];
    auto& step = args.step[s];
    step.width = sizes[p.to];
    step.is_last = s == cell.num_stages - 1;
    step.mask = mask_of(1);
    step.zoneout = Zoneout<float>::of(nullptr, 0, 0, 0, 0);
    step.noise = {{nullptr, 0, true}, &seed, 0, 0};
    step.input_gates = input_gates.data();
    step.hidden_bias = biases[s].data();
    if (s == recurrent_stage(cell)) {
      step.carry = {carry.data(), step.width, false};
      step.carry_out = carry.data();
    }
    if (step.is_last) {
      step.output = {output.data(), sizes.output, true};
      step.operand = h_out.data();
    }
    const int64_t columns = traits(cell.stages[s].kind).hidden_blocks * step.width;
    args.weight[s] = Matrix<const Element>::contiguous(weights[s].data(), columns, sizes[p.from]);
  }
  args.h = {h.data(), sizes.output, false};
  args.steps = kSteps;
  args.batch = args.row_step = kBatch;
  args.spin_limit = kSpins;
  std::vector<Packet> workspace(plan.workspace_bytes() / sizeof(Packet));
  prepare(plan, workspace.data(), args,
          [](void* memory, int byte, size_t count) { memset(memory, byte, count); });
  const std::string failure = launch(plan, options, [&](auto stages, auto depth) {
    persistent_forward<Element, decltype(depth)::value>(stages, args, emulated::shared_memory());
  });
  return report(failure, output, h_out, carry);
}

}  // namespace
}  // namespace fusedrnn

// Arguments: cell exchange schedule bug.
int main(int, char** arguments) {
  const auto number = [&](int i) { return int64_t(atoi(arguments[i])); };
  return fusedrnn::run(arguments[1], {number(2), number(3), number(4)});
}
