// The GPU backend on the CPU: the unchanged operators, driver, planner and kernel bodies, where a
// launch is a loop over threads, a stream runs or records at once, and a GEMM is three loops.
// What it cannot show: cuBLAS, the order of threads within a launch (two are tried), CUDA itself.
#include <functional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

// A number and not a constant, so that one build has all bugs.
namespace {
int64_t seeded_bug = 0;
}
#define FUSEDRNN_SEEDED_BUG seeded_bug
#include "../../csrc/cuda/kernels.h"
#include "../../csrc/cuda/persistent.h"
#include "../../csrc/cuda/persistent_backward.h"
#include "../../csrc/gpu_backend.h"
#include "../../csrc/ops.h"

struct CUstream_st {
  std::vector<std::function<void()>>* recording = nullptr;

  void enqueue(std::function<void()> work) {
    if (recording != nullptr) {
      recording->push_back(std::move(work));
    } else {
      work();
    }
  }
};

namespace fusedrnn {
namespace {

bool backwards = false;                                         // in which order threads run
std::string failing_kernel;                                     // refuses to be launched
int64_t launches = 0, replays = 0, forwards = 0, adjoints = 0;  // the last two: persistent
// Without multiprocessors a plan knows no persistent kernels, which take long here.
Gpu gpu{"emulated", 90, 0, 227 << 10};
int64_t schedule = 0;  // of threads in these
uint32_t patience = 0;
int64_t forward_bug = 0, backward_bug = 0;
bool tf32 = false;  // whether products of float32 may be rounded; single steps never do

struct EmulatedDevice {
  struct Graph {
    std::vector<std::function<void()>> work;
    bool is_recorded() const { return !work.empty(); }
  };

  explicit EmulatedDevice(bool replay) : replay_(replay) {}

  Borrower borrower() const { return Borrower(0, 0); }
  cuda::Stream stream() { return &stream_; }
  bool may_record() const { return replay_; }
  static const char* message(int) { return "it was told to"; }

  template <class C, class T>
  void gemm(const Matrix<C>& out, const Matrix<const T>& a, const Matrix<const T>& b,
            bool accumulate, void*) {
    STD_TORCH_CHECK(a.is_operand() && b.is_operand() && a.columns == b.rows &&
                        out.row_stride == out.columns && out.rows == a.rows,
                    "not a product that a GPU computes");
    const bool is_known =
        !known_.insert({layout(a), layout(b), layout(out), sizeof(C) == sizeof(T)}).second;
    STD_TORCH_CHECK(is_known || stream_.recording == nullptr,
                    "a product whose algorithm would have to be chosen while recording");
    stream_.enqueue([=] {
      for (int64_t i = 0; i < out.rows; ++i) {
        for (int64_t j = 0; j < out.columns; ++j) {
          C& at = out.data[i * out.columns + j];
          double sum = accumulate ? widen(at) : 0;
          for (int64_t k = 0; k < a.columns; ++k) {
            sum += double(widen(a.data[i * a.row_stride + k * a.column_stride])) *
                   widen(b.data[k * b.row_stride + j * b.column_stride]);
          }
          at = narrow<C>(Acc<C>(sum));
        }
      }
    });
  }
  void zero(void* data, size_t size_bytes) {
    stream_.enqueue([=] { memset(data, 0, size_bytes); });
  }
  template <class F>
  void record(Graph& graph, const F& enqueue) {
    stream_.recording = &graph.work;
    enqueue();
    stream_.recording = nullptr;
  }
  void launch(const Graph& graph) {
    ++replays;
    for (const auto& work : graph.work) work();
  }

 private:
  // All that the choice of an algorithm depends on.
  using Layout = std::array<int64_t, 5>;
  template <class M>
  static Layout layout(const M& m) {
    const auto address = reinterpret_cast<uintptr_t>(m.data);
    return {m.rows, m.columns, m.row_stride, m.column_stride, int64_t(address & -address & 255)};
  }

