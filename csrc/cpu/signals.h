// Signals such as that of Ctrl-C.  Python handles them only between two of its own instructions,
// and so not during an operator; a long operator asks for them itself.
#pragma once
#include <chrono>

#include "../base/checked.h"
#include "denormals.h"

namespace fusedrnn::cpu {

// Lets Python handle pending signals.  True if a handler has raised an exception, so that the
// operator must end.  Set by the code that loads this library, or null.
inline bool (*signal_check)() = nullptr;

class Signals {
 public:
  // Called wherever the operator can be ended.  Asks at most twice a second, since Python may make
  // it wait for a few milliseconds.
  void look() {
    if (signal_check == nullptr || Clock::now() < next_) return;
    const KeepDenormals keep;  // handlers run with the default mode
    if (signal_check()) fail("a signal has ended the call");
    next_ = Clock::now() + kEvery;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kEvery = std::chrono::milliseconds(500);
  Clock::time_point next_ = Clock::now() + kEvery;
};

}  // namespace fusedrnn::cpu
