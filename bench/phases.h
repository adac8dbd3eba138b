// One persistent kernel by itself, over a chunk of random numbers that it gets as the driver would
// give it a chunk of training in bfloat16: on a GPU (phases.cu), or on the emulation
// (tests/emulator/phases.cpp).  With FUSEDRNN_PHASE_CLOCKS it also says where the cycles go.
//
// A Device has
//   gpu(): what plans need to know of it
//   allocate(bytes), set(memory, byte, bytes), write(memory, from, bytes), read(to, memory, bytes)
//   rewrite(memory, count): reads floats and writes them again, as the product before the kernel
//       would leave them in the caches
//   run<kVariant>(stages, plan, args): launches a kernel and waits; returns microseconds
//   set_log(log): sets phase_log, if there are clocks
#pragma once
#include <cstdio>
#include <string>
#include <vector>

#include "../csrc/persistent/backward.h"
#include "../csrc/persistent/backward_plan.h"
#include "../csrc/persistent/forward.h"
#include "../csrc/persistent/plan.h"
#include "phase_arrays.h"

namespace fusedrnn::phases {

// A variant for the benchmark alone: what most calls do not have is not there for the compiler
// either.  A kernel of the package asks for each of these in every step.
constexpr unsigned kPlain = 16;

template <class T>
FUSEDRNN_HD void leave_out_noise(ForwardStep<T, T>& step) {
  step.noise.eps.data = nullptr;
}
template <class T>
FUSEDRNN_HD void leave_out_noise(BackwardStep<T, T>&) {}
// Arguments that have no mask and no zoneout, whose noise is drawn, and whose exchange is by
// packets, as those of phases.h are anyway.
template <class Args>
FUSEDRNN_HD Args plain(const Args& args) {
  Args known = args;
  known.exchange = Exchange::Packets;
  FUSEDRNN_UNROLL
  for (int s = 0; s < kMostStages; ++s) {
    auto& step = known.step[s];
    step.mask.lengths = nullptr;
    step.mask.reset = nullptr;
    step.zoneout.h = step.zoneout.cell_state = {};
    leave_out_noise(step);
  }
  return known;
}

// The kernel in a variant.
template <unsigned kVariant, int kDepth, class Stages>
FUSEDRNN_DEVICE void run_variant(Stages stages, const PersistentForward<Element>& args,
                                 unsigned char* shared) {
  if constexpr ((kVariant & kPlain) != 0) {
    persistent_forward<Element, kDepth>(stages, plain(args), shared);
  } else {
    persistent_forward<Element, kDepth>(stages, args, shared);
  }
}
template <unsigned kVariant, int kDepth, class Stages>
FUSEDRNN_DEVICE void run_variant(Stages stages, const PersistentBackward<Element>& args,
                                 unsigned char* shared) {
  if constexpr ((kVariant & kPlain) != 0) {
    persistent_backward<Element, kDepth, kVariant>(stages, plain(args), shared);
  } else {
    persistent_backward<Element, kDepth, kVariant>(stages, args, shared);
  }
}
// Its plan: in backward each stage may have a ring.
template <unsigned kVariant>
PersistentPlan plan_of(PersistentPlan plan) {
  const int rings = (kVariant & kRing) != 0 ? plan.num_stages : 0;
  plan.shared_bytes += rings * ring_floats(kMostRingWords) * int64_t(sizeof(float));
  return plan;
}

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

inline void print(const char* name, const std::vector<float>& us) {
  std::printf("\"%s\": [", name);
  for (size_t i = 0; i < us.size(); ++i) std::printf("%s%.2f", i > 0 ? ", " : "", us[i]);
  std::printf("]");
}
inline void print(const PersistentPlan& plan, const Call& call) {
  std::printf("{\"grid\": %d, \"groups\": %d, \"tiles\": %d, \"depth\": %d, \"steps\": %lld, ",
              plan.grid(), plan.groups, plan.tiles, plan.depth, (long long)call.steps);
}
template <unsigned kVariant>
using VariantTag = std::integral_constant<unsigned, kVariant>;

#if defined(FUSEDRNN_PHASES_VARIANTS)
// Launches a variant, and prints its times and the hash of its results.
template <unsigned kVariant, class Device, class F>
void run(const char* name, int& launched, const Call& call, Arrays<Device>& arrays,
         const F& launch) {
  std::vector<float> us;
  arrays.restore_results();
  for (int i = 0; i <= call.launches; ++i) {
    arrays.rewrite_products();
    const float taken = launch(VariantTag<kVariant>{}, launched++);
    if (i > 0) us.push_back(taken);  // the first has loaded the kernel
  }
  std::printf("{\"name\": \"%s\", \"hash\": \"%016llx\", ", name,
              (unsigned long long)arrays.hash());
  print("us", us);
  std::printf("}");
}
// All variants one after the other, twice, as one line of JSON.
template <bool kIsBackward, class Device, class F>
int run(Device&, const PersistentPlan& plan, const Call& call, Arrays<Device>& arrays,
        const F& launch) {
  print(plan, call);
  std::printf("\"variants\": [");
  int launched = 0;
  for (int round = 0; round < 2; ++round) {
    const auto of = [&](auto variant, const char* name) {
      if (launched > 0) std::printf(", ");
      run<variant.value>(name, launched, call, arrays, launch);
    };
    of(VariantTag<kAsInPackage>{}, "package");
    of(VariantTag<kPlain>{}, "plain");
    if constexpr (kIsBackward) {
      of(VariantTag<kRing>{}, "ring");
      of(VariantTag<kPlain | kRing>{}, "plain, ring");
    }
  }
  std::printf("]}\n");
  return 0;
}
#else
// Launches a kernel, launch(variant, number) each time, and prints what was found as one line of
// JSON.
template <bool kIsBackward, class Device, class F>
int run(Device& device, const PersistentPlan& plan, const Call& call, Arrays<Device>& arrays,
        const F& launch) {
  Observers<Device> observers(device, plan, call);
  std::vector<float> us;
  for (int i = 0; i <= call.launches; ++i) {
    arrays.rewrite_products();
    observers.begin();
    const float taken = launch(VariantTag<kAsInPackage>{}, i);
    if (i == 0) continue;  // it has loaded the kernel
    us.push_back(taken);
    observers.add();
  }
  print(plan, call);
  std::printf("\"hash\": \"%016llx\", ", (unsigned long long)arrays.hash());
  print("us", us);
  observers.print();
  std::printf("}\n");
  return 0;
}
#endif

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
  return run</*kIsBackward=*/false>(device, plan, call, arrays, [&](auto variant, int launch) {
    PersistentForward<Element> now = args;
    now.turn = {launch, /*has_next=*/true};
    prepare(plan, workspace, now,
            [&](void* at, int byte, size_t bytes) { device.set(at, byte, bytes); });
    return device.template run<variant.value>(stages, plan_of<variant.value>(plan), now);
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
  const int64_t in_packet = kPacketBytes / int64_t(sizeof(Element));
  const int64_t padding = -sent & (in_packet - 1);  // only where gradients are not sent in place
  const int64_t workspace = (plan.workspace_bytes() + 1) / int64_t(sizeof(Element));
  auto* at = arrays.template result<Element>(sent + padding + workspace);
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
  at += padding;
  args.wants_dh = true;
  return run</*kIsBackward=*/true>(device, plan, call, arrays, [&](auto variant, int) {
    PersistentBackward<Element> now = args;
    prepare(plan, at, now, [&](void* to, int byte, size_t bytes) { device.set(to, byte, bytes); });
    return device.template run<variant.value>(stages, plan_of<variant.value>(plan), now);
  });
}

}  // namespace fusedrnn::phases
