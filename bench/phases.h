// One persistent kernel by itself, over a chunk of random numbers that it gets as the driver would
// give it a chunk of training in bfloat16: on a GPU (phases.cu), or on the emulation
// (tests/emulator/phases.cpp).  With FUSEDRNN_PHASE_CLOCKS it also says where the cycles go.
//
// A Device has
//   gpu(): what plans need to know of it
//   allocate(bytes), set(memory, byte, bytes), write(memory, from, bytes), read(to, memory, bytes)
//   rewrite(memory, count): reads floats and writes them again, as the product before the kernel
//       would leave them in the caches
//   run(stages, plan, args): launches a kernel and waits; returns microseconds
//   set_log(log): sets phase_log, if there are clocks
#pragma once
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../csrc/persistent/backward.h"
#include "../csrc/persistent/backward_plan.h"
#include "../csrc/persistent/forward.h"
#include "../csrc/persistent/plan.h"

namespace fusedrnn::phases {

using namespace cuda;
using Element = BFloat16;

struct Call {
  const char* cell;
  int64_t steps, batch, hidden;
  int launches;  // that count; one more is before them

  int64_t rows() const { return steps * batch; }
  Sizes sizes() const { return {hidden, hidden, hidden, hidden}; }
};

// Arrays in a device's memory, with random numbers of at most `most`.
template <class Device>
class Arrays {
 public:
  Arrays(Device& device, const Call& call) : device_(device), call_(call) {}

  template <class N>
  N* random(int64_t count, float most = 1) {
    std::vector<N> numbers(count);
    for (N& x : numbers) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      x = narrow<N>(most * float(int32_t(state_ >> 32)) * 0x1p-31f);
    }
    auto* const memory = static_cast<N*>(device_.allocate(sizeof(N) * numbers.size()));
    device_.write(memory, numbers.data(), sizeof(N) * numbers.size());
    return memory;
  }
  // As random(), and the launches change them: they count as results.
  template <class N>
  N* result(int64_t count) {
    N* const memory = random<N>(count);
    results_.push_back({memory, sizeof(N) * size_t(count)});
    return memory;
  }
  // Floats that a product writes before each launch.
  float* product(int64_t count) {
    products_.push_back({random<float>(count), count});
    return products_.back().memory;
  }
  // The weight and what forward and backward have in common, in stage s.
  template <class Args>
  void fill(const Cell& cell, int s, Args& args) {
    const Projection& projection = cell.projections[cell.stages[s].projection];
    const int64_t columns = projection.blocks * call_.hidden;
    const float most = 1 / std::sqrt(float(call_.hidden));
    auto& step = args.step[s];
    step.width = call_.hidden;
    step.is_last = s == cell.num_stages - 1;
    step.mask = {nullptr, nullptr, call_.steps, call_.batch, 1};
    step.input_bias = random<float>(4 * call_.hidden, most);
    step.hidden_bias = random<float>(columns, most);
    args.weight[s] = Matrix<const Element>::contiguous(
        random<Element>(columns * call_.hidden, most), columns, call_.hidden);
    args.steps = int(call_.steps);
    args.batch = args.row_step = int(call_.batch);
  }

  void rewrite_products() {
    for (const auto& [memory, count] : products_) device_.rewrite(memory, count);
  }
  // A number that depends on every bit of the results.
  uint64_t hash() {
    uint64_t hash = 0;
    for (const auto& [memory, bytes] : results_) {
      std::vector<uint32_t> words(bytes / sizeof(uint32_t));
      device_.read(words.data(), memory, words.size() * sizeof(uint32_t));
      for (const uint32_t word : words) hash = hash * 31 + word;
    }
    return hash;
  }

 private:
  struct Result {
    void* memory;
    size_t bytes;
  };
  struct Product {
    float* memory;
    int64_t count;
  };
  Device& device_;
  const Call& call_;
  uint64_t state_ = 7;
  std::vector<Result> results_;
  std::vector<Product> products_;
};

#if defined(FUSEDRNN_PHASE_CLOCKS)
// What the observers have written down in all launches, added up.
template <class Device>
class Observers {
 public:
  Observers(Device& device, const PersistentPlan& plan, const Call& call)
      : device_(device), grid_(plan.grid()), num_stages_(plan.num_stages) {
    // backward has one step more
    const int64_t of_each = 1 + (call.steps + 1) * plan.tiles * plan.num_stages * (kPoints + 1);
    events_.resize(size_t(kObservers * of_each));
    log_ = {static_cast<PhaseEvent*>(device.allocate(bytes())), of_each};
    device.set_log(log_);
  }

