// The GPU backend on the CPU: the unchanged operators, driver, planner and kernel bodies.  A launch
// is a loop over threads.  A stream runs or records at once; two streams are run later, in an order
// that their waits allow.  A GEMM is three loops. The emulation cannot show cuBLAS, the order of
// threads within a launch (two are tried), or CUDA itself.
#include <cmath>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

// The number of the seeded bug that is on, in a copy of the headers with bugs: see seeded_bugs.py.
namespace {
int64_t seeded_bug = 0;
}
#include "../../csrc/cuda/block_counts.h"
#include "../../csrc/cuda/kernels.h"
#include "../../csrc/cuda/program_kernels.h"
#include "../../csrc/ops/gpu_backend.h"
#include "../../csrc/ops/ops.h"
#include "../../csrc/ops/program_call.h"
#include "../../csrc/persistent/backward.h"
#include "../../csrc/persistent/forward.h"

struct CUstream_st {
  struct Item {
    std::function<void()> work;
    size_t others;  // how many of the other stream's must be done before
  };
  std::vector<std::function<void()>>* recording = nullptr;
  bool waits = false;  // whether to run everything later
  std::vector<Item> queue;

  void enqueue(std::function<void()> work) {
    if (recording != nullptr) {
      recording->push_back(std::move(work));
    } else if (waits) {
      queue.push_back({std::move(work), 0});
    } else {
      work();
    }
  }
};

namespace fusedrnn {
namespace {

bool backwards = false;      // whether threads run in reverse order
std::string failing_kernel;  // the kernel that fails to launch
int64_t launches = 0, replays = 0, forward_kernels = 0,
        backward_kernels = 0;  // of persistent kernels
int64_t splits = 0;
int64_t presets = 0;        // presets of memory before persistent kernels
int64_t streams_order = 0;  // 0, 1: that stream runs ahead as far as possible; else a seed
int64_t missing_wait = -1;  // a stream that leaves out its waits in sync()
// Zero multiprocessors turn persistent kernels off, which are slow here.
int64_t blocks_at_once = 0;     // the driver's answer
std::string refused_kernel;     // refused whatever the driver answers
bool error_is_pending = false;  // torch's next kernel would report it
std::optional<cuda::BlockCounts> counts_of_blocks;
int64_t most_blocks(const cuda::PersistentKernel* kernel) {
  return counts_of_blocks->most(*kernel, [](const auto&) { return blocks_at_once; });
}
Gpu gpu{"emulated", 90, 0, 227 << 10, {}, 0, most_blocks};
int64_t schedule = 0;  // the order of threads in persistent kernels
uint32_t spin_limit = 0;
int64_t forward_bug = 0, backward_bug = 0;
// Rounds sums of products to the type of their terms, where stages read them; a GPU never does
// that.
bool rounds_sums = false;

struct EmulatedDevice {
  struct Graph {
    std::vector<std::function<void()>> work;
    bool is_recorded() const { return !work.empty(); }
  };

  explicit EmulatedDevice(bool replay) : replay_(replay) {}

  Borrower borrower() const { return Borrower(0, 0); }
  int index() const { return 0; }
  static void refuse(const cuda::PersistentKernel& kernel) { counts_of_blocks->refuse(kernel); }
  static void forget_error() { error_is_pending = false; }
  cuda::Stream stream() { return &streams_[current_]; }
  bool may_record() const { return replay_; }
  bool keeps_float32() const { return true; }
  bool torch_rounds_more() const { return false; }
  static const char* message(int) { return "it was told to"; }

  template <class C, class T>
  bool gemm(const Matrix<C>& out, const Matrix<const T>& a, const Matrix<const T>& b,
            bool accumulate, void* workspace, int64_t workspace_bytes) {
    if (failing_kernel == "gemm") return false;
    FUSEDRNN_CHECK(a.is_operand() && b.is_operand() && a.columns == b.rows &&
                       out.column_stride == 1 && out.row_stride >= out.columns &&
                       out.rows == a.rows,
                   "not a product that a GPU computes");
    const bool is_known =
        !known_.insert({layout(a), layout(b), layout(out), sizeof(C) == sizeof(T)}).second;
    FUSEDRNN_CHECK(is_known || stream()->recording == nullptr,
                   "a product whose algorithm would have to be chosen while recording");
    // Sums over the rows of a chunk, one term after another: as inaccurate as a GPU may be.
    const bool sums_rows = a.row_stride == 1;
    const bool rounds = rounds_sums && b.row_stride == 1;  // a weight, transposed
    stream()->enqueue([=] {
      for (int64_t i = 0; i < out.rows; ++i) {
        for (int64_t j = 0; j < out.columns; ++j) {
          C& at = out.data[i * out.row_stride + j];
          double sum = accumulate ? widen(at) : 0;
          Acc<T> long_sum = 0;
          for (int64_t k = 0; k < a.columns; ++k) {
            const Acc<T> x = widen(a.data[i * a.row_stride + k * a.column_stride]),
                         y = widen(b.data[k * b.row_stride + j * b.column_stride]);
            if (sums_rows) {
              long_sum = std::fma(x, y, long_sum);
            } else {
              sum += double(x) * y;
            }
          }
          sum += long_sum;
          if (rounds) sum = widen(narrow<T>(Acc<T>(sum)));
          at = narrow<C>(Acc<C>(sum));
        }
      }
      // A GEMM may leave anything in its workspace.
      for (int64_t at : {int64_t(0), workspace_bytes - 64}) {
        memset(static_cast<char*>(workspace) + at, 0xff, 64);
      }
    });
    return true;
  }
  void zero(void* data, size_t size_bytes) {
    stream()->enqueue([=] { memset(data, 0, size_bytes); });
  }
  template <class F>
  void record(Graph& graph, const F& enqueue) {
    stream()->recording = &graph.work;
    enqueue();
    stream()->recording = nullptr;
  }
  void launch(const Graph& graph) {
    ++replays;
    for (const auto& work : graph.work) work();
  }

