// Signals, as that of Ctrl-C.  Python handles them between two of its own instructions, and so not
// while an operator works.  A long one asks for them by itself.
#pragma once
#include <chrono>

#include "../base/checked.h"
#include "denormals.h"

namespace fusedrnn::cpu {

// Has Python handle what signals there are; true if a handler has raised an exception, so that the
// call is to end.  Set by whoever loads this library, or null.
inline bool (*signal_check)() = nullptr;

class Signals {
 public:
  // To be called wherever all is consistent; it looks twice a second, since Python may make it wait
  // for a few milliseconds.
  void look() {
    if (signal_check == nullptr || Clock::now() < next_) return;
    const KeepDenormals keep;  // for handlers
    if (signal_check()) fail("a signal has ended the call");
    next_ = Clock::now() + kEvery;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kEvery = std::chrono::milliseconds(500);
  Clock::time_point next_ = Clock::now() + kEvery;
};

}  // namespace fusedrnn::cpu
