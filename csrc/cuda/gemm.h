// Matrix products by cuBLASLt.  Its best algorithm for a shape is asked for once per process, for
// all similar numbers of rows, since sequences come in any length.  A call takes the library's
// handle, workspace and stream as arguments, so that it can be recorded into a graph and gives the
// same bits there.
#pragma once
#include <cublasLt.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../base/matrix.h"
#include "../base/scalar.h"

namespace fusedrnn::cuda {

template <class T>
constexpr cudaDataType_t kDataType = CUDA_R_32F;
template <>
inline constexpr cudaDataType_t kDataType<double> = CUDA_R_64F;
template <>
inline constexpr cudaDataType_t kDataType<BFloat16> = CUDA_R_16BF;
template <>
inline constexpr cudaDataType_t kDataType<Half> = CUDA_R_16F;

// cuBLASLt stores matrices by columns, so it reads a matrix stored by rows as its transpose.
struct Operand {
  const void* data;
  int64_t rows, columns, leading;  // as stored
  bool transposed;                 // when read

  // m^T, described by its memory.
  template <class T>
  static Operand transpose_of(const Matrix<T>& m) {
    if ((m.column_stride == 1 || m.columns == 1) && (m.row_stride >= m.columns || m.rows == 1)) {
      return {m.data, m.columns, m.rows, std::max(m.row_stride, m.columns), false};
    }
    return {m.data, m.rows, m.columns, std::max(m.column_stride, m.rows), true};
  }
  uint32_t alignment_bytes() const {
    const auto address = reinterpret_cast<uintptr_t>(data);
    return uint32_t(std::min<uintptr_t>(address & (~address + 1), 256));
  }
  auto key() const { return std::tuple(rows, columns, leading, transposed, alignment_bytes()); }
};

// Rounds up a number of rows to one that shares its algorithm, at most an eighth more.
inline int64_t rows_alike(int64_t rows) {
  int64_t step = 1;
  while (16 * step <= rows) step *= 2;
  return (rows + step - 1) / step * step;
}

// The description of a product, for choosing an algorithm and for computing.
class GemmPlan {
 public:
  GemmPlan() = default;
  ~GemmPlan() {
    if (multiply_ != nullptr) cublasLtMatmulDescDestroy(multiply_);
    for (cublasLtMatrixLayout_t m : {a_, b_, out_}) {
      if (m != nullptr) cublasLtMatrixLayoutDestroy(m);
    }
  }
  GemmPlan(const GemmPlan&) = delete;
  GemmPlan& operator=(const GemmPlan&) = delete;

  template <class O, class C>
  cublasStatus_t describe(const Operand& a, const Operand& b, const Operand& out, bool tf32) {
    constexpr bool kIsDouble = std::is_same_v<O, double>;
    const auto compute = kIsDouble                          ? CUBLAS_COMPUTE_64F
                         : std::is_same_v<O, float> && tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                            : CUBLAS_COMPUTE_32F;
    cublasStatus_t status =
        cublasLtMatmulDescCreate(&multiply_, compute, kIsDouble ? CUDA_R_64F : CUDA_R_32F);
    const auto then = [&](auto call) {
      if (status == CUBLAS_STATUS_SUCCESS) status = call();
    };
    const auto transpose = [&](cublasLtMatmulDescAttributes_t which, bool transposed) {
      const cublasOperation_t operation = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
      then([&] {
        return cublasLtMatmulDescSetAttribute(multiply_, which, &operation, sizeof operation);
      });
    };
    transpose(CUBLASLT_MATMUL_DESC_TRANSA, a.transposed);
    transpose(CUBLASLT_MATMUL_DESC_TRANSB, b.transposed);
    const auto layout = [&](cublasLtMatrixLayout_t& of, cudaDataType_t type, const Operand& m) {
      then([&] {
        return cublasLtMatrixLayoutCreate(&of, type, uint64_t(m.rows), uint64_t(m.columns),
                                          m.leading);
      });
    };
    layout(a_, kDataType<O>, a);
    layout(b_, kDataType<O>, b);
    layout(out_, kDataType<C>, out);
    return status;
  }