  template <class F>
  void by_torch(const F& f) {
    stream()->enqueue(f);
  }

  void fork() {
    ++splits;
    for (CUstream_st& s : streams_) s.waits = true;
  }
  template <class F>
  void on_second_stream(const F& f) {
    current_ = 1;
    f();
    current_ = 0;
  }
  void sync() {
    for (int64_t s : {0, 1}) {
      const size_t given = streams_[1 - s].queue.size();
      streams_[s].queue.push_back({[] {}, missing_wait == s ? 0 : given});
    }
  }
  void join() {
    size_t done[2] = {};
    uint64_t random = uint64_t(streams_order);
    const auto may_run = [&](int64_t s) {
      const auto& queue = streams_[s].queue;
      return done[s] < queue.size() && queue[done[s]].others <= done[1 - s];
    };
    for (;;) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      int64_t s = streams_order > 1 ? int64_t(random >> 63) : streams_order;
      if (!may_run(s)) s = 1 - s;
      if (!may_run(s)) break;
      streams_[s].queue[done[s]++].work();
    }
    for (int64_t s : {0, 1}) {
      FUSEDRNN_CHECK(done[s] == streams_[s].queue.size(), "two streams wait for each other");
    }
    abandon();
  }
  void abandon() {
    current_ = 0;
    for (CUstream_st& s : streams_) s = {};
  }

 private:
  // Everything that the choice of an algorithm depends on.
  using Layout = std::array<int64_t, 5>;
  template <class M>
  static Layout layout(const M& m) {
    const auto address = reinterpret_cast<uintptr_t>(m.data);
    return {m.rows, m.columns, m.row_stride, m.column_stride, int64_t(address & -address & 255)};
  }

  bool replay_;
  CUstream_st streams_[2];
  int64_t current_ = 0;
  std::set<std::tuple<Layout, Layout, Layout, bool>> known_;
};

class EmulatedPlatform {
 public:
  // Products of single steps are never rounded to TF32 here.
  EmulatedPlatform(const Tensor& /*input*/, const Tuning& tuning) : device_(tuning.replay) {}
  static const Gpu* gpu() { return &fusedrnn::gpu; }
  void keep(const Tensor& /*host*/) const {}

  template <class T>
  GpuBackend<T, EmulatedDevice> backend() {
    return GpuBackend<T, EmulatedDevice>(device_);
  }
  template <class F>
  void compute(int64_t /*rows*/, int64_t /*row_work*/, bool /*is_backward*/, const F& f) const {
    f();
  }

 private:
  EmulatedDevice device_;
};

void control(bool run_backwards, std::string kernel, int64_t multiprocessors, int64_t seed,
             int64_t bug, int64_t bug_backward, int64_t spins, int64_t order, int64_t no_wait,
             int64_t blocks, std::string refused, bool round_sums) {
  counts_of_blocks.emplace();
  blocks_at_once = blocks;
  refused_kernel = refused;
  error_is_pending = false;
  backwards = run_backwards;
  gpu.multiprocessors = int(multiprocessors);
  schedule = seed;
  forward_bug = bug;
  backward_bug = bug_backward;
  spin_limit = uint32_t(spins);
  rounds_sums = round_sums;
  failing_kernel = kernel;
  launches = replays = forward_kernels = backward_kernels = splits = presets = 0;
  streams_order = order;
  missing_wait = no_wait;
}
std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, bool, int64_t> counts() {
  return {launches, replays, forward_kernels, backward_kernels, splits, error_is_pending, presets};
}

}  // namespace

