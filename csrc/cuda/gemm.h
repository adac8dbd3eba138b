// Matrix products by cuBLASLt.  Which of its algorithms serves a shape best is asked once per
// process and shape; a call then takes the library's handle, workspace and stream as arguments, so
// that it can be recorded into a graph and gives the same bits there.
#pragma once
#include <cublasLt.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../matrix.h"
#include "../plan.h"
#include "../scalar.h"

namespace fusedrnn::cuda {

template <class T>
constexpr cudaDataType_t kDataType = CUDA_R_32F;
template <>
inline constexpr cudaDataType_t kDataType<double> = CUDA_R_64F;
template <>
inline constexpr cudaDataType_t kDataType<BFloat16> = CUDA_R_16BF;
template <>
inline constexpr cudaDataType_t kDataType<Half> = CUDA_R_16F;

// cuBLASLt stores columns one after the other.  A matrix that has its rows so is the transpose of
// what it reads.
struct Operand {
  const void* data;
  int64_t rows, columns, leading;  // as stored
  bool transposed;                 // when read

  // m^T, by its memory
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

// Everything that one shape needs but its addresses.
struct GemmPlan {
  cublasLtMatmulDesc_t multiply = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, out = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
};

class Gemms {
 public:
  // tf32: whether products of floats may be rounded to TF32
  Gemms(int device, bool tf32) : shared_(of_device(device)), tf32_(tf32) {}

  // out (+)= a b for matrices that are operands, out's columns one after the other; O: of a and b,
  // C: of out.
  template <class O, class C>
  cublasStatus_t operator()(const Matrix<C>& out, const Matrix<const O>& a,
                            const Matrix<const O>& b, bool accumulate, void* workspace,
                            cudaStream_t stream) {
    // By columns it is out^T = b^T a^T.
    const Operand left = Operand::transpose_of(b), right = Operand::transpose_of(a),
                  result = Operand::transpose_of(out);
    const GemmPlan* plan = nullptr;
    const cublasStatus_t found = find<O, C>(left, right, result, &plan);
    if (found != CUBLAS_STATUS_SUCCESS) return found;
    const Acc<O> alpha = 1, beta = accumulate ? 1 : 0;
    return cublasLtMatmul(shared_.handle, plan->multiply, &alpha, left.data, plan->a, right.data,
                          plan->b, &beta, out.data, plan->out, out.data, plan->out,
                          &plan->algorithm, workspace, kGemmWorkspaceBytes, stream);
  }

 private:
  using OperandKey = decltype(std::declval<Operand>().key());
  using Key = std::tuple<int, int, bool, OperandKey, OperandKey, OperandKey>;

  // One for each device, for as long as the process lives: nobody may use CUDA when it ends.
  struct Shared {
    cublasLtHandle_t handle = nullptr;
    std::mutex mutex;
    std::map<Key, GemmPlan> plans;
  };
  static Shared& of_device(int device) {
    static std::mutex mutex;
    static auto& all = *new std::map<int, Shared>;
    const std::lock_guard lock(mutex);
    return all[device];
  }

  template <class O, class C>
  cublasStatus_t find(const Operand& a, const Operand& b, const Operand& out,
                      const GemmPlan** plan) {
    const Key key{kDataType<O>, kDataType<C>, tf32_, a.key(), b.key(), out.key()};
    for (const auto& [known, its_plan] : recent_) {
      if (known == key) {
        *plan = its_plan;
        return CUBLAS_STATUS_SUCCESS;
      }
    }
    const std::lock_guard lock(shared_.mutex);
    auto at = shared_.plans.find(key);
    if (at == shared_.plans.end()) {
      if (shared_.handle == nullptr) {
        const cublasStatus_t created = cublasLtCreate(&shared_.handle);
        if (created != CUBLAS_STATUS_SUCCESS) return created;
      }
      GemmPlan made;
      const cublasStatus_t status = make<O, C>(a, b, out, made);
      if (status != CUBLAS_STATUS_SUCCESS) {
        destroy(made);
        return status;
      }
      at = shared_.plans.emplace(key, made).first;
    }
    recent_.emplace_back(key, &at->second);
    *plan = &at->second;
    return CUBLAS_STATUS_SUCCESS;
  }

  template <class O, class C>
  cublasStatus_t make(const Operand& a, const Operand& b, const Operand& out,
                      GemmPlan& plan) const {
    constexpr bool kIsDouble = std::is_same_v<O, double>;
    const auto compute = kIsDouble                           ? CUBLAS_COMPUTE_64F
                         : std::is_same_v<O, float> && tf32_ ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                             : CUBLAS_COMPUTE_32F;
    cublasStatus_t status =
        cublasLtMatmulDescCreate(&plan.multiply, compute, kIsDouble ? CUDA_R_64F : CUDA_R_32F);
    const auto then = [&](auto call) {
      if (status == CUBLAS_STATUS_SUCCESS) status = call();
    };
    const auto transpose = [&](cublasLtMatmulDescAttributes_t which, bool transposed) {
      const cublasOperation_t operation = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
      then([&] {
        return cublasLtMatmulDescSetAttribute(plan.multiply, which, &operation, sizeof operation);
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
    layout(plan.a, kDataType<O>, a);
    layout(plan.b, kDataType<O>, b);
    layout(plan.out, kDataType<C>, out);

    cublasLtMatmulPreference_t preference = nullptr;
    then([&] { return cublasLtMatmulPreferenceCreate(&preference); });
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
      then([&] {
        return cublasLtMatmulPreferenceSetAttribute(preference, which, &value, sizeof value);
      });
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(kGemmWorkspaceBytes));
    // A sum that is split is put together in float (double), whatever the type of the result.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a.alignment_bytes());
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b.alignment_bytes());
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out.alignment_bytes());
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out.alignment_bytes());
    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    then([&] {
      return cublasLtMatmulAlgoGetHeuristic(shared_.handle, plan.multiply, plan.a, plan.b, plan.out,
                                            plan.out, preference, 1, &best, &found);
    });
    if (preference != nullptr) cublasLtMatmulPreferenceDestroy(preference);
    then([&] { return found == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : best.state; });
    plan.algorithm = best.algo;
    return status;
  }

  static void destroy(const GemmPlan& plan) {
    if (plan.multiply != nullptr) cublasLtMatmulDescDestroy(plan.multiply);
    for (cublasLtMatrixLayout_t m : {plan.a, plan.b, plan.out}) {
      if (m != nullptr) cublasLtMatrixLayoutDestroy(m);
    }
  }

  Shared& shared_;
  bool tf32_;
  std::vector<std::pair<Key, const GemmPlan*>> recent_;  // those of this call
};

}  // namespace fusedrnn::cuda