  // Chooses the algorithm for the described product; empty if cuBLASLt has none.
  cublasStatus_t choose(cublasLtHandle_t handle, const Operand& a, const Operand& b,
                        const Operand& out, int64_t workspace_bytes,
                        std::optional<cublasLtMatmulAlgo_t>& algorithm) const {
    cublasLtMatmulPreference_t preference = nullptr;
    cublasStatus_t status = cublasLtMatmulPreferenceCreate(&preference);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
      if (status != CUBLAS_STATUS_SUCCESS) return;
      status = cublasLtMatmulPreferenceSetAttribute(preference, which, &value, sizeof value);
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(workspace_bytes));
    // The parts of a split sum are added in float (or double), whatever the type of the result.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a.alignment_bytes());
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b.alignment_bytes());
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out.alignment_bytes());
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out.alignment_bytes());
    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = cublasLtMatmulAlgoGetHeuristic(handle, multiply_, a_, b_, out_, out_, preference, 1,
                                              &best, &found);
      if (status == CUBLAS_STATUS_SUCCESS && found > 0) status = best.state;
    }
    if (preference != nullptr) cublasLtMatmulPreferenceDestroy(preference);
    if (status == CUBLAS_STATUS_SUCCESS && found > 0) algorithm = best.algo;
    return status == CUBLAS_STATUS_NOT_SUPPORTED ? CUBLAS_STATUS_SUCCESS : status;
  }

  template <class S>
  cublasStatus_t compute(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm,
                         const void* a, const void* b, S beta, void* out, void* workspace,
                         int64_t workspace_bytes, cudaStream_t stream) const {
    const S alpha = 1;
    return cublasLtMatmul(handle, multiply_, &alpha, a, a_, b, b_, &beta, out, out_, out, out_,
                          &algorithm, workspace, size_t(workspace_bytes), stream);
  }

  // Whether a status means that the algorithm does not support this product.
  static bool is_unsupported(cublasStatus_t status) {
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
  }

 private:
  cublasLtMatmulDesc_t multiply_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, out_ = nullptr;
};

class Gemms {
 public:
  // tf32: whether products of float32 may be rounded to TF32.
  Gemms(int device, bool tf32) : shared_(of_device(device)), tf32_(tf32) {}

  // out (+)= a b for matrices that are operands, with contiguous rows of out.  O: type of a and
  // b; C: type of out.  Returns CUBLAS_STATUS_NOT_SUPPORTED if cuBLASLt has no algorithm; then
  // nothing has been done.
  template <class O, class C>
  cublasStatus_t operator()(const Matrix<C>& out, const Matrix<const O>& a,
                            const Matrix<const O>& b, bool accumulate, void* workspace,
                            int64_t workspace_bytes, cudaStream_t stream) {
    // Stored by columns, the product is out^T = b^T a^T.
    const Operand left = Operand::transpose_of(b), right = Operand::transpose_of(a),
                  result = Operand::transpose_of(out);
    const Key key = key_of<O, C>(left, right, result, workspace_bytes);
    Known* known = nullptr;
    for (Known& of_call : recent_) {
      if (of_call.key == key) known = &of_call;
    }
    if (known == nullptr) {
      known = &recent_.emplace_back(key);
      cublasStatus_t status = make_handle();
      if (status == CUBLAS_STATUS_SUCCESS) {
        status = known->plan.template describe<O, C>(left, right, result, tf32_);
      }
      if (status == CUBLAS_STATUS_SUCCESS) {
        status = choose<O, C>(left, right, result, workspace_bytes, *known);
      }
      if (status != CUBLAS_STATUS_SUCCESS) {
        recent_.pop_back();
        return status;
      }
    }
    const Acc<O> beta = accumulate ? 1 : 0;
    const auto compute = [&] {
      if (!known->algorithm) return CUBLAS_STATUS_NOT_SUPPORTED;
      return known->plan.compute(shared_.handle, *known->algorithm, left.data, right.data, beta,
                                 out.data, workspace, workspace_bytes, stream);
    };
    cublasStatus_t status = compute();
    if (!GemmPlan::is_unsupported(status) || known->is_exact) return status;
    // The algorithm for similar numbers of rows does not support these rows.  From now on they have
    // an algorithm of their own, if there is any.
    known->is_exact = true;
    known->algorithm.reset();
    status =
        known->plan.choose(shared_.handle, left, right, result, workspace_bytes, known->algorithm);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    status = compute();
    if (GemmPlan::is_unsupported(status)) known->algorithm.reset();
    remember(key, known->algorithm);
    return known->algorithm ? status : CUBLAS_STATUS_NOT_SUPPORTED;
  }

