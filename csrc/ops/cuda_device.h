// The GPU backend's calls of CUDA other than kernels; one object for each call of an operator.
#pragma once
#include <torch/csrc/stable/accelerator.h>

#include <vector>

#include "../base/checked.h"
#include "../base/gpus.h"
#include "../cuda/block_counts.h"
#include "../cuda/gemm.h"
#include "../cuda/graph.h"
#include "../cuda/launches.h"
#include "../cuda/second_stream.h"
#include "stable.h"

namespace fusedrnn {

class CudaDevice {
 public:
  using Graph = cuda::Graph;

  // replay: whether steps may be recorded and replayed.  tf32: whether products of float32 may be
  // rounded to TF32.
  CudaDevice(const Tensor& input, bool replay, bool tf32)
      : index_(input.get_device_index()), guard_(index_), stream_(current_stream(index_)),
        is_capturing_(is_capturing(stream_)), may_record_(replay && !is_capturing_),
        allows_tf32_(tf32), gemms_(index_, tf32) {}

  Borrower borrower() const { return Borrower(aoti_torch_device_type_cuda(), index_); }
  int index() const { return index_; }
  cuda::Stream stream() const { return stream_; }
  bool is_capturing() const { return is_capturing_; }
  bool may_record() const { return may_record_; }
  const Gpu& gpu() const {
    static const std::vector<Gpu> all = all_gpus();
    return all.at(size_t(index_));
  }
  // The cuda::MostBlocks of this GPU, and the record that it has refused a kernel.
  static int64_t most_blocks(const cuda::PersistentKernel* kernel) {
    return cuda::BlockCounts::of_process().most(*kernel, [](const auto& asked) {
      const torch::stable::accelerator::DeviceGuard guard(asked.device);
      return asked.is_backward ? count_backward_blocks(asked) : count_forward_blocks(asked);
    });
  }
  static void refuse(const cuda::PersistentKernel& kernel) {
    cuda::BlockCounts::of_process().refuse(kernel);
  }
  static const char* message(int error) { return cudaGetErrorString(cudaError_t(error)); }
  // Clears an error that has been reported, so that torch's next kernel does not report it again.
  static void forget_error() { (void)cudaGetLastError(); }

  // False if cuBLASLt has no algorithm for the product; then nothing has been done.
  template <class C, class T>
  bool gemm(const Matrix<C>& out, const Matrix<const T>& a, const Matrix<const T>& b,
            bool accumulate, void* workspace, int64_t workspace_bytes) {
    const cublasStatus_t status =
        gemms_(out, a, b, accumulate, workspace, workspace_bytes, stream_);
    if (status != CUBLAS_STATUS_SUCCESS) forget_error();
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return false;
    FUSEDRNN_CHECK(status == CUBLAS_STATUS_SUCCESS, "the product of (", a.rows, ", ", a.columns,
                   ") and (", b.rows, ", ", b.columns, ") matrices in ",
                   torch::headeronly::toString(kScalarType<T>),
                   " failed: ", cublasLtGetStatusString(status), kCaptureHint);
    return true;
  }

  // Whether products of float32 keep all bits of their operands.
  bool keeps_float32() const { return !allows_tf32_; }
  // Whether torch would round products of float32 that must not be rounded here: torch has one flag
  // for matrix products and another for recurrent layers.
  bool torch_rounds_more() const { return !allows_tf32_ && torch_allows_tf32(); }

  void zero(void* data, size_t size_bytes) const {
    check(cudaMemsetAsync(data, 0, size_bytes, stream_), "zeroing memory");
  }

  // Calls f, which enqueues work through torch on torch's current stream.
  template <class F>
  void by_torch(const F& f) const {
    f();
  }

