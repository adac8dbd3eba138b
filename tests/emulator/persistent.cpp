// Persistent kernels of forward alone, for the thread sanitizer: see main().
#include <cstdint>
#include <memory>
#include <vector>

// The number of the seeded bug that is on, in a copy of the headers with bugs: see seeded_bugs.py.
namespace {
int64_t seeded_bug = 0;
}
#include "../../csrc/persistent/forward.h"
#include "../../csrc/persistent/plan.h"

#ifndef FUSEDRNN_ELEMENT
#define FUSEDRNN_ELEMENT BFloat16
#endif
namespace fusedrnn {
using Element = FUSEDRNN_ELEMENT;  // of the tensors in main()
}

// One chunk.
struct Call {
  const char* cell;
  int64_t is_half, sample, exchange, schedule, bug, spin_limit, multiprocessors;
  int64_t steps, batch, hidden, latent, output_size;
  int64_t seq_len, first_row, direction, layer, first_step;
  const void* weight[2];
  int64_t weight_strides[2][2];
  const float *input_gates, *input_bias, *hidden_bias[2];
  const void* h;
  int64_t h_stride;
  void* h_out;
  const float* carry;
  float* carry_out;
  const void* eps;
  int64_t eps_stride;
  const int64_t *seed, *lengths;
  const bool* reset;
  const int64_t* zoneout_seed;
  double zoneout_h, zoneout_state;
  void* output;
  int64_t output_stride;
  float* saved_gates[2];
};

namespace fusedrnn::cuda {
namespace {

// Pointers are to the chunk's first step, in arrays of the whole sequence and of the chunk.
template <class T>
std::string run(const Call& call) {
  Cell cell = *find_cell(call.cell);
  if (!call.sample) cell = without_noise(cell);
  const Sizes sizes{1, call.hidden, call.latent, call.output_size};
  const auto exchange = Exchange(call.exchange);
  const PersistentPlan plan =
      plan_persistent(cell, sizes, call.batch, call.steps, sizeof(T), exchange,
                      {"", 90, int(call.multiprocessors), int64_t(100) << 10}, /*tf32=*/true);
  if (!plan.is_possible()) return plan.why_not;

  PersistentForward<T> args{};
  for (int s = 0; s < cell.num_stages; ++s) {
    const Projection& projection = cell.projections[cell.stages[s].projection];
    auto& step = args.step[s];
    step.width = sizes[projection.to];
    step.first_row = call.first_row;
    step.is_last = s == cell.num_stages - 1;
    step.mask = {call.lengths, call.reset, call.seq_len, call.batch, int(call.direction)};
    step.zoneout = Zoneout<float>::of(call.zoneout_seed, call.layer, call.first_step,
                                      call.zoneout_h, call.zoneout_state);
    step.noise = {{static_cast<const T*>(call.eps), call.eps_stride, true},
                  call.seed,
                  call.layer,
                  call.first_step};
    step.input_gates = call.input_gates;
    step.input_bias = call.input_bias;
    step.hidden_bias = call.hidden_bias[s];
    step.saved_gates = call.saved_gates[s];
    if (s == recurrent_stage(cell)) {
      step.carry = {call.carry, step.width, false};
      step.carry_out = call.carry_out;
    }
    if (step.is_last) {
      step.output = {static_cast<T*>(call.output), call.output_stride, true};
      step.operand = static_cast<T*>(call.h_out);
    }
    const int64_t blocks = traits(cell.stages[s].kind).hidden_blocks;
    args.weight[s] = {static_cast<const T*>(call.weight[s]), blocks * step.width,
                      sizes[projection.from], call.weight_strides[s][0], call.weight_strides[s][1]};
  }
  args.h = {static_cast<const T*>(call.h), call.h_stride, false};
  args.steps = int(call.steps);
  args.batch = int(call.batch);
  args.row_step = int(call.direction * call.batch);
  args.spin_limit = uint32_t(call.spin_limit);
  std::vector<Packet> workspace(plan.workspace_bytes() / sizeof(Packet));
  prepare(plan, workspace.data(), args,
          [](void* memory, int byte, size_t count) { memset(memory, byte, count); });
  seeded_bug = call.bug;

  std::string failure = "there is no such kernel";
  dispatch_stages(plan, [&](auto stages) {
    const auto launch = [&](auto depth) {
      failure = emulated::launch(
          plan.grid(), kPersistentThreads, size_t(plan.shared_bytes), uint64_t(call.schedule), [&] {
            persistent_forward<T, decltype(depth)::value>(stages, args, emulated::shared_memory());
          });
    };
    if (plan.depth == 1) launch(std::integral_constant<int, 1>{});
  });
  return failure;
}

}  // namespace
}  // namespace fusedrnn::cuda

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
using fusedrnn::Element;
std::vector<Element> random_tensor(int64_t count) {
  std::vector<Element> numbers(count);
  for (auto& x : numbers) x = fusedrnn::narrow<Element>(random_number());
  return numbers;
}

}  // namespace

