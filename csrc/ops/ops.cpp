// Defines the operators' schemas, and implements them on the CPU.
#include "ops.h"

#include "../program/stage.h"
#include "cpu_backend.h"

namespace fusedrnn {
namespace {

struct CpuPlatform {
  CpuPlatform(const Tensor& /*input*/, const Tuning&) {}
  static const Gpu* gpu() { return nullptr; }
  void keep(const Tensor& /*host*/) const {}  // the CPU reads host memory directly

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

STABLE_TORCH_LIBRARY(fusedrnn, m) { fusedrnn::define_operators(m); }

STABLE_TORCH_LIBRARY_IMPL(fusedrnn, CPU, m) {
  fusedrnn::implement_operators<fusedrnn::CpuPlatform>(m);
}

// Called by Python through ctypes.
extern "C" __attribute__((visibility("default"))) void fusedrnn_set_signal_check(bool (*check)()) {
  fusedrnn::cpu::signal_check = check;
}

// What a library of generated stages has to fit: the processor, and StageArgs as compiled in here.
extern "C" __attribute__((visibility("default"))) int64_t fusedrnn_isa() {
  return int64_t(fusedrnn::cpu::widest_isa());
}
extern "C" __attribute__((visibility("default"))) int64_t fusedrnn_abi() {
  return fusedrnn::program::kAbi;
}
