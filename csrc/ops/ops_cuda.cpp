// Implements the operators on CUDA, in a library of its own that is loaded if torch has CUDA.
#include <mutex>
#include <vector>

#include "cuda_device.h"
#include "gpu_backend.h"
#include "ops.h"
#include "program_call.h"

namespace fusedrnn {
namespace {

class CudaPlatform {
 public:
  CudaPlatform(const Tensor& input, const Tuning& tuning)
      : device_(input, tuning.replay, tuning.tf32) {}
  const Gpu* gpu() const { return &device_.gpu(); }
  // A CUDA graph that captured a copy from `host` reads that memory whenever it is launched, and
  // there is no notice when the graph is destroyed.
  void keep(const Tensor& host) const {
    static std::mutex mutex;
    static auto* const kept =
        new std::vector<Tensor>();  // never freed: torch may be unloaded before
    if (!device_.is_capturing()) return;
    const std::lock_guard lock(mutex);
    kept->push_back(host);
  }

  template <class T>
  GpuBackend<T, CudaDevice> backend() {
    return GpuBackend<T, CudaDevice>(device_);
  }
  template <class F>
  void compute(int64_t /*rows*/, int64_t /*row_work*/, bool /*is_backward*/, const F& f) const {
    f();
  }

 private:
  CudaDevice device_;
};

}  // namespace
}  // namespace fusedrnn

STABLE_TORCH_LIBRARY_IMPL(fusedrnn, CUDA, m) {
  fusedrnn::implement_operators<fusedrnn::CudaPlatform>(m);
  fusedrnn::implement_program_operators<fusedrnn::CudaPlatform>(m);
}

// Called by Python through ctypes.
extern "C" __attribute__((visibility("default"))) int64_t
fusedrnn_most_blocks(const fusedrnn::cuda::PersistentKernel* kernel) {
  return fusedrnn::CudaDevice::most_blocks(kernel);
}

// As fusedrnn_add_program() and fusedrnn_program_chunk() of ops.cpp, for programs on a GPU.
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