  // Starts the second stream, which ends with join().  This also works while the first stream is
  // captured: the waits make the second stream a part of the capture.
  void fork() {
    check(cuda::second_stream(index_, &second_), "making a second stream");
    wait(second_.stream, stream_, second_.of_first);
  }
  template <class F>
  void on_second_stream(const F& f) {
    const StreamGuard guard(second_.stream, index_);
    const Restore restore{stream_, std::exchange(stream_, second_.stream)};
    f();
  }
  void sync() const {
    wait(stream_, second_.stream, second_.of_second);
    wait(second_.stream, stream_, second_.of_first);
  }
  void join() const { wait(stream_, second_.stream, second_.of_second); }
  void abandon() const noexcept {  // join() after an error, without reporting another one
    (void)cudaEventRecord(second_.of_second, second_.stream);
    (void)cudaStreamWaitEvent(stream_, second_.of_second, 0);
    forget_error();
  }

  template <class F>
  void record(Graph& graph, const F& enqueue) {
    const Restore restore{stream_, stream_};
    check(graph.record(index_,
                       [&](cudaStream_t recording) {
                         stream_ = recording;
                         enqueue();
                       }),
          "recording a graph");
  }
  void launch(const Graph& graph) const { check(graph.launch(stream_), "launching a graph"); }

 private:
  struct Restore {  // even if a kernel fails
    cuda::Stream &current, before;
    ~Restore() { current = before; }
  };
  // While it lives, `stream` is torch's current stream.
  class StreamGuard {
   public:
    StreamGuard(cuda::Stream stream, int32_t device) {
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_create_cuda_stream_guard(stream, device, &handle_));
    }
    ~StreamGuard() { aoti_torch_delete_cuda_stream_guard(handle_); }
    StreamGuard(const StreamGuard&) = delete;
    StreamGuard& operator=(const StreamGuard&) = delete;

   private:
    CUDAStreamGuardHandle handle_ = nullptr;
  };

  static void wait(cuda::Stream waiting, cuda::Stream other, cudaEvent_t event) {
    check(cudaEventRecord(event, other), "marking a place in a stream");
    check(cudaStreamWaitEvent(waiting, event, 0), "waiting for a stream");
  }

  // cuBLASLt of CUDA 13.3 cannot choose an algorithm while a stream is being captured.
  static constexpr const char* kCaptureHint =
      " (if this is being captured into a CUDA graph, call it once before with the same shapes)";

  static void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    forget_error();
    const char* kind = error == cudaErrorMemoryAllocation ? "out of memory: " : "";
    fail(kind, what, " failed: ", cudaGetErrorString(error));
  }
  static std::vector<Gpu> all_gpus() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "counting GPUs");
    std::vector<Gpu> all;
    for (int device = 0; device < count; ++device) {
      const auto attribute = [&](cudaDeviceAttr which) {
        int value = 0;
        check(cudaDeviceGetAttribute(&value, which, device), "asking for the facts of a GPU");
        return value;
      };
      const int major = attribute(cudaDevAttrComputeCapabilityMajor);
      all.push_back({"this GPU",
                     10 * major + attribute(cudaDevAttrComputeCapabilityMinor),
                     attribute(cudaDevAttrMultiProcessorCount),
                     attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                     {},
                     device,
                     most_blocks});
    }
    return all;
  }
  static cuda::Stream current_stream(int32_t index) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
    return static_cast<cuda::Stream>(stream);
  }
  static bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status), "asking for the state of the stream");
    return status != cudaStreamCaptureStatusNone;
  }
  // torch sets the math mode of its handle from its flags whenever it hands out the handle.
  static bool torch_allows_tf32() {
    void* handle = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_get_current_cuda_blas_handle(&handle));
    cublasMath_t mode = CUBLAS_DEFAULT_MATH;
    const cublasStatus_t status = cublasGetMathMode(static_cast<cublasHandle_t>(handle), &mode);
    FUSEDRNN_CHECK(status == CUBLAS_STATUS_SUCCESS, "asking for cuBLAS' math mode ",
                   "failed: ", cublasGetStatusString(status));
    return (mode & CUBLAS_TF32_TENSOR_OP_MATH) == CUBLAS_TF32_TENSOR_OP_MATH;
  }

  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
  cuda::Stream stream_;
  bool is_capturing_, may_record_, allows_tf32_;
  cuda::Gemms gemms_;
  cuda::SecondStream second_{};
};

}  // namespace fusedrnn
