// The programs that Python has added, by number.  They are never removed: a graph of autograd may
// hold their numbers as long as the process lives.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "../base/checked.h"
#include "../program/flow.h"
#include "../program/numbers.h"
#include "stable.h"
#include "step_constants.h"

namespace fusedrnn {

// A program, and the library of its stages for tensors of one type.
struct KnownProgram {
  program::Program program;
  program::Flow flow;
  program::Stages stages;
  ScalarType dtype;

  KnownProgram(program::Program&& read, const program::Stages& stages, ScalarType dtype)
      : program(std::move(read)), flow(program), stages(stages), dtype(dtype) {}
  KnownProgram(const KnownProgram&) = delete;
  KnownProgram& operator=(const KnownProgram&) = delete;

  const StepConstants& step_constants() const {
    FUSEDRNN_CHECK(constants_ != nullptr, "nobody has said how this program's weights are made");
    return *constants_;
  }

 private:
  friend class Programs;
  std::unique_ptr<const StepConstants> constants_;
};

// Each library of the package has its own programs: those of the operators for the CPU are counted
// from 0 on, and those of the operators for GPUs from kFirstOnGpu on.  So neither can run a program
// whose stages are compiled for the other.
class Programs {
 public:
  static constexpr int64_t kFirstOnGpu = int64_t(1) << 32;

  static Programs& all() {
    static Programs programs;
    return programs;
  }

  // constants: how weights and vectors are made of those of a step, or nothing.
  int64_t add(const int64_t* numbers, int64_t count, const int64_t* constants,
              int64_t constants_count, const program::Stages& stages, int64_t dtype) {
    FUSEDRNN_CHECK(stages.run != nullptr || stages.launch != nullptr,
                   "a program needs the function of its stages");
    auto known =
        std::make_unique<KnownProgram>(program::read(numbers, count), stages, dtype_of(dtype));
    if (constants != nullptr) {
      known->constants_ = std::make_unique<const StepConstants>(
          StepConstants::read(constants, constants_count, known->program));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& programs = programs_of(stages.is_for_gpu());
    programs.push_back(std::move(known));
    return int64_t(programs.size()) - 1 + (stages.is_for_gpu() ? kFirstOnGpu : 0);
  }
  const KnownProgram& at(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool is_for_gpu = number >= kFirstOnGpu;
    const auto& programs = programs_of(is_for_gpu);
    const int64_t index = number - (is_for_gpu ? kFirstOnGpu : 0);
    FUSEDRNN_CHECK(index >= 0 && index < int64_t(programs.size()), "there is no program ", number,
                   " for these tensors");
    return *programs[size_t(index)];
  }

  // dtype: the bytes of an element, with a minus for the type of 16 bits that has a float's
  // exponent.
  static ScalarType dtype_of(int64_t dtype) {
    switch (dtype) {
      case 8: return ScalarType::Double;
      case 4: return ScalarType::Float;
      case 2: return ScalarType::Half;
      case -2: return ScalarType::BFloat16;
      default: fail("a program must be of a type of 8, 4, 2 or -2 bytes, got ", dtype);
    }
  }

 private:
  using List = std::vector<std::unique_ptr<const KnownProgram>>;
  List& programs_of(bool is_for_gpu) { return is_for_gpu ? for_gpus_ : for_cpu_; }

  std::mutex mutex_;
  List for_cpu_, for_gpus_;
};

}  // namespace fusedrnn
