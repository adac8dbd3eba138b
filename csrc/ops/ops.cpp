// Defines the operators' schemas, and implements them on the CPU.
#include "ops.h"

#include "../program/stage.h"
#include "cpu_backend.h"
#include "program_call.h"
#include "with_team.h"

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
  template <class F>
  void compute(int64_t rows, int64_t row_work, bool is_backward, const F& f) const {
    with_team(rows, row_work, is_backward, f);
  }
};

}  // namespace
}  // namespace fusedrnn

STABLE_TORCH_LIBRARY(fusedrnn, m) {
  fusedrnn::define_operators(m);
  fusedrnn::define_program_operators(m);
}

STABLE_TORCH_LIBRARY_IMPL(fusedrnn, CPU, m) {
  fusedrnn::implement_operators<fusedrnn::CpuPlatform>(m);
  fusedrnn::implement_program_operators<fusedrnn::CpuPlatform>(m);
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

// Adds a program: what Program.numbers() of fusedrnn/_compiler/program.py gives, the numbers that
// StepConstants::read() of step_constants.h reads, or a null pointer; the function of the library
// of its stages, and their type as in Programs::add.  Returns its number.
extern "C" __attribute__((visibility("default"))) int64_t fusedrnn_add_program(
    const int64_t* numbers, int64_t count, const int64_t* constants, int64_t constants_count,
    fusedrnn::program::StageFunction stages, int64_t dtype, char* error, int64_t error_size) {
  return fusedrnn::with_error(error, error_size, [&] {
    return fusedrnn::Programs::all().add(numbers, count, constants, constants_count,
                                         {stages, nullptr}, dtype);
  });
}

extern "C" __attribute__((visibility("default"))) int64_t fusedrnn_program_chunk(
    int64_t program, int64_t seq_len, int64_t batch, int64_t dtype, int64_t chunk_size,
    int64_t workspace_bytes, int64_t* plan, char* error, int64_t error_size) {
  return fusedrnn::write_program_plan<fusedrnn::cpu::Memory>(
      program, seq_len, batch, dtype, chunk_size, workspace_bytes, plan, error, error_size);
}
