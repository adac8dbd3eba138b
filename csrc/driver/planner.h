// Plans how a layer works through its sequence: the steps of a chunk, the way of each pass and why,
// and the memory that this takes.
#pragma once
#include <algorithm>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>

#include "../persistent/backward_plan.h"
#include "memory_model.h"
#include "remembered.h"
#include "time_model.h"

namespace fusedrnn {

inline PassPlan plan_pass(Pass pass, const Problem& problem, int64_t element_bytes, int64_t steps) {
  PassPlan plan;
  if (problem.gpu == nullptr) {
    plan.persistent.why_not = "There are persistent kernels for GPUs only.";
    return plan;
  }
  const auto make = pass == Pass::Forward ? cuda::plan_persistent : cuda::plan_persistent_backward;
  plan.persistent =
      make(problem.cell, problem.sizes, std::max<int64_t>(problem.batch, 1), steps, element_bytes,
           problem.exchange, *problem.gpu, problem.tf32, problem.free_multiprocessors);
  const std::string& refusal = problem.refusal[int(pass)];
  plan.is_refused = plan.persistent.is_possible() && !refusal.empty();
  if (plan.is_refused) plan.persistent.why_not = refusal;
  plan.is_persistent =
      problem.backend != "stepwise" && plan.persistent.is_possible() &&
      (problem.backend == "persistent" ||
       persistent_us(pass, problem.cell, plan.persistent) < launched_us(pass, problem.cell));
  // A second stream is used if at least one multiprocessor in four is free.
  constexpr int kFree = 4;
  plan.overlaps = problem.overlap && plan.is_persistent &&
                  kFree * (problem.gpu->multiprocessors - plan.persistent.grid()) >=
                      problem.gpu->multiprocessors;
  return plan;
}

// Why the GPU's driver does not run a persistent kernel; empty if it does or cannot be asked.
// Other work on the GPU, or a limit on the part of it that a process gets, may leave no room for
// all blocks at once.
template <class T>
std::string objection(Pass pass, const Gpu& gpu, const PassPlan& plan) {
  if (!plan.is_persistent || gpu.most_blocks == nullptr) return "";
  const auto kernel = cuda::kernel_of<T>(plan.persistent, pass == Pass::Backward, gpu.device);
  const int64_t most = gpu.most_blocks(&kernel);
  if (most >= plan.persistent.grid()) return "";
  const std::string all = "all " + std::to_string(plan.persistent.grid()) + " blocks";
  if (most == cuda::kRefused) {
    return "The GPU's driver has refused to run " + all + " of the kernel at once.";
  }
  return "The kernel needs " + all + " at once, and the GPU's driver runs " + std::to_string(most) +
         ".";
}

// The reason, a sentence, why a pass is persistent or stepwise.
inline std::string reason(const Problem& problem, const Plan& layer, const PassPlan& plan) {
  const cuda::PersistentPlan& persistent = plan.persistent;
  if (problem.backend == "stepwise") return "backend says so.";
  if (!persistent.is_possible()) return persistent.why_not;
  if (problem.backend == "persistent") return "backend says so.";
  if (layer.lacks_room) return "A persistent kernel takes more memory than workspace_bytes.";
  const std::string blocks = std::to_string(persistent.blocks) + " multiprocessors";
  const std::string copies =
      persistent.groups == 1
          ? "the weights fit into the registers of " + blocks
          : std::to_string(persistent.groups) + " copies of the weights, " + blocks + " each";
  return plan.is_persistent ? "Runs as one persistent kernel: " + copies + "."
                            : "Launched kernels are faster than a persistent one with " +
                                  std::to_string(persistent.tiles) +
                                  " tiles of rows for each copy of the weights.";
}

// The reason for forward's way, and if only backward is stepwise, another sentence with the reason
// for that.
inline std::string reason(const Problem& problem, const Plan& plan) {
  const std::string of_forward = reason(problem, plan, plan.forward);
  if (!plan.forward.is_persistent || plan.backward.is_persistent) return of_forward;
  return of_forward + " Backward is stepwise: " + reason(problem, plan, plan.backward);
}

inline Plan plan_steps(const Problem& problem, int64_t element_bytes, int64_t steps) {
  return {steps, plan_pass(Pass::Forward, problem, element_bytes, steps),
          plan_pass(Pass::Backward, problem, element_bytes, steps)};
}

// An upper bound of the workspace of both passes in chunks of `steps` or more steps.
template <class Memory>
class WorkspaceBound {
 public:
  WorkspaceBound(const Problem& problem, int64_t steps, bool for_any = true)
      : problem_(problem), plan_(plan_steps(problem, kElementBytes, steps)),
        count_(problem, for_any) {}

