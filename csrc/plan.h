// How long a chunk of time is, how its workspace is divided, and what a GPU has.  Pure functions of
// sizes.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace fusedrnn {

// How many steps a chunk has.
//
// On the CPU the speed of time-parallel GEMMs is flat from 256 rows (steps x batch) on, while the
// workspace grows with every row and leaves the cache.
//
// A GPU gains up to some 4,096 rows.  But a chunk of 1/32 of the sequence needs as much memory as
// its whole output, so a chunk is no longer than that while it has 256 rows, and the workspace is
// the smaller part of what training takes.  (Counted for 16 bits; with float it is a third.)
struct ChunkPlan {
  int64_t least_rows, most_rows, chunks;

  // `requested` steps if positive
  constexpr int64_t length(int64_t requested, int64_t seq_len, int64_t batch) const {
    const auto steps_of = [batch](int64_t rows) {
      return (rows + batch - 1) / std::max<int64_t>(batch, 1);
    };
    int64_t steps = requested;
    if (requested <= 0) {
      steps = std::min(steps_of(most_rows), (seq_len + chunks - 1) / chunks);
      steps = std::max(steps, steps_of(least_rows));
    }
    return std::clamp<int64_t>(steps, 1, std::max<int64_t>(seq_len, 1));
  }
};
inline constexpr ChunkPlan kCpuChunks{256, 256, 1};
inline constexpr ChunkPlan kGpuChunks{256, 4'096, 32};

// What plans ask of a GPU.
struct Gpu {
  const char* name;
  int compute_capability;  // 10 major + minor
  int multiprocessors;
  int64_t shared_bytes;  // that one block may have
};
// By their data sheets, and the table of compute capabilities in the CUDA C++ Programming Guide.
inline constexpr Gpu kKnownGpus[] = {
    {"A100", 80, 108, 163 << 10},  {"H100", 90, 132, 227 << 10}, {"H200", 90, 132, 227 << 10},
    {"B200", 100, 148, 227 << 10}, {"L40S", 89, 142, 99 << 10},  {"RTX 4090", 89, 128, 99 << 10},
};

// That a GEMM may use on a GPU.  More serves one with few tiles to split its sum, which those over
// a whole chunk do not need.
inline constexpr int64_t kGemmWorkspaceBytes = 2 << 20;

// Divides one allocation into arrays.  With base == nullptr it only counts, so that the code that
// carves the workspace is also the code that says how large it is.
class Arena {
 public:
  explicit Arena(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    const size_t begin = size_;
    size_ += (size_t(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + begin);
  }
  int64_t size_bytes() const { return int64_t(size_); }

 private:
  static constexpr size_t kAlignment =
      256;  // what GEMMs on a GPU like best; a CPU's vectors need 64
  char* base_;
  size_t size_ = 0;
};

}  // namespace fusedrnn
