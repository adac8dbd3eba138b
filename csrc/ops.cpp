// The operators' schemas, and what they are on the CPU.
#include "ops.h"

#include "cpu_backend.h"

namespace fusedrnn {
namespace {

struct CpuPlatform {
  static constexpr ChunkPlan kChunkPlan = kCpuChunks;
  CpuPlatform(const Tensor& /*input*/, bool /*replay*/) {}

  template <class T>
  CpuBackend<T> backend() const {
    return {};
  }
  FlushDenormalsInPool computing(int64_t multiply_adds) const {
    return FlushDenormalsInPool(multiply_adds);
  }
};

}  // namespace
}  // namespace fusedrnn

STABLE_TORCH_LIBRARY(fusedrnn, m) {
  m.def(
      "forward(str cell, Tensor input, Tensor hx, Tensor[] weights, Tensor? eps, Tensor? seed, "
      "int layer, int chunk_size, bool keep, bool replay) "
      "-> (Tensor output, Tensor h_n, Tensor kept)");
  m.def(
      "backward(Tensor? grad_output, Tensor? grad_h_n, str cell, Tensor input, Tensor hx, "
      "Tensor output, Tensor? kept, Tensor[] weights, Tensor? eps, Tensor? seed, int layer, "
      "int chunk_size, int needs, bool replay) "
      "-> (Tensor grad_input, Tensor grad_hx, Tensor grad_eps, Tensor grad_weights)");
}

STABLE_TORCH_LIBRARY_IMPL(fusedrnn, CPU, m) {
  m.impl("forward", TORCH_BOX(&fusedrnn::forward<fusedrnn::CpuPlatform>));
  m.impl("backward", TORCH_BOX(&fusedrnn::backward<fusedrnn::CpuPlatform>));
}