  WorkspaceBytes operator()(int64_t steps) {
    plan_.steps = steps;
    // A chunk may have too many steps for a persistent kernel to count.  Such a chunk is excluded
    // by a size beyond every limit: it must not make the pass stepwise.
    constexpr int64_t kNoLimit = INT64_MAX / 4;
    const bool same = stays(Pass::Forward, plan_.forward) & stays(Pass::Backward, plan_.backward);
    return same ? count_(plan_) : WorkspaceBytes{kNoLimit, kNoLimit};
  }

 private:
  static constexpr int64_t kElementBytes = sizeof(typename Memory::T);

  // Whether a pass that is persistent in single steps still is in chunks of plan_.steps.
  bool stays(Pass pass, PassPlan& plan) const {
    if (!plan.is_persistent) return true;
    plan = plan_pass(pass, problem_, kElementBytes, plan_.steps);
    return std::exchange(plan.is_persistent, true);
  }

  const Problem& problem_;
  Plan plan_;
  WorkspaceCount<Memory> count_;
};

// Divides a sequence into chunks of equal length, except a last one that may be shorter.  On a GPU
// the rows of a chunk are a multiple of 128, which GEMMs like best, if that takes no more chunks.
// The number of chunks determines their length, so that backward gets the length from the number of
// states that forward saved: if it planned anew, the result could differ, because a plan depends on
// strides and on whether TF32 is allowed.
class Chunks {
 public:
  Chunks(int64_t seq_len, int64_t batch, bool on_gpu)
      : seq_len_(seq_len), alike_(on_gpu ? kRows / std::gcd(batch, kRows) : 1) {}

  int64_t steps_of(int64_t count) const {
    const int64_t least = (seq_len_ + count - 1) / count;
    return count_of(up(least)) == count ? std::min(up(least), seq_len_) : least;
  }
  // The length of chunks of at most `most` steps, as few chunks as possible.  Rows are a multiple
  // of 128 if that makes chunks at most an eighth shorter.
  int64_t within(int64_t most) const {
    if (most >= seq_len_) return seq_len_;
    const int64_t down = most / alike_ * alike_;
    int64_t count = count_of(8 * down >= 7 * most ? down : most);
    // Not every number of chunks is possible with chunks of equal length.
    while (steps_of(count) > most || count_of(steps_of(count)) != count) ++count;
    return steps_of(count);
  }
  // The length of chunks of at least `least` steps whose rows are a multiple of 128.
  int64_t at_least(int64_t least) const {
    const int64_t count = std::max<int64_t>(seq_len_ / least, 1);
    const int64_t steps = up((seq_len_ + count - 1) / count);
    return steps >= seq_len_ ? seq_len_ : steps_of(count_of(steps));
  }

 private:
  static constexpr int64_t kRows = 128;
  // Rounds up to a multiple of alike_.
  int64_t up(int64_t steps) const { return (steps + alike_ - 1) / alike_ * alike_; }
  int64_t count_of(int64_t steps) const { return (seq_len_ + steps - 1) / steps; }

  int64_t seq_len_,
      alike_;  // alike_: the fewest steps whose rows are a multiple of 128; 1 on the CPU
};

// The upper bound of the memory of training when the caller gives neither chunk_size nor
// workspace_bytes: half of what torch.nn.LSTM takes, up to 256 MiB, or a quarter of it if that is
// more.
struct TrainingLimit {
  int64_t bytes;
  const char* why;

