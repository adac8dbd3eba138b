// How a layer goes through its steps: how many at once, each pass in which way and why, in how much
// memory, and how long that takes by a model.
#pragma once
#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "cuda/persistent_backward_plan.h"
#include "plan.h"
#include "workspace.h"

namespace fusedrnn {

inline constexpr const char* kBackends[] = {"auto", "stepwise", "persistent"};

enum class Pass { Forward, Backward };

// What all of that follows from.
struct Problem {
  Cell cell{};
  Sizes sizes{};
  bool bias = true;
  int64_t seq_len = 1, batch = 1;
  int64_t chunk_size = 0;       // steps, and
  int64_t workspace_bytes = 0;  // the most that a pass may take: as the caller wants it, or 0
  int64_t chunks = 0;           // as many as forward has saved states, or 0
  std::string backend;          // of kBackends
  cuda::Exchange exchange{};
  bool overlap = false;              // whether there may be a second stream
  int64_t free_multiprocessors = 0;  // that persistent kernels leave to others
  const Gpu* gpu = nullptr;          // null for the CPU
  bool tf32 = false;                 // whether products of float32 may be rounded to TF32, now
  // Why the GPU's driver does not run the persistent kernel of a Pass, a sentence, or empty.
  std::string refusal[2];
  // Whether a GEMM can read a weight where it lies, in each direction.
  bool is_operand[kMaxProjections] = {true, true, true};

