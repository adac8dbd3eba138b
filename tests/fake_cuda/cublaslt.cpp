// cuBLASLt on the fake GPU: matrices are stored by columns, and what the documentation forbids is
// an error. Sums are in double, and the workspace is overwritten.
#include <cublasLt.h>

#include <cstring>
#include <vector>

#include "../../csrc/base/scalar.h"
#include "fake.h"

struct FakeProduct {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  bool transposed[2];
};
struct FakeLayout {
  cudaDataType_t type;
  int64_t rows, columns, leading;
};
struct FakePreference {
  uint64_t workspace_bytes = 0;
  uint32_t alignment_bytes[4] = {256, 256, 256, 256};
};
struct cublasLtContext {};

namespace fake {
namespace {

cublasLtContext context;
constexpr uintptr_t kWorkspaceAlignment = 256;

cublasStatus_t refuse(const std::string& why, cublasStatus_t status = CUBLAS_STATUS_INVALID_VALUE) {
  note("cuBLASLt: " + why);
  return status;
}

size_t size_of(cudaDataType_t type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }
double read(const void* at, int64_t i, cudaDataType_t type) {
  using namespace fusedrnn;
  switch (type) {
    case CUDA_R_64F: return static_cast<const double*>(at)[i];
    case CUDA_R_32F: return static_cast<const float*>(at)[i];
    case CUDA_R_16BF: return widen(static_cast<const BFloat16*>(at)[i]);
    case CUDA_R_16F: return widen(static_cast<const Half*>(at)[i]);
  }
  return 0;
}
void write(void* at, int64_t i, cudaDataType_t type, double value) {
  using namespace fusedrnn;
  switch (type) {
    case CUDA_R_64F: static_cast<double*>(at)[i] = value; return;
    case CUDA_R_32F: static_cast<float*>(at)[i] = float(value); return;
    case CUDA_R_16BF: static_cast<BFloat16*>(at)[i] = narrow<BFloat16>(float(value)); return;
    case CUDA_R_16F: static_cast<Half*>(at)[i] = narrow<Half>(float(value)); return;
  }
}
double rounded_to_tf32(double value) {
  float number = float(value);
  uint32_t bits;
  memcpy(&bits, &number, 4);
  if (number - number == 0) bits = (bits + 0x1000) & ~0x1fffu;  // except NaN and infinity
  memcpy(&number, &bits, 4);
  return number;
}

bool has_types(const FakeProduct& product, cudaDataType_t in, cudaDataType_t out) {
  const bool in_float = product.scale == CUDA_R_32F;
  switch (product.compute) {
    case CUBLAS_COMPUTE_64F:
      return product.scale == CUDA_R_64F && in == CUDA_R_64F && out == CUDA_R_64F;
    case CUBLAS_COMPUTE_32F_FAST_TF32: return in_float && in == CUDA_R_32F && out == CUDA_R_32F;
    case CUBLAS_COMPUTE_32F:
      return in_float && in != CUDA_R_64F && (out == in || out == CUDA_R_32F);
  }
  return false;
}

cublasStatus_t check(const FakeProduct& product, const FakeLayout& a, const FakeLayout& b,
                     const FakeLayout& c, const FakeLayout& d) {
  for (const FakeLayout* m : {&a, &b, &c, &d}) {
    if (m->rows <= 0 || m->columns <= 0 || m->leading < m->rows) {
      return refuse("a matrix of " + std::to_string(m->rows) + " rows and " +
                    std::to_string(m->columns) + " columns, " + std::to_string(m->leading) +
                    " numbers apart");
    }
  }
  const auto rows = [](const FakeLayout& m, bool transposed) {
    return transposed ? m.columns : m.rows;
  };
  const bool *t = product.transposed, sizes = rows(a, !t[0]) == rows(b, t[1]) &&
                                              rows(a, t[0]) == d.rows &&
                                              rows(b, !t[1]) == d.columns;
  if (!sizes || c.rows != d.rows || c.columns != d.columns) return refuse("sizes do not match");
  if (a.type != b.type || c.type != d.type || !has_types(product, a.type, d.type)) {
    return refuse("no such combination of types", CUBLAS_STATUS_NOT_SUPPORTED);
  }
  return CUBLAS_STATUS_SUCCESS;
}

// The bytes from the first number to the last.
bool is_on_gpu(const void* memory, const FakeLayout& m) {
  const int64_t numbers = (m.columns - 1) * m.leading + m.rows;
  return fake::is_on_gpu(memory, size_t(numbers) * size_of(m.type));
}

struct Operands {
  FakeProduct product;
  FakeLayout a, b, c, d;
  double alpha, beta;
  const void *at_a, *at_b, *at_c;
  void* at_d;
};
void multiply(const Operands& o) {
  const bool tf32 = o.product.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  // op(m), with its columns or rows in order.
  const auto load = [&](const void* at, const FakeLayout& m, bool by_rows) {
    std::vector<double> numbers(size_t(m.rows * m.columns));
    for (int64_t i = 0; i < m.rows; ++i) {
      for (int64_t j = 0; j < m.columns; ++j) {
        const double number = read(at, i + j * m.leading, m.type);
        const int64_t place = by_rows ? i * m.columns + j : i + j * m.rows;
        numbers[size_t(place)] = tf32 ? rounded_to_tf32(number) : number;
      }
    }
    return numbers;
  };
  const bool is_lost = options.bug == Bug::LostTranspose && o.a.rows == o.a.columns;
  const std::vector<double> a = load(o.at_a, o.a, !(o.product.transposed[0] && !is_lost)),
                            b = load(o.at_b, o.b, o.product.transposed[1]);
  const int64_t depth = o.product.transposed[0] ? o.a.rows : o.a.columns;
  for (int64_t i = 0; i < o.d.rows; ++i) {
    for (int64_t j = 0; j < o.d.columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        sum += a[size_t(i * depth + k)] * b[size_t(j * depth + k)];
      }
      sum *= o.alpha;
      if (o.beta != 0) sum += o.beta * read(o.at_c, i + j * o.c.leading, o.c.type);
      write(o.at_d, i + j * o.d.leading, o.d.type, sum);
    }
  }
}

}  // namespace
}  // namespace fake