  void begin() { device_.set(log_.events, 0xff, bytes()); }
  void add() {
    device_.read(events_.data(), log_.events, bytes());
    for (int i = 0; i < kObservers; ++i) {
      add(sums_[i], events_.data() + i * log_.of_each);
    }
  }
  void print() const {
    std::printf(", \"observers\": [");
    const char* comma = "";
    for (int i = 0; i < kObservers; ++i) {
      const Sums& sums = sums_[i];
      if (!sums.is_there) continue;
      std::printf("%s{\"block\": %d, \"warp\": %d, \"whole\": %llu, \"stages\": [", comma,
                  observed_block(i, grid_), observed_warp(i), sums.whole);
      for (int s = 0; s < num_stages_; ++s) {
        std::printf("%s{\"questions\": %llu, \"cycles\": [", s > 0 ? ", " : "", sums.questions[s]);
        for (int p = 0; p < kPoints; ++p) {
          std::printf("%s%llu", p > 0 ? ", " : "", sums.cycles[s][p]);
        }
        std::printf("]}");
      }
      std::printf("]}");
      comma = ", ";
    }
    std::printf("]");
  }

 private:
  struct Sums {
    bool is_there = false;
    unsigned long long cycles[kMostStages][kPoints] = {}, questions[kMostStages] = {}, whole = 0;
  };
  size_t bytes() const { return sizeof(PhaseEvent) * events_.size(); }
  // The cycles of a point are those since the point before it, whichever that was.
  void add(Sums& sums, const PhaseEvent* event) const {
    uint32_t first = 0, last = 0;
    for (int64_t i = 0; i < log_.of_each && event[i].stage_and_kind != ~0u; ++i) {
      const uint32_t stage = event[i].stage_and_kind / kKinds;
      const uint32_t kind = event[i].stage_and_kind % kKinds, value = event[i].value;
      if (kind == kStart) {
        sums.is_there = true;
        first = last = value;
      } else if (kind == kQuestions) {
        sums.questions[stage] += value;
      } else if (value != 0) {  // see clock_after()
        sums.cycles[stage][kind] += value - last;
        last = value;
      }
    }
    sums.whole += last - first;
  }

  Device& device_;
  int grid_, num_stages_;
  std::vector<PhaseEvent> events_;
  PhaseLog log_{};
  Sums sums_[kObservers];
};
#else
template <class Device>
struct Observers {
  Observers(Device&, const PersistentPlan&, const Call&) {}
  void begin() {}
  void add() {}
  void print() const {}
};
#endif

// Launches a kernel, launch(number) each time, and prints what was found as one line of JSON.
template <class Device, class F>
int run(Device& device, const PersistentPlan& plan, const Call& call, Arrays<Device>& arrays,
        const F& launch) {
  Observers<Device> observers(device, plan, call);
  std::vector<float> us;
  for (int i = 0; i <= call.launches; ++i) {
    arrays.rewrite_products();
    observers.begin();
    const float taken = launch(i);
    if (i == 0) continue;  // it has loaded the kernel
    us.push_back(taken);
    observers.add();
  }
  std::printf("{\"grid\": %d, \"groups\": %d, \"tiles\": %d, \"depth\": %d, \"steps\": %lld, ",
              plan.grid(), plan.groups, plan.tiles, plan.depth, (long long)call.steps);
  std::printf("\"hash\": \"%016llx\", \"us\": [", (unsigned long long)arrays.hash());
  for (size_t i = 0; i < us.size(); ++i) std::printf("%s%.2f", i > 0 ? ", " : "", us[i]);
  std::printf("]");
  observers.print();
  std::printf("}\n");
  return 0;
}

inline int refuse(const std::string& why) {
  std::printf("%s\n", why.c_str());
  return 1;
}