  void see_weight(const Parameter& p, int64_t row_stride, int64_t column_stride) {
    const Matrix<const char> weight{nullptr, p.rows, p.columns, row_stride, column_stride};
    is_operand[p.projection] = is_operand[p.projection] && weight.is_operand();
  }
};

inline void check_rows(int64_t seq_len, int64_t batch) {
  FUSEDRNN_CHECK(seq_len >= 0 && batch >= 0 &&
                     times(std::max<int64_t>(seq_len, 1), std::max<int64_t>(batch, 1)) <= kMostRows,
                 "seq_len * batch must be below 2^32, got ", seq_len, " and ", batch);
}

// Whether a problem has a size: whatever is counted below then stays far from the end of int64.
inline void check_sizes(const Cell& cell, const Sizes& sizes, int64_t seq_len, int64_t batch) {
  check_rows(seq_len, batch);
  int64_t features = 0;
  for (int p = 0; p < cell.num_projections; ++p) {
    for (const Width width : {cell.projections[p].from, cell.projections[p].to}) {
      FUSEDRNN_CHECK(sizes[width] > 0, "a layer must have features, got sizes of ", sizes.input,
                     " (input), ", sizes.hidden, " (hidden), ", sizes.output, " (output)");
      features = plus(features, sizes[width]);
    }
  }
  const int64_t rows =
      plus(times(std::max<int64_t>(seq_len, 1), std::max<int64_t>(batch, 1)), features);
  FUSEDRNN_CHECK(times(rows, features) <= kMostNumbers,
                 "sizes are too large: a layer may have 2^50 numbers, got ", seq_len, " steps of ",
                 batch, " rows, and sizes of ", sizes.input, " (input), ", sizes.hidden,
                 " (hidden), ", sizes.output, " (output)");
}

// Of a pass.
struct Plan {
  bool is_persistent = false;
  cuda::PersistentPlan persistent;  // also of the way that is not gone
  bool is_refused = false;          // by the driver of the GPU: it would be persistent
  bool overlaps = false;  // if there are several chunks, a second stream works beside the kernel
};

// Of both.
struct LayerPlan {
  int64_t steps = 1;  // of a chunk
  Plan forward, backward;
  bool lacks_room = false;  // for persistent kernels
};

// Microseconds that a stage of a step takes: of the model in docs/performance.md, not measured yet.
// A persistent kernel's grow with the columns and with the rows of a group, and backward with the
// gates, all of whose gradients are exchanged.  A launched one's hardly grow.
constexpr double kExchangeUs = 0.6, kTileUs = 0.1, kLaunchedUs = 4.0;
// And what a GEMM over a whole chunk takes besides its arithmetic.
constexpr double kGemmUs = 4.0;

// Of all stages of a step.
inline double persistent_us(Pass pass, const cuda::PersistentPlan& plan) {
  double us = 0;
  for (int s = 0; s < plan.num_stages; ++s) {
    const int gates = pass == Pass::Forward ? 1 : traits(plan.stages[s]).projection_blocks;
    us += kExchangeUs + kTileUs * gates * plan.depth * plan.tiles;
  }
  return us;
}
inline double step_us(Pass pass, const Problem& problem, const Plan& plan) {
  if (problem.gpu == nullptr) return 0;
  return plan.is_persistent ? persistent_us(pass, plan.persistent)
                            : kLaunchedUs * problem.cell.num_stages;
}

inline Plan plan_pass(Pass pass, const Problem& problem, int64_t element_bytes, int64_t steps) {
  Plan plan;
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
  plan.is_persistent = problem.backend != "stepwise" && plan.persistent.is_possible() &&
                       (problem.backend == "persistent" ||
                        persistent_us(pass, plan.persistent) < step_us(pass, problem, {}));
  // One multiprocessor in so many is to be free for that.
  constexpr int kFree = 4;
  plan.overlaps = problem.overlap && plan.is_persistent &&
                  kFree * (problem.gpu->multiprocessors - plan.persistent.grid()) >=
                      problem.gpu->multiprocessors;
  return plan;
}

// What the driver of the GPU, if it is there, objects to a persistent kernel; empty if nothing.
// What else runs on the GPU, or the part of it that a process has, may leave no room for all blocks
// at once.
template <class T>
std::string objection(Pass pass, const Gpu& gpu, const Plan& plan) {
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

// Why a pass is what it is, in a sentence.
inline std::string reason(const Problem& problem, const LayerPlan& layer, const Plan& plan) {
  const cuda::PersistentPlan& persistent = plan.persistent;
  if (problem.backend == "stepwise") return "It was asked for.";
  if (!persistent.is_possible()) return persistent.why_not;
  if (problem.backend == "persistent") return "It was asked for.";
  if (layer.lacks_room) return "A persistent kernel takes more memory than workspace_bytes.";
  const std::string copies =
      persistent.groups == 1 ? "" : ", " + std::to_string(persistent.groups) + " times";
  return plan.is_persistent
             ? "The weights fit into the registers of " + std::to_string(persistent.blocks) +
                   " multiprocessors" + copies + "."
             : "Launched kernels are faster than a persistent one with " +
                   std::to_string(persistent.tiles) +
                   " tiles of rows for each copy of the weights.";
}

// Why forward is what it is, and in another sentence why backward is not, if it is stepwise.
inline std::string reason(const Problem& problem, const LayerPlan& plan) {
  const std::string of_forward = reason(problem, plan, plan.forward);
  if (!plan.forward.is_persistent || plan.backward.is_persistent) return of_forward;
  return of_forward + " Backward is stepwise: " + reason(problem, plan, plan.backward);
}

struct WorkspaceBytes {
  int64_t forward, backward;
  int64_t most() const { return std::max(forward, backward); }
};

// Counts the workspace of one direction.  Memory: the backend's types and sizes, cpu/memory.h or
// cuda/memory.h.
template <class Memory>
class WorkspaceCount {
 public:
  // All gradients wanted, and tensors as they come from torch; or, if for_any, whatever a call can
  // have: lengths, resets, and input, eps and the output's gradient packed, or in strides that must
  // be copied.
  WorkspaceCount(const Problem& problem, bool for_any) {
    static T there{};  // nothing is read
    static A sum{};
    static const int64_t length{}, start{};
    static const bool reset{};
    const auto sequence = [&](int64_t width) -> Sequence<const T> {
      if (for_any) return {&there, width, 0, 0, 0, &start};
      return {&there, width, problem.batch * width, width, 1};
    };
    const Cell& cell = problem.cell;
    layer_.cell = cell;
    layer_.sizes = problem.sizes;
    layer_.seq_len = problem.seq_len;
    layer_.batch = problem.batch;
    layer_.input = sequence(problem.sizes.input);
    if (for_any) {
      const bool has_noise = std::any_of(cell.stages, cell.stages + cell.num_stages,
                                         [](auto& s) { return s.kind == StageKind::Sample; });
      if (has_noise) layer_.eps = sequence(problem.sizes.latent);
      layer_.mask = {&length, &reset, problem.seq_len, problem.batch, 1};
      layer_.dropout = 0.5;
    }
    for (int p = 0; p < cell.num_projections; ++p) {
      const Projection& projection = cell.projections[p];
      const int64_t rows = projection.blocks * problem.sizes[projection.to];
      const int64_t columns = problem.sizes[projection.from];
      layer_.weight[p] = Matrix<const T>::contiguous(&there, rows, columns);
      if (!problem.is_operand[p]) layer_.weight[p].row_stride = layer_.weight[p].column_stride = 0;
      gradients_.weight[p] = &sum;
      if (!problem.bias || !projection.has_bias) continue;
      layer_.bias[p] = {&there, 1, rows, rows, for_any ? 0 : 1};
      gradients_.bias[p] = &sum;
    }
    gradients_.output = sequence(problem.sizes.output);
    gradients_.h_n = gradients_.c_n = &there;
    gradients_.input = gradients_.hx = gradients_.cx = gradients_.eps = &there;
  }

  WorkspaceBytes operator()(const LayerPlan& plan) {
    layer_.chunk = plan.steps;
    Arena forward, backward;
    go(plan.forward);
    typename Workspace<Memory>::Forward(layer_, forward);
    go(plan.backward);
    typename Workspace<Memory>::Backward(layer_, gradients_, backward);
    return {forward.size_bytes(), backward.size_bytes()};
  }

 private:
  using T = typename Memory::T;
  using A = Acc<T>;

  void go(const Plan& plan) {
    layer_.is_persistent = plan.is_persistent;
    if (plan.is_persistent) layer_.persistent = plan.persistent;
    layer_.overlaps = plan.overlaps && layer_.chunks() > 1;
  }

  Layer<T> layer_{};
  Gradients<T> gradients_{};
};

// What waits for backward beside input, weights and output, of one direction: the states before
// each chunk, and without recompute the pre-activations.
inline int64_t saved_bytes(const Problem& problem, int64_t steps, int64_t sum_bytes,
                           bool recompute) {
  const int64_t chunks = (problem.seq_len + steps - 1) / steps;
  const int64_t states = has_state(problem.cell) ? chunks * problem.sizes.hidden : 0;
  const int64_t kept = recompute ? 0 : problem.seq_len * kept_columns(problem.cell, problem.sizes);
  return sum_bytes * problem.batch * (states + kept);
}

// What a training step holds at its peak, of one direction, beside weights, input and the output's
// gradient: the output, what is saved besides, the gradients of the weights as they are summed up,
// and the workspace, or after it these gradients rounded.
template <class T>
int64_t training_bytes(const Problem& problem, int64_t steps, int64_t workspace_bytes) {
  int64_t weights = 0;
  for (int p = 0; p < problem.cell.num_projections; ++p) {
    const Projection& projection = problem.cell.projections[p];
    const bool has_bias = problem.bias && projection.has_bias;
    weights += projection.blocks * problem.sizes[projection.to] *
               (problem.sizes[projection.from] + (has_bias ? 1 : 0));
  }
  const int64_t output = problem.seq_len * problem.batch * problem.sizes.output;
  const int64_t rounded = std::is_same_v<T, Acc<T>> ? 0 : weights;
  return output * int64_t(sizeof(T)) + saved_bytes(problem, steps, sizeof(Acc<T>), true) +
         weights * int64_t(sizeof(Acc<T>)) +
         std::max(workspace_bytes, rounded * int64_t(sizeof(T)));
}

// The same of torch.nn.LSTM of these sizes on a GPU, by count, at least: of each step and row the
// output, four gates, the cell state, and the gradient of the input, which torch computes whether
// it is wanted or not; and the gradients of the weights.
template <class T>
int64_t lstm_training_bytes(const Problem& problem) {
  const int64_t size = problem.sizes.hidden, input = problem.sizes.input;
  return int64_t(sizeof(T)) * (problem.seq_len * problem.batch * (6 * size + input) +
                               4 * size * (input + size + (problem.bias ? 2 : 0)));
}

inline LayerPlan plan_steps(const Problem& problem, int64_t element_bytes, int64_t steps) {
  return {steps, plan_pass(Pass::Forward, problem, element_bytes, steps),
          plan_pass(Pass::Backward, problem, element_bytes, steps)};
}

// Counts the most that a pass can take, in chunks of `steps` and longer ones.
template <class Memory>
class WorkspaceBound {
 public:
  WorkspaceBound(const Problem& problem, int64_t steps, bool for_any = true)
      : problem_(problem), plan_(plan_steps(problem, kElementBytes, steps)),
        count_(problem, for_any) {}

  int64_t operator()(int64_t steps) {
    plan_.steps = steps;
    // A persistent kernel may find the steps too many to count them.  That is no reason to go
    // without it, so there is no limit that they stay within.
    const bool same = stays(Pass::Forward, plan_.forward) & stays(Pass::Backward, plan_.backward);
    return same ? count_(plan_).most() : INT64_MAX;
  }

 private:
  static constexpr int64_t kElementBytes = sizeof(typename Memory::T);

  // Whether it is the same way with plan_.steps; single steps are.
  bool stays(Pass pass, Plan& plan) const {
    if (!plan.is_persistent) return true;
    plan = plan_pass(pass, problem_, kElementBytes, plan_.steps);
    return std::exchange(plan.is_persistent, true);
  }

  const Problem& problem_;
  LayerPlan plan_;
  WorkspaceCount<Memory> count_;
};

// The fewest chunks, of about the same length, for which either pass stays within
// problem.workspace_bytes whatever tensors a call has; without these, problem.chunk_size or
// ChunkRows.
//
// Their number tells their length, so that backward gets it from the states that forward saved:
// what it would find by itself depends on strides, and on whether TF32 is allowed.
template <class Memory>
LayerPlan plan_by_sizes(const Problem& problem) {
  using T = typename Memory::T;
  check_sizes(problem.cell, problem.sizes, problem.seq_len, problem.batch);
  const int64_t seq_len = std::max<int64_t>(problem.seq_len, 1);
  const int64_t batch = std::max<int64_t>(problem.batch, 1);
  const bool is_limited = problem.workspace_bytes > 0 && problem.batch > 0;
  int64_t least = 1, most = seq_len, limit = problem.workspace_bytes;
  if (problem.chunk_size > 0) {
    least = most = problem.chunk_size;
  } else if (!is_limited) {
    const ChunkRows& rows = problem.gpu == nullptr ? kCpuRows : kGpuRows;
    least = rows.least_of(batch);
    most = std::max(least, rows.most / batch);
    limit = lstm_training_bytes<T>(problem) / 4;
  }
  least = std::min(least, seq_len);
  most = std::min(most, seq_len);
  const auto steps_of = [&](int64_t chunks) {
    return std::max(least, (seq_len + chunks - 1) / chunks);
  };
  if (problem.chunks > 0) least = most = steps_of(problem.chunks);
  if (!is_limited && least == most) return plan_steps(problem, sizeof(T), least);

  WorkspaceBound<Memory> bound(problem, least, /*for_any=*/is_limited);
  const int64_t needed = bound(least);
  if (is_limited && needed > limit) {
    Problem stepwise = problem;
    stepwise.backend = "stepwise";
    if (problem.backend == "auto" && WorkspaceBound<Memory>(stepwise, least)(least) < needed) {
      LayerPlan plan = plan_by_sizes<Memory>(stepwise);
      plan.lacks_room = true;
      return plan;
    }
    std::string refusals;
    for (const std::string& refusal : problem.refusal) {
      if (!refusal.empty()) refusals = ". " + refusal;
    }
    fail("workspace_bytes must be at least ", needed, " for a layer with an input of (", seq_len,
         ", ", batch, ", ", problem.sizes.input, "), got ", limit, refusals);
  }
  const auto fits = [&](int64_t steps) {
    const int64_t bytes = bound(steps);
    if (is_limited || bytes > limit) return bytes <= limit;
    // More steps are more workspace and fewer states to save.
    return bytes <= saved_bytes(problem, steps, sizeof(Acc<T>), true) ||
           training_bytes<T>(problem, steps, bytes) <= limit;
  };
  // One chunk alone needs no room for two, so that more steps may be less workspace.
  int64_t longest = fits(most) ? most : least;
  while (longest < most) {
    const int64_t middle = longest + (most - longest + 1) / 2;
    if (fits(middle)) {
      longest = middle;
    } else {
      most = middle - 1;
    }
  }
  return plan_steps(problem, sizeof(T), steps_of((seq_len + longest - 1) / longest));
}

// The same, where the driver of the GPU has a say.  It changes the length of no chunk, but to stay
// within workspace_bytes: a graph that was compiled before a kernel was refused has the number of
// chunks in its shapes.  Nor of those that forward has saved states for.
template <class Memory>
LayerPlan plan_layer(const Problem& problem) {
  using T = typename Memory::T;
  const LayerPlan plan = plan_by_sizes<Memory>(problem);
  if (problem.gpu == nullptr) return plan;
  const std::string of_forward = objection<T>(Pass::Forward, *problem.gpu, plan.forward);
  const std::string of_backward = objection<T>(Pass::Backward, *problem.gpu, plan.backward);
  if (of_forward.empty() && of_backward.empty()) return plan;
  Problem refused = problem;
  refused.refusal[0] = of_forward;
  refused.refusal[1] = of_backward;
  const LayerPlan as_long = plan_steps(refused, sizeof(T), plan.steps);
  const bool is_error = problem.backend == "persistent" && as_long.forward.is_refused;
  const bool is_limited = problem.workspace_bytes > 0 && problem.batch > 0 && problem.chunks == 0;
  if (is_error || !is_limited ||
      WorkspaceCount<Memory>(problem, true)(as_long).most() <= problem.workspace_bytes) {
    return as_long;
  }
  return plan_by_sizes<Memory>(refused);
}

// Microseconds of backward over the whole sequence, by the model: the steps, and GEMMs over whole
// chunks at the rate of the data sheet.  0 on the CPU and where the rate is not known.
inline double backward_us(const Problem& problem, const LayerPlan& plan, int64_t element_bytes,
                          bool recompute) {
  if (problem.gpu == nullptr) return 0;
  const Tflops all = tflops_of(*problem.gpu);
  const double tflops = element_bytes == 8   ? all.float64
                        : element_bytes == 2 ? all.of_16_bits
                        : problem.tf32       ? all.tf32
                                             : all.float32;
  if (tflops == 0) return 0;
  const Cell& cell = problem.cell;
  const Sizes& sizes = problem.sizes;
  double products = 0;  // multiply-adds for each row
  int64_t gemms = 0;    // for each chunk
  const auto add = [&](int64_t columns, Width from, int64_t count = 1) {
    products += double(columns) * sizes[from];
    gemms += count;
  };
  const auto columns_of = [&](int blocks, int s) {
    return blocks * sizes[cell.projections[cell.stages[s].projection].to];
  };
  const int core = fusedrnn::core(cell);
  const StageTraits of_core = traits(cell.stages[core].kind);
  const int64_t side = columns_of(of_core.side_blocks, core);
  const int64_t parts =
      of_core.shared_blocks < of_core.side_blocks ? 2 : 1;  // what is shared, rest
  add(side, Width::Input, parts);                           // of the input's weight
  add(side, Width::Input, parts);                           // of the input
  if (recompute) add(side, Width::Input, parts);            // the input's projection again
  for (int s = 0; s < cell.num_stages; ++s) {
    const CellStage& stage = cell.stages[s];
    const int64_t columns = columns_of(traits(stage.kind).projection_blocks, s);
    const Width from = cell.projections[stage.projection].from;
    add(columns, from);
    if (recompute && s <= core) add(columns, from);
  }
  const int64_t chunks = (problem.seq_len + plan.steps - 1) / plan.steps;
  const double steps_us = double(problem.seq_len) * step_us(Pass::Backward, problem, plan.backward);
  const double rows = double(problem.seq_len) * problem.batch;
  return steps_us + double(chunks * gemms) * kGemmUs + 2 * rows * products / (1e6 * tflops);
}

}  // namespace fusedrnn
