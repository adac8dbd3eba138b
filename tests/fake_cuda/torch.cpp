// torch's functions for operators on a GPU, implemented for tensors on the CPU.
//
// The work of an operator on the fake GPU is done when the operator returns.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <memory>

#include "fake.h"

namespace fake {
namespace {

cudaStream_t current_stream = nullptr;

AOTITorchError check_device(int32_t index) {
  if (index == options.device) return AOTI_TORCH_SUCCESS;
  note("torch was told of device " + std::to_string(index));
  return AOTI_TORCH_FAILURE;
}
// torch's own work is done at once, after everything in its stream.  All other work may still be
// late.
void before_torch() {
  if (!is_capturing(current_stream)) run_to_here(current_stream);
}

}  // namespace

cudaStream_t torch_stream() { return current_stream; }
void choose_torch_stream(bool own) {
  static cudaStream_t stream = nullptr;
  if (stream == nullptr) (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  current_stream = own ? stream : nullptr;
}

}  // namespace fake

using namespace fake;

extern "C" {

AOTITorchError fake_torch_get_device_index(AtenTensorHandle /*tensor*/, int32_t* index) {
  *index = options.device;
  return AOTI_TORCH_SUCCESS;
}
// A tensor without memory may be on any device.
AOTITorchError fake_torch_get_device_type(AtenTensorHandle tensor, int32_t* type) {
  void* memory = nullptr;
  const AOTITorchError error = aoti_torch_get_data_ptr(tensor, &memory);
  const bool gpu = memory == nullptr || is_on_gpu(memory, 1);
  *type = gpu ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  return error;
}

AOTITorchError fake_torch_create_device_guard(int32_t index, DeviceGuardHandle* guard) {
  static char any;
  *guard = reinterpret_cast<DeviceGuardHandle>(&any);
  return check_device(index);
}
// Called when an operator returns, because its results may then be read.
AOTITorchError fake_torch_delete_device_guard(DeviceGuardHandle /*guard*/) {
  if (any_is_capturing()) return AOTI_TORCH_SUCCESS;
  run_all();
  give_freed_back();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError fake_torch_get_current_cuda_stream(int32_t index, void** stream) {
  *stream = current_stream;
  return check_device(index);
}
// The guard holds the previous stream.
AOTITorchError fake_torch_create_cuda_stream_guard(void* stream, int32_t index,
                                                   CUDAStreamGuardHandle* guard) {
  *guard = reinterpret_cast<CUDAStreamGuardHandle>(current_stream);
  current_stream = static_cast<cudaStream_t>(stream);
  return check_device(index);
}
AOTITorchError fake_torch_delete_cuda_stream_guard(CUDAStreamGuardHandle guard) {
  current_stream = reinterpret_cast<cudaStream_t>(guard);
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError fake_torch_get_current_cuda_blas_handle(void** handle) {
  *handle = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError fake_torch_create_tensor_from_blob(void* data, int64_t dims, const int64_t* sizes,
                                                  const int64_t* strides, int64_t offset,
                                                  int32_t dtype, int32_t /*device_type*/,
                                                  int32_t index, AtenTensorHandle* tensor) {
  if (check_device(index) != AOTI_TORCH_SUCCESS) return AOTI_TORCH_FAILURE;
  return aoti_torch_create_tensor_from_blob(data, dims, sizes, strides, offset, dtype,
                                            aoti_torch_device_type_cpu(), 0, tensor);
}
AOTITorchError fake_torch_copy_(AtenTensorHandle to, AtenTensorHandle from, int32_t non_blocking) {
  const auto own = [](AtenTensorHandle tensor) {
    AtenTensorHandle handle = nullptr;
    (void)aoti_torch_new_tensor_handle(tensor, &handle);
    return std::shared_ptr<AtenTensorOpaque>(
        handle, [](AtenTensorHandle t) { (void)aoti_torch_delete_tensor_object(t); });
  };
  const cudaError_t error = enqueue(current_stream, [to = own(to), from = own(from), non_blocking] {
    (void)aoti_torch_copy_(to.get(), from.get(), non_blocking);
  });
  return error == cudaSuccess ? AOTI_TORCH_SUCCESS : AOTI_TORCH_FAILURE;
}
AOTITorchError fake_torch_call_dispatcher(const char* name, const char* overload,
                                          StableIValue* stack, uint64_t version) {
  before_torch();
  return torch_call_dispatcher(name, overload, stack, version);
}
AOTITorchError fake_aoti_torch_call_dispatcher(const char* name, const char* overload,
                                               StableIValue* stack) {
  before_torch();
  return aoti_torch_call_dispatcher(name, overload, stack);
}
}