// The kernel of forward.  The weights are not saved, and each launch has a next one.
template <class Device, class Stages>
int forward(Device& device, Stages stages, const Call& call) {
  const Cell& cell = *find_cell(call.cell);
  const PersistentPlan plan = plan_persistent(cell, call.sizes(), call.batch, call.steps,
                                              sizeof(Element), Exchange::Packets, device.gpu());
  if (!plan.is_possible()) return refuse(plan.why_not);
  Arrays<Device> arrays(device, call);
  const int64_t state = call.batch * call.hidden;
  PersistentForward<Element> args{};
  auto* const seed = static_cast<int64_t*>(device.allocate(sizeof(int64_t)));
  device.set(seed, 1, sizeof(int64_t));
  for (int s = 0; s < cell.num_stages; ++s) {
    arrays.fill(cell, s, args);
    auto& step = args.step[s];
    step.noise.seed = seed;
    if (s == recurrent_stage(cell)) {
      const int64_t blocks = traits(cell.stages[s].kind).input_blocks;
      step.input_gates = arrays.product(call.rows() * blocks * call.hidden);
      step.carry_out = arrays.template result<float>(state);
      step.carry = {step.carry_out, call.hidden, false};
    }
    if (step.is_last) {
      step.output = {arrays.template result<Element>(call.rows() * call.hidden), call.hidden, true};
      step.operand = arrays.template result<Element>(state);
    }
  }
  args.h = {arrays.template random<Element>(state), call.hidden, false};
  void* const workspace = device.allocate(size_t(plan.workspace_bytes(/*turns=*/2)));
  return run(device, plan, call, arrays, [&](int launch) {
    PersistentForward<Element> now = args;
    now.turn = {launch, /*has_next=*/true};
    prepare(plan, workspace, now,
            [&](void* at, int byte, size_t bytes) { device.set(at, byte, bytes); });
    return device.run(stages, plan, now);
  });
}

// The kernel of backward.  Pre-activations have been recomputed, and eps has no gradient.
template <class Device, class Stages>
int backward(Device& device, Stages stages, const Call& call) {
  const Cell& cell = *find_cell(call.cell);
  const PersistentPlan plan = plan_persistent_backward(
      cell, call.sizes(), call.batch, call.steps, sizeof(Element), Exchange::Packets, device.gpu());
  if (!plan.is_possible()) return refuse(plan.why_not);
  Arrays<Device> arrays(device, call);
  const int64_t state = call.batch * call.hidden, rows = call.rows();
  PersistentBackward<Element> args{};
  // Gradients that are sent in place, and then the workspace.
  int64_t sent = 0;
  for (int s = 0; s < cell.num_stages; ++s) {
    sent += rows * traits(cell.stages[s].kind).hidden_blocks * call.hidden;
  }
  auto* at = arrays.template result<Element>(sent + (plan.workspace_bytes() + 1) /
                                                        int64_t(sizeof(Element)));
  for (int s = 0; s < cell.num_stages; ++s) {
    const StageTraits facts = traits(cell.stages[s].kind);
    arrays.fill(cell, s, args);
    auto& step = args.step[s];
    step.dhidden_gates = at;
    at += rows * facts.hidden_blocks * call.hidden;
    if (facts.has_factors) {
      step.factor_blocks = 1;
      step.pre = arrays.product(rows * call.hidden);
    } else {
      step.hidden_gates = arrays.product(rows * facts.hidden_blocks * call.hidden);
    }
    if (const int64_t alone = facts.input_blocks - facts.shared_blocks; alone > 0) {
      step.input_gates = arrays.product(rows * alone * call.hidden);
      step.dinput_gates = arrays.template result<Element>(rows * alone * call.hidden);
    }
    if (step.is_last) {
      step.dout = arrays.template result<float>(state);
      step.grad_output = {arrays.template random<Element>(rows * call.hidden), call.hidden, true};
    }
    if (facts.has_cell_state) {
      step.dcarry = arrays.template result<float>(state);
      args.first_cell_state = arrays.template random<float>(state);
      args.cell_states = arrays.template result<float>(rows * call.hidden);
    } else if (facts.has_carry) {
      step.carry = {arrays.template random<Element>(rows * call.hidden), call.hidden, true};
    }
  }
  args.wants_dh = true;
  return run(device, plan, call, arrays, [&](int) {
    PersistentBackward<Element> now = args;
    prepare(plan, at, now, [&](void* to, int byte, size_t bytes) { device.set(to, byte, bytes); });
    return device.run(stages, plan, now);
  });
}

}  // namespace fusedrnn::phases