using namespace fake;

const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "<unknown>";
}
const char* cublasGetStatusString(cublasStatus_t status) { return cublasLtGetStatusString(status); }
cublasStatus_t cublasGetMathMode(cublasHandle_t /*handle*/, cublasMath_t* mode) {
  *mode = options.torch_tf32 ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = &context;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* product, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  *product = new FakeProduct{compute, scale, {false, false}};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t product) {
  delete product;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t product,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t size_bytes) {
  int32_t number = 0;
  if (size_bytes != sizeof number) return refuse("the size of a product's attribute");
  memcpy(&number, value, sizeof number);
  if (attribute == CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET) {
    return number >= 0 ? CUBLAS_STATUS_SUCCESS : refuse("so many multiprocessors");
  }
  if (number != CUBLAS_OP_N && number != CUBLAS_OP_T) return refuse("an operation");
  product->transposed[attribute - CUBLASLT_MATMUL_DESC_TRANSA] = number == CUBLAS_OP_T;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type,
                                          uint64_t rows, uint64_t columns, int64_t leading) {
  *layout = new FakeLayout{type, int64_t(rows), int64_t(columns), leading};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new FakePreference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t size_bytes) {
  const bool is_workspace = attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
  if (size_bytes != (is_workspace ? sizeof(uint64_t) : sizeof(uint32_t))) {
    return refuse("the size of a preference");
  }
  if (is_workspace) {
    memcpy(&preference->workspace_bytes, value, size_bytes);
  } else if (attribute >= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES) {
    const int which = attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
    memcpy(&preference->alignment_bytes[which], value, size_bytes);
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t* results,
                                              int* found) {
  *found = 0;
  if (handle != &context) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (wanted < 1) return refuse("no algorithm is wanted");
  if (any_is_capturing()) {
    return refuse("an algorithm cannot be chosen while recording", CUBLAS_STATUS_NOT_SUPPORTED);
  }
  if (options.no_gemm == 1) return CUBLAS_STATUS_SUCCESS;
  if (options.no_gemm == 2) return CUBLAS_STATUS_NOT_SUPPORTED;
  ++searches;
  const cublasStatus_t status = check(*product, *a, *b, *c, *d);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  results[0] = {.algo = {.compute = product->compute,
                         .type = a->type,
                         .result_type = d->type,
                         .transposed = {product->transposed[0], product->transposed[1]},
                         .alignment_bytes = {},
                         .workspace_bytes = preference->workspace_bytes,
                         .columns = {a->columns, b->columns, d->columns}},
                .workspaceSize = preference->workspace_bytes,
                .state = CUBLAS_STATUS_SUCCESS,
                .wavesCount = 1,
                .reserved = {}};
  memcpy(results[0].algo.alignment_bytes, preference->alignment_bytes,
         sizeof preference->alignment_bytes);
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                              const void* alpha, const void* a, cublasLtMatrixLayout_t layout_a,
                              const void* b, cublasLtMatrixLayout_t layout_b, const void* beta,
                              const void* c, cublasLtMatrixLayout_t layout_c, void* d,
                              cublasLtMatrixLayout_t layout_d,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  if (handle != &context) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (options.no_gemm == 3) return CUBLAS_STATUS_NOT_SUPPORTED;
  const cublasStatus_t status = check(*product, *layout_a, *layout_b, *layout_c, *layout_d);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  if (c == d && layout_c->leading != layout_d->leading) return refuse("in place, in two layouts");

  // Without an algorithm the library chooses one, which it cannot do while recording.
  if (algorithm == nullptr) return refuse("no algorithm");
  const bool *transposed = product->transposed, *known = algorithm->transposed;
  if (algorithm->compute != product->compute || algorithm->type != layout_a->type ||
      algorithm->result_type != layout_d->type || known[0] != transposed[0] ||
      known[1] != transposed[1]) {
    return refuse("an algorithm for another kind of product");
  }
  const int64_t columns[] = {layout_a->columns, layout_b->columns, layout_d->columns};
  if (options.no_gemm == 4 && !std::equal(columns, columns + 3, algorithm->columns)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  const void* const at[] = {a, b, c, d};
  const FakeLayout* const layouts[] = {layout_a, layout_b, layout_c, layout_d};
  for (int i = 0; i < 4; ++i) {
    if (reinterpret_cast<uintptr_t>(at[i]) % algorithm->alignment_bytes[i] != 0) {
      return refuse("an address that is less aligned than the algorithm takes for granted");
    }
    if (!is_on_gpu(at[i], *layouts[i])) return refuse("a matrix beside the memory");
  }
  if (workspace_bytes < algorithm->workspace_bytes ||
      reinterpret_cast<uintptr_t>(workspace) % kWorkspaceAlignment != 0 ||
      !fake::is_on_gpu(workspace, workspace_bytes)) {
    return refuse("the workspace is too small, not at a multiple of 256, or beside the memory");
  }

  ++counts.gemms;
  const auto scalar = [&](const void* at) { return fake::read(at, 0, product->scale); };
  Operands operands{*product,     *layout_a, *layout_b, *layout_c, *layout_d, scalar(alpha),
                    scalar(beta), a,         b,         c,         d};
  if (options.bug == Bug::LostStride) {
    for (FakeLayout* m : {&operands.a, &operands.b}) m->leading = m->rows;
  }
  const cudaError_t error = enqueue(stream, [=, used = algorithm->workspace_bytes] {
    memset(workspace, 0xff, used);
    multiply(operands);
  });
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