// Arguments: cell exchange schedule bug.  Runs one chunk of several blocks and tiles, and prints a
// number that depends on every bit of its results.
int main(int, char** arguments) {
  using namespace fusedrnn;
  Call call{};
  call.cell = arguments[1];
  call.exchange = atoi(arguments[2]);
  call.schedule = atoi(arguments[3]);
  call.bug = atoi(arguments[4]);
  const Cell& cell = *find_cell(call.cell);
  call.sample = 1;
  call.spin_limit = 3000;
  call.multiprocessors = 8;
  call.steps = call.seq_len = 5;
  call.batch = 27;
  call.hidden = 40;
  call.latent = 24;
  call.output_size = is_projected(cell) ? 20 : call.hidden;
  call.direction = 1;
  const Sizes sizes{1, call.hidden, call.latent, call.output_size};
  const int64_t rows = call.steps * call.batch;
  std::vector<Element> weights[2];
  std::vector<float> biases[2];
  for (int s = 0; s < cell.num_stages; ++s) {
    const Projection& p = cell.projections[cell.stages[s].projection];
    weights[s] = random_tensor(p.blocks * sizes[p.to] * sizes[p.from]);
    biases[s] = random_floats(p.blocks * sizes[p.to]);
    call.weight[s] = weights[s].data();
    call.weight_strides[s][0] = sizes[p.from];
    call.weight_strides[s][1] = 1;
    call.hidden_bias[s] = biases[s].data();
  }
  const auto input_gates = random_floats(
      rows * traits(cell.stages[recurrent_stage(cell)].kind).input_blocks * call.hidden);
  const auto h = random_tensor(call.batch * call.output_size);
  auto h_out = h, output = random_tensor(rows * call.output_size);
  auto carry = random_floats(call.batch * call.hidden);
  const int64_t seed = 3;
  std::vector<int64_t> lengths(call.batch, call.steps);
  lengths[2] = 3;
  const std::unique_ptr<bool[]> reset(new bool[rows]());
  reset[call.batch + 4] = true;
  call.input_gates = input_gates.data();
  call.h = h.data();
  call.h_stride = call.output_stride = call.output_size;
  call.h_out = h_out.data();
  call.carry = call.carry_out = carry.data();
  call.seed = &seed;
  call.lengths = lengths.data();
  call.reset = reset.get();
  call.output = output.data();

  const std::string failure = cuda::run<Element>(call);
  if (!failure.empty()) {
    printf("%s\n", failure.c_str());
    return 1;
  }
  uint64_t hash = 0;
  const auto add = [&](const auto& numbers) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(numbers.data());
    for (size_t i = 0; i < numbers.size() * sizeof numbers[0]; ++i) hash = hash * 31 + bytes[i];
  };
  add(output);
  add(h_out);
  add(carry);
  printf("%016llx\n", static_cast<unsigned long long>(hash));
}