 private:
  using OperandKey = decltype(std::declval<Operand>().key());
  using Key = std::tuple<int, int, bool, int64_t, OperandKey, OperandKey, OperandKey>;
  using Algorithm = std::optional<cublasLtMatmulAlgo_t>;

  // One for each device.  Never destroyed, because CUDA must not be used when the process ends.
  struct Shared {
    cublasLtHandle_t handle = nullptr;
    std::mutex mutex;
    std::map<Key, Algorithm> algorithms;
  };
  static Shared& of_device(int device) {
    static std::mutex mutex;
    static auto& all = *new std::map<int, Shared>;
    const std::lock_guard lock(mutex);
    return all[device];
  }
  cublasStatus_t make_handle() {
    const std::lock_guard lock(shared_.mutex);
    return shared_.handle != nullptr ? CUBLAS_STATUS_SUCCESS : cublasLtCreate(&shared_.handle);
  }

  // A product shape that this call has used.
  struct Known {
    explicit Known(const Key& key) : key(key) {}
    Key key;
    GemmPlan plan;
    Algorithm algorithm;
    bool is_exact = false;  // whether the algorithm was chosen for exactly these rows
  };

  template <class O, class C>
  Key key_of(const Operand& a, const Operand& b, const Operand& out,
             int64_t workspace_bytes) const {
    return {kDataType<O>, kDataType<C>, tf32_, workspace_bytes, a.key(), b.key(), out.key()};
  }

  // Chooses an algorithm for similar numbers of rows of the sequence.  Those rows are rows of the
  // product, or in the gradient of a weight the terms of its sums.
  template <class O, class C>
  cublasStatus_t choose(const Operand& left, const Operand& right, const Operand& result,
                        int64_t workspace_bytes, Known& known) {
    if ((known.is_exact = recall(known.key, known.algorithm))) return CUBLAS_STATUS_SUCCESS;
    Operand a = left, b = right, out = result;
    if (!(left.transposed && right.transposed)) {
      const int64_t rows = rows_alike(right.columns);
      (right.transposed ? a : out).columns = b.columns = rows;
    }
    const Key key = key_of<O, C>(a, b, out, workspace_bytes);
    if (recall(key, known.algorithm)) return CUBLAS_STATUS_SUCCESS;
    GemmPlan plan;
    cublasStatus_t status = plan.describe<O, C>(a, b, out, tf32_);
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = plan.choose(shared_.handle, a, b, out, workspace_bytes, known.algorithm);
    }
    if (status == CUBLAS_STATUS_SUCCESS) remember(key, known.algorithm);
    return status;
  }

  bool recall(const Key& key, Algorithm& algorithm) {
    const std::lock_guard lock(shared_.mutex);
    const auto at = shared_.algorithms.find(key);
    if (at == shared_.algorithms.end()) return false;
    algorithm = at->second;
    return true;
  }
  void remember(const Key& key, const Algorithm& algorithm) {
    constexpr size_t kMost = 4096;  // a limit, because strides may differ in every call
    const std::lock_guard lock(shared_.mutex);
    if (shared_.algorithms.size() >= kMost) shared_.algorithms.clear();
    shared_.algorithms.insert_or_assign(key, algorithm);
  }

  Shared& shared_;
  bool tf32_;
  std::deque<Known> recent_;
};

}  // namespace fusedrnn::cuda