  explicit TrainingLimit(int64_t lstm_bytes) {
    constexpr int64_t kMuch = 256 << 20;
    const int64_t quarter = lstm_bytes / 4, half = lstm_bytes / 2;
    bytes = std::max(quarter, std::min(half, kMuch));
    why = bytes == half    ? "The most that fit into half of torch.nn.LSTM's training memory."
          : bytes == kMuch ? "The most that fit into 256 MiB of training memory."
                           : "The most that fit into a quarter of torch.nn.LSTM's training memory.";
  }
};

// The fewest steps of a chunk on a GPU, regardless of memory.
inline int64_t least_steps(int64_t batch) {
  constexpr int64_t kRows = 256, kSteps = 8, kMostRows = 1024;
  return std::max((kRows + batch - 1) / batch, std::min(kSteps, (kMostRows + batch - 1) / batch));
}

template <class Memory>
Plan plan_by_sizes(const Problem& problem);

// The plan when problem.workspace_bytes is below `needed`, the workspace of a single step: stepwise
// kernels, if a single step of those takes less than `needed`; otherwise an error.
template <class Memory>
Plan plan_without_room(const Problem& problem, int64_t needed) {
  Problem stepwise = problem;
  stepwise.backend = "stepwise";
  if (problem.backend == "auto" && WorkspaceBound<Memory>(stepwise, 1)(1).most() < needed) {
    Plan plan = plan_by_sizes<Memory>(stepwise);
    plan.lacks_room = true;
    return plan;
  }
  std::string refusals;
  for (const std::string& refusal : problem.refusal) {
    if (!refusal.empty()) refusals = ". " + refusal;
  }
  fail("workspace_bytes must be at least ", needed, " for a layer with an input of (",
       std::max<int64_t>(problem.seq_len, 1), ", ", problem.batch, ", ", problem.sizes.input,
       "), got ", problem.workspace_bytes, refusals);
}

// Chunks have the length that the caller asks for; or they are as long as possible with both passes
// within problem.workspace_bytes, whatever tensors a call has.  If the caller gives neither: on a
// GPU they are the shortest whose fixed costs are small by the model, within the TrainingLimit; on
// the CPU they have 256 rows, because longer chunks make GEMMs no faster, while the workspace grows
// with every row and no longer fits into the cache.
template <class Memory>
Plan plan_by_sizes(const Problem& problem) {
  using T = typename Memory::T;
  check_sizes(problem.cell, problem.sizes, problem.seq_len, problem.batch);
  const int64_t seq_len = std::max<int64_t>(problem.seq_len, 1);
  const int64_t batch = std::max<int64_t>(problem.batch, 1);
  const Chunks chunks(seq_len, batch, problem.gpu != nullptr);
  const auto of_steps = [&](int64_t steps, const char* why) {
    Plan plan = plan_steps(problem, sizeof(T), steps);
    plan.why_steps = steps == seq_len ? "The whole sequence." : why;
    return plan;
  };
  if (problem.chunk_size > 0) {
    return of_steps(std::min(problem.chunk_size, seq_len), "chunk_size says so.");
  }
  const bool is_limited = problem.workspace_bytes > 0 && problem.batch > 0;
  if (!is_limited && problem.gpu == nullptr) {
    constexpr int64_t kRows = 256;
    return of_steps(std::min((kRows + batch - 1) / batch, seq_len),
                    "At least 256 rows (steps x batch); longer chunks are not faster on a CPU.");
  }
  // More steps take more workspace.  The exception is a single chunk, which needs no second buffer,
  // so `most` may fit where fewer steps do not.
  const auto longest = [&](int64_t least, int64_t most, const auto& fits) {
    if (fits(most)) return most;
    while (least < most) {
      const int64_t middle = least + (most - least) / 2;
      if (fits(middle + 1)) {
        least = middle + 1;
      } else {
        most = middle;
      }
    }
    return least;
  };
  if (is_limited) {
    const int64_t limit = problem.workspace_bytes;
    WorkspaceBound<Memory> bound(problem, 1);
    const auto fits = [&](int64_t steps) { return bound(steps).most() <= limit; };
    if (problem.chunks > 0) {
      const int64_t steps = chunks.steps_of(problem.chunks);
      Problem stepwise = problem;
      if (problem.backend == "auto" && !fits(steps)) stepwise.backend = "stepwise";
      return plan_steps(stepwise, sizeof(T), steps);
    }
    if (!fits(1)) return plan_without_room<Memory>(problem, bound(1).most());
    return of_steps(chunks.within(longest(1, seq_len, fits)),
                    "The most that fit into workspace_bytes.");
  }

  if (problem.chunks > 0) return plan_steps(problem, sizeof(T), chunks.steps_of(problem.chunks));

  const Plan of_one = plan_steps(problem, sizeof(T), 1);
  const auto costs_too_much = [&](int64_t steps) {
    return !costs_little(problem, of_one, sizeof(T), steps);
  };
  const int64_t wanted =
      costs_too_much(seq_len) ? seq_len : longest(0, seq_len - 1, costs_too_much) + 1;
  const int64_t most = chunks.at_least(wanted);
  const TrainingLimit limit(lstm_training_bytes<T>(problem));
  WorkspaceBound<Memory> bound(problem, 1, /*for_any=*/false);
  const auto training = [&](int64_t steps) {
    return training_bytes<T>(problem, steps, bound(steps));
  };
  const auto takes_at_most = [&](int64_t bytes) {
    return [&training, bytes](int64_t steps) { return training(steps) <= bytes; };
  };
  // One more step means fewer states to save.  Up to some length, that saves more memory than the
  // workspace grows by.
  const auto saves_memory = [&](int64_t steps) {
    const double saved = double(saved_bytes(problem, 1, sizeof(Acc<T>), true));
    const auto grown = double(bound(steps + 1).backward - bound(steps).backward);
    return grown < saved / (double(steps) * double(steps + 1));
  };
  int64_t least = std::min(least_steps(batch), most);
  if (least < most && saves_memory(least)) least = longest(least, most - 1, saves_memory) + 1;
  int64_t steps = longest(least, most, takes_at_most(limit.bytes));
  if (training(steps) > limit.bytes) {
    // The gradients of the weights alone may exceed the limit.  Up to their size, more steps do not
    // raise the peak.
    steps = longest(least, most, takes_at_most(training(least)));
    return of_steps(chunks.within(steps),
                    "The most that take no more memory than the shortest chunks.");
  }
  if (steps < most) return of_steps(chunks.within(steps), limit.why);
  return of_steps(most,
                  "Long enough that a chunk's fixed cost is at most 3% of the time of its steps.");
}

// The same, but the GPU's driver is asked in each call whether it runs the planned kernels; the
// plan itself may be remembered.  The driver's answer does not change the length of chunks: a graph
// that was compiled before a kernel was refused has the number of chunks in its shapes.  The
// exception is a layer limited by workspace_bytes, unless forward has already saved the states of
// its chunks.
template <class Memory>
Plan plan_layer(const Problem& problem) {
  using T = typename Memory::T;
  if (problem.gpu == nullptr) return plan_by_sizes<Memory>(problem);
  static thread_local RememberedPlans known;
  const Plan plan = known(problem, plan_by_sizes<Memory>);
  const std::string of_forward = objection<T>(Pass::Forward, *problem.gpu, plan.forward);
  const std::string of_backward = objection<T>(Pass::Backward, *problem.gpu, plan.backward);
  if (of_forward.empty() && of_backward.empty()) return plan;
  Problem refused = problem;
  refused.refusal[0] = of_forward;
  refused.refusal[1] = of_backward;
  const Plan as_long = plan_steps(refused, sizeof(T), plan.steps);
  const bool is_error = problem.backend == "persistent" && as_long.forward.is_refused;
  const bool is_limited = problem.workspace_bytes > 0 && problem.batch > 0 && problem.chunks == 0;
  if (is_error || !is_limited ||
      WorkspaceCount<Memory>(problem, true)(as_long).most() <= problem.workspace_bytes) {
    return as_long;
  }
  return plan_by_sizes<Memory>(refused);
}

}  // namespace fusedrnn
