// Tensors in the operators: shapes as text, and allocation.
#pragma once
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "../base/checked.h"
#include "stable.h"

namespace fusedrnn {

using Weights = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;

inline std::string shape_text(torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i == 0 ? "" : ", ") + text_of(sizes[i]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

inline bool has_shape(const Tensor& tensor, const std::vector<int64_t>& shape) {
  const auto sizes = tensor.sizes();
  return std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end());
}

// A view with other sizes and strides, from element `first` on.
inline Tensor view(const Tensor& tensor, const std::vector<int64_t>& sizes,
                   const std::vector<int64_t>& strides, int64_t first = 0) {
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      tensor.get(), int64_t(sizes.size()), sizes.data(), strides.data(), first, &handle));
  return Tensor(handle);
}

// Contiguous memory in the sizes of another tensor.
inline Tensor in_shape_of(const Tensor& other, const Tensor& contiguous) {
  const std::vector<int64_t> shape(other.sizes().begin(), other.sizes().end());
  if (has_shape(contiguous, shape)) return contiguous;
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= shape[i]) strides[i] = stride;
  return view(contiguous, shape, strides);
}

// The reason in an error from torch.  Its stable ABI gives it in the lines after the first, which
// is about torch's headers; torch 2.11 and 2.12 give none.
inline std::string reason_of(const std::exception& error) {
  const std::string text = error.what();
  const size_t end = text.find('\n');
  return end == std::string::npos ? "" : ": " + text.substr(end + 1);
}

// A new tensor, of zeros or uninitialised.  Calls torch's C function, since its C++ wrapper first
// asks for what the two tensors have in common and takes twice the time.
inline Tensor allocate(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype,
                       const char* what, bool zeros = false) {
  int32_t type = type_code(dtype);
  AtenTensorHandle handle = nullptr;
  try {
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_aten_new_empty(like.get(), shape.data(), int64_t(shape.size()), &type,
                                  /*layout=*/nullptr, /*device=*/nullptr, 0, nullptr, &handle));
    Tensor tensor(handle);
    if (zeros && tensor.numel() > 0) {
      if (tensor.is_cpu()) {
        std::memset(tensor.mutable_data_ptr(), 0, size_t(tensor.numel()) * tensor.element_size());
      } else {
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(handle));
      }
    }
    return tensor;
  } catch (const std::exception& error) {
    fail("out of memory: there is no room for ", what, ", ", torch::headeronly::toString(dtype),
         " of shape ", shape_text(shape), reason_of(error));
  }
}

}  // namespace fusedrnn
