// The few things of torch that the driver and the ops need, through its stable ABI, so that one
// binary loads under every torch since 2.11.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "matrix.h"
#include "scalar.h"

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // headers of torch 2.11 and 2.12
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace fusedrnn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
constexpr ScalarType kScalarType = ScalarType::Undefined;
template <>
constexpr ScalarType kScalarType<float> = ScalarType::Float;
template <>
constexpr ScalarType kScalarType<double> = ScalarType::Double;
template <>
constexpr ScalarType kScalarType<BFloat16> = ScalarType::BFloat16;

// A tensor over memory that someone else owns, for the length of one call of an ATen kernel.
class BorrowedTensor {
 public:
  template <class T>
  BorrowedTensor(T* data, int64_t dims, const int64_t* sizes, const int64_t* strides,
                 int32_t device_type, int32_t device_index) {
    using Element = std::remove_const_t<T>;
    static const int32_t dtype =
        torch::stable::detail::to<int32_t>(torch::stable::detail::from(kScalarType<Element>));
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_create_tensor_from_blob(const_cast<Element*>(data), dims, sizes, strides, 0,
                                           dtype, device_type, device_index, &handle_));
  }
  ~BorrowedTensor() { aoti_torch_delete_tensor_object(handle_); }
  BorrowedTensor(const BorrowedTensor&) = delete;
  BorrowedTensor& operator=(const BorrowedTensor&) = delete;
  AtenTensorHandle get() const { return handle_; }

 private:
  AtenTensorHandle handle_ = nullptr;
};

}  // namespace fusedrnn
