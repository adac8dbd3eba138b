// The programs that Python has added, by number.  They are never removed: a graph of autograd may
// hold their numbers as long as the process lives.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "../base/checked.h"
#include "../program/flow.h"
#include "../program/read.h"
#include "stable.h"

namespace fusedrnn {

// A program, and the library of its stages for tensors of one type.
struct KnownProgram {
  program::Program program;
  program::Flow flow;
  program::StageFunction stages;
  ScalarType dtype;

  KnownProgram(program::Program&& read, program::StageFunction stages, ScalarType dtype)
      : program(std::move(read)), flow(program), stages(stages), dtype(dtype) {}
  KnownProgram(const KnownProgram&) = delete;
  KnownProgram& operator=(const KnownProgram&) = delete;
};

class Programs {
 public:
  static Programs& all() {
    static Programs programs;
    return programs;
  }

  int64_t add(const int64_t* numbers, int64_t count, program::StageFunction stages, int64_t dtype) {
    FUSEDRNN_CHECK(stages != nullptr, "a program needs the function of its stages");
    auto known = std::make_unique<const KnownProgram>(program::read(numbers, count), stages,
                                                      dtype_of(dtype));
    const std::lock_guard<std::mutex> lock(mutex_);
    programs_.push_back(std::move(known));
    return int64_t(programs_.size()) - 1;
  }
  const KnownProgram& at(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    FUSEDRNN_CHECK(number >= 0 && number < int64_t(programs_.size()), "there is no program ",
                   number);
    return *programs_[size_t(number)];
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
  std::mutex mutex_;
  std::vector<std::unique_ptr<const KnownProgram>> programs_;
};

}  // namespace fusedrnn
