// The parts of torch that the backends and operators use, through its stable ABI, so that one
// binary loads under every torch from 2.11 on.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <utility>

#include "../base/matrix.h"
#include "../base/scalar.h"

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
template <>
constexpr ScalarType kScalarType<Half> = ScalarType::Half;

// The code of a type in torch's C functions.
inline int32_t type_code(ScalarType type) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
}

// A tensor over memory that it does not own, for the length of one call of an ATen kernel.
class BorrowedTensor {
 public:
  template <class T>
  BorrowedTensor(T* data, int64_t dims, const int64_t* sizes, const int64_t* strides,
                 int32_t device_type, int32_t device_index) {
    using Element = std::remove_const_t<T>;
    static const int32_t dtype = type_code(kScalarType<Element>);
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_create_tensor_from_blob(const_cast<Element*>(data), dims, sizes, strides, 0,
                                           dtype, device_type, device_index, &handle_));
  }
  ~BorrowedTensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  BorrowedTensor(const BorrowedTensor&) = delete;
  BorrowedTensor& operator=(const BorrowedTensor&) = delete;
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// Makes borrowed tensors on one device, and the copies between them that every backend needs.
class Borrower {
 public:
  Borrower(int32_t device_type, int32_t device_index) : type_(device_type), index_(device_index) {}

  template <class T>
  BorrowedTensor borrow(const Matrix<T>& m) const {
    const int64_t sizes[] = {m.rows, m.columns}, strides[] = {m.row_stride, m.column_stride};
    return BorrowedTensor(m.data, 2, sizes, strides, type_, index_);
  }

  template <class To, class From>
  void copy(const Matrix<To>& out, const Matrix<const From>& from) const {
    copy(borrow(out), borrow(from));
  }

  // out (+)= a b, where a and b have the same type, and out has that type or a wider one.  type:
  // all are converted to it for the product.
  template <class C, class T>
  void multiply(const Matrix<C>& out, const Matrix<const T>& a, const Matrix<const T>& b,
                bool accumulate, ScalarType type) const {
    const auto wide = [&](const auto& m) {
      return torch::stable::to(Tensor(borrow(m).release()), type);
    };
    const Tensor product = torch::stable::matmul(wide(a), wide(b));
    Tensor result(borrow(out).release());
    torch::stable::copy_(result,
                         accumulate ? torch::stable::subtract(wide(out), product, -1) : product);
  }

  // Copies `steps` steps of `from`, from step `begin` on, to `out` from step `first` on: all rows
  // that both have.
  template <class To, class From>
  void copy_steps(const Sequence<To>& out, int64_t first, const Sequence<const From>& from,
                  int64_t begin, int64_t steps, int64_t batch) const {
    for (int64_t t = 0; t < steps;) {
      const int64_t alike =
          std::min(out.alike_from(first + t, steps - t), from.alike_from(begin + t, steps - t));
      const int64_t rows = std::min(out.rows_of(first + t, batch), from.rows_of(begin + t, batch));
      copy(borrow(out, first + t, alike, rows), borrow(from, begin + t, alike, rows));
      t += alike;
    }
  }

 private:
  template <class T>
  BorrowedTensor borrow(const Sequence<T>& s, int64_t t, int64_t steps, int64_t rows) const {
    const int64_t sizes[] = {steps, rows, s.width};
    const int64_t strides[] = {s.step_stride(t), s.stride_b, s.stride_w};
    return BorrowedTensor(s.at(t), 3, sizes, strides, type_, index_);
  }
  static void copy(const BorrowedTensor& out, const BorrowedTensor& from) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(out.get(), from.get(), 0));
  }

  int32_t type_, index_;
};

}  // namespace fusedrnn