namespace cuda {
Launch failed(const char* kernel, bool is_refused = false) {
  error_is_pending = true;
  return {kernel, 1, is_refused};
}

template <class Body>
Launch launch(const char* kernel, const Body& body, int64_t count, Stream stream) {
  if (kernel == failing_kernel) return failed(kernel);
  ++launches;
  stream->enqueue([=] {
    for (int64_t i = 0; i < count; ++i) body(backwards ? count - 1 - i : i);
  });
  return {kernel, 0};
}

// kernel(stages, depth, args): the work of each thread.
template <class Args, class Kernel>
Launch launch_persistent(const char* name, int64_t bug, const PersistentPlan& plan, Args args,
                         void* workspace, Stream stream, const Kernel& kernel) {
  if (name == failing_kernel) return failed(name);
  if (name == refused_kernel) return failed(name, /*is_refused=*/true);
  ++launches;
  args.spin_limit = spin_limit;
  stream->enqueue([=]() mutable {
    prepare(plan, workspace, args, [](void* memory, int byte, size_t count) {
      ++presets;
      memset(memory, byte, count);
    });
    seeded_bug = bug;
    std::string failure = "there is no such kernel";
    dispatch_stages(plan, [&](auto stages) {
      const auto run = [&](auto depth) {
        failure = emulated::launch(plan.grid(), kPersistentThreads, size_t(plan.shared_bytes),
                                   uint64_t(schedule), [&] { kernel(stages, depth, args); });
      };
      if (plan.depth == 1) run(std::integral_constant<int, 1>{});
      if (plan.depth == 2) run(std::integral_constant<int, 2>{});
      if (plan.depth == 4) run(std::integral_constant<int, 4>{});
    });
    FUSEDRNN_CHECK(failure.empty(), failure);
  });
  return {name, 0};
}

template <class T>
Launch launch_persistent_forward(const PersistentPlan& plan, PersistentForward<T> args,
                                 void* workspace, Stream stream) {
  ++forward_kernels;
  return launch_persistent("persistent_forward", forward_bug, plan, args, workspace, stream,
                           [](auto stages, auto depth, const auto& a) {
                             persistent_forward<T, decltype(depth)::value>(
                                 stages, a, emulated::shared_memory());
                           });
}
template <class T>
Launch launch_persistent_backward(const PersistentPlan& plan, PersistentBackward<T> args,
                                  void* workspace, Stream stream) {
  ++backward_kernels;
  return launch_persistent("persistent_backward", backward_bug, plan, args, workspace, stream,
                           [](auto stages, auto depth, const auto& a) {
                             persistent_backward<T, decltype(depth)::value>(
                                 stages, a, emulated::shared_memory());
                           });
}
template Launch launch_persistent_forward(const PersistentPlan&, PersistentForward<BFloat16>, void*,
                                          Stream);
template Launch launch_persistent_forward(const PersistentPlan&, PersistentForward<Half>, void*,
                                          Stream);
template Launch launch_persistent_forward(const PersistentPlan&, PersistentForward<float>, void*,
                                          Stream);
template Launch launch_persistent_backward(const PersistentPlan&, PersistentBackward<BFloat16>,
                                           void*, Stream);
template Launch launch_persistent_backward(const PersistentPlan&, PersistentBackward<Half>, void*,
                                           Stream);
template Launch launch_persistent_backward(const PersistentPlan&, PersistentBackward<float>, void*,
                                           Stream);

}  // namespace cuda
}  // namespace fusedrnn

STABLE_TORCH_LIBRARY(fusedrnn_emulated, m) {
  fusedrnn::define_operators(m);
  fusedrnn::define_program_operators(m);
  m.def(
      "control(bool run_backwards, str failing_kernel, int multiprocessors=0, int schedule=0, int "
      "seeded_bug=0, int backward_bug=0, int spin_limit=1000000, int streams_order=0, int "
      "missing_wait=-1, int blocks_at_once=1000000, str refused_kernel='', bool "
      "rounds_sums=False) -> ()");
  m.def("counts() -> (int, int, int, int, int, bool, int)");
}

STABLE_TORCH_LIBRARY_IMPL(fusedrnn_emulated, CPU, m) {
  fusedrnn::implement_operators<fusedrnn::EmulatedPlatform>(m);
  fusedrnn::implement_program_operators<fusedrnn::EmulatedPlatform>(m);
}

STABLE_TORCH_LIBRARY_IMPL(fusedrnn_emulated, CompositeExplicitAutograd, m) {
  m.impl("control", TORCH_BOX(&fusedrnn::control));
  m.impl("counts", TORCH_BOX(&fusedrnn::counts));
}

// As fusedrnn_add_program() and fusedrnn_program_chunk() of csrc/ops/ops.cpp.
extern "C" __attribute__((visibility("default"))) int64_t fusedrnn_add_gpu_program(
    const int64_t* numbers, int64_t count, const int64_t* constants, int64_t constants_count,
    fusedrnn::program::StageLaunch stages, int64_t dtype, char* error, int64_t error_size) {
  return fusedrnn::with_error(error, error_size, [&] {
    return fusedrnn::Programs::all().add(numbers, count, constants, constants_count,
                                         {nullptr, stages}, dtype);
  });
}

extern "C" __attribute__((visibility("default"))) int64_t fusedrnn_gpu_program_chunk(
    int64_t program, int64_t seq_len, int64_t batch, int64_t dtype, int64_t chunk_size,
    int64_t workspace_bytes, int64_t* plan, char* error, int64_t error_size) {
  return fusedrnn::write_program_plan<fusedrnn::cuda::Memory>(
      program, seq_len, batch, dtype, chunk_size, workspace_bytes, plan, error, error_size);
}
