// The operators for GPUs, the unchanged csrc/ops/ops_cuda.cpp, as torch.ops.fusedrnn_fake for CPU
// tensors.
#include "torch_names.h"
// and then what registers operators, so that ops_cuda.cpp registers its own as others
#include <torch/csrc/stable/library.h>

#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(library, key, m) \
  _STABLE_TORCH_LIBRARY_IMPL(fusedrnn_fake, CPU, m, C10_UID)
#include "../../csrc/ops/ops_cuda.cpp"
#include "../../csrc/ops/program_call.h"
#include "fake.h"

namespace fake {
namespace {

void control(int64_t order, bool torch_tf32, int64_t device, int64_t free_multiprocessors,
             int64_t no_gemm, int64_t failing_launch, int64_t bug, bool own_stream, bool forgets) {
  options = {.order = uint64_t(order),
             .torch_tf32 = torch_tf32,
             .device = int(device),
             .free_multiprocessors = int(free_multiprocessors),
             .no_gemm = int(no_gemm),
             .failing_launch = failing_launch,
             .bug = Bug(bug)};
  counts = {};
  if (forgets) fusedrnn::cuda::BlockCounts::of_process().forget();
  reset();
  choose_torch_stream(own_stream);
}
std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> count() {
  return {counts.launches, counts.cooperative, counts.gemms, counts.replays, counts.waits};
}
int64_t last_error() { return cudaPeekAtLastError(); }
int64_t count_searches() { return searches; }

// Like torch.cuda.graph: makes torch's stream one that records.
struct Recording {
  cudaStream_t stream = nullptr;
  CUDAStreamGuardHandle guard = nullptr;
  cudaGraphExec_t graph = nullptr;
} recording;

void begin_recording() {
  if (recording.stream == nullptr) {
    (void)cudaStreamCreateWithFlags(&recording.stream, cudaStreamNonBlocking);
  }
  (void)aoti_torch_create_cuda_stream_guard(recording.stream, options.device, &recording.guard);
  (void)cudaStreamBeginCapture(recording.stream, cudaStreamCaptureModeGlobal);
}
void end_recording() {
  cudaGraph_t graph = nullptr;
  (void)aoti_torch_delete_cuda_stream_guard(recording.guard);
  (void)cudaStreamEndCapture(recording.stream, &graph);
  (void)cudaGraphInstantiateWithFlags(&recording.graph, graph, 0);
}
void replay() {
  (void)cudaGraphLaunch(recording.graph, nullptr);
  run_all();
}

}  // namespace
}  // namespace fake

STABLE_TORCH_LIBRARY(fusedrnn_fake, m) {
  fusedrnn::define_operators(m);
  fusedrnn::define_program_operators(m);
  m.def(
      "control(int order=0, bool torch_tf32=False, int device=0, int free_multiprocessors=-1, int "
      "no_gemm=0, int failing_launch=-1, int bug=0, bool own_stream=False, bool "
      "forgets=True) -> ()");
  m.def("counts() -> (int launches, int cooperative, int gemms, int replays, int waits)");
  m.def("last_error() -> int");
  m.def("searches() -> int");
  m.def("take_notes() -> str");
  m.def("use_gpu_memory(bool wanted) -> ()");
  m.def("begin_recording() -> ()");
  m.def("end_recording() -> ()");
  m.def("replay() -> ()");
}

_STABLE_TORCH_LIBRARY_IMPL(fusedrnn_fake, CompositeExplicitAutograd, m, C10_UID) {
  m.impl("control", TORCH_BOX(&fake::control));
  m.impl("counts", TORCH_BOX(&fake::count));
  m.impl("last_error", TORCH_BOX(&fake::last_error));
  m.impl("searches", TORCH_BOX(&fake::count_searches));
  m.impl("take_notes", TORCH_BOX(&fake::take_notes));
  m.impl("use_gpu_memory", TORCH_BOX(&fake::use_gpu_memory));
  m.impl("begin_recording", TORCH_BOX(&fake::begin_recording));
  m.impl("end_recording", TORCH_BOX(&fake::end_recording));
  m.impl("replay", TORCH_BOX(&fake::replay));
}

// For libraries of generated stages: has the fake GPU call run(data) when the stream comes to it.
extern "C" __attribute__((visibility("default"))) int64_t fake_enqueue(void* stream,
                                                                       void (*run)(void*),
                                                                       void* data) {
  ++fake::counts.launches;
  return fake::enqueue(static_cast<cudaStream_t>(stream), [=] { run(data); });
}