  bool replay_;
  CUstream_st stream_;
  std::set<std::tuple<Layout, Layout, Layout, bool>> known_;
};

class EmulatedPlatform {
 public:
  EmulatedPlatform(const Tensor& /*input*/, bool replay) : device_(replay) {}
  static const Gpu* gpu() { return &fusedrnn::gpu; }
  static bool allows_tf32() { return tf32; }

  template <class T>
  GpuBackend<T, EmulatedDevice> backend() {
    return GpuBackend<T, EmulatedDevice>(device_);
  }
  int computing(int64_t) const { return 0; }

 private:
  EmulatedDevice device_;
};

void control(bool run_backwards, std::string kernel, int64_t multiprocessors, int64_t seed,
             int64_t bug, int64_t bug_backward, int64_t looks, bool allow_tf32) {
  backwards = run_backwards;
  gpu.multiprocessors = int(multiprocessors);
  schedule = seed;
  forward_bug = bug;
  backward_bug = bug_backward;
  patience = uint32_t(looks);
  tf32 = allow_tf32;
  failing_kernel = kernel;
  launches = replays = forwards = adjoints = 0;
}
std::tuple<int64_t, int64_t, int64_t, int64_t> counts() {
  return {launches, replays, forwards, adjoints};
}

}  // namespace

namespace cuda {
template <class Body>
Launch launch(const char* kernel, const Body& body, int64_t count, Stream stream) {
  if (kernel == failing_kernel) return {kernel, 1};
  ++launches;
  stream->enqueue([=] {
    for (int64_t i = 0; i < count; ++i) body(backwards ? count - 1 - i : i);
  });
  return {kernel, 0};
}

// kernel(stages, depth, args): what each thread does.
template <class Args, class Kernel>
Launch launch_persistent(const char* name, int64_t bug, const PersistentPlan& plan, Args args,
                         void* workspace, Stream stream, const Kernel& kernel) {
  if (name == failing_kernel) return {name, 1};
  ++launches;
  apply(plan, workspace, args);
  args.patience = patience;
  stream->enqueue([=] {
    memset(workspace, plan.preset(), size_t(plan.workspace_bytes()));
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
    STD_TORCH_CHECK(failure.empty(), failure);
  });
  return {name, 0};
}

template <class T>
Launch launch_persistent_forward(const PersistentPlan& plan, PersistentForward<T> args,
                                 void* workspace, Stream stream) {
  ++forwards;
  return launch_persistent("persistent_forward", forward_bug, plan, args, workspace, stream,
                           [](auto stages, auto depth, const auto& a) {
                             persistent_forward<T, decltype(depth)::value>(
                                 stages, a, emulated::shared_memory());
                           });
}
template <class T>
Launch launch_persistent_backward(const PersistentPlan& plan, PersistentBackward<T> args,
                                  void* workspace, Stream stream) {
  ++adjoints;
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

}  // namespace cuda
}  // namespace fusedrnn

STABLE_TORCH_LIBRARY(fusedrnn_emulated, m) {
  m.def((std::string("forward") + fusedrnn::kForwardSchema).c_str());
  m.def((std::string("backward") + fusedrnn::kBackwardSchema).c_str());
  m.def(
      "control(bool run_backwards, str failing_kernel, int multiprocessors=0, int schedule=0, int "
      "seeded_bug=0, int backward_bug=0, int patience=1000000, bool tf32=False) -> ()");
  m.def("counts() -> (int, int, int, int)");
}

STABLE_TORCH_LIBRARY_IMPL(fusedrnn_emulated, CPU, m) {
  m.impl("forward", TORCH_BOX(&fusedrnn::forward<fusedrnn::EmulatedPlatform>));
  m.impl("backward", TORCH_BOX(&fusedrnn::backward<fusedrnn::EmulatedPlatform>));
}

STABLE_TORCH_LIBRARY_IMPL(fusedrnn_emulated, CompositeExplicitAutograd, m) {
  m.impl("control", TORCH_BOX(&fusedrnn::control));
  m.impl("counts", TORCH_BOX(&fusedrnn::counts));
}
