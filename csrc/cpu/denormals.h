// Arithmetic on denormal numbers is slow on most processors, and the gradients of a saturated cell
// decay through them.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fusedrnn::cpu {

// Sets the thread's mode for denormals, and restores the previous mode when it is destroyed.
class Denormals {
 public:
  explicit Denormals(bool flushed) : mode_(get()) {
    set(flushed ? mode_ | kFlush : mode_ & ~kFlush);
  }
  ~Denormals() { set(mode_); }
  Denormals(const Denormals&) = delete;
  Denormals& operator=(const Denormals&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kFlush = 0x8040;  // flush to zero, denormals are zero
  static uint64_t get() { return _mm_getcsr(); }
  static void set(uint64_t mode) { _mm_setcsr(uint32_t(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlush = uint64_t(1) << 24;  // FPCR.FZ
  static uint64_t get() {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  static constexpr uint64_t kFlush = 0;
  static uint64_t get() { return 0; }
  static void set(uint64_t) {}
#endif
  uint64_t mode_;
};

struct FlushDenormals : Denormals {
  FlushDenormals() : Denormals(true) {}
};
struct KeepDenormals : Denormals {
  KeepDenormals() : Denormals(false) {}
};

}  // namespace fusedrnn::cpu
