// How long a chunk of time is, and how its workspace is divided.  Pure functions of sizes.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace fusedrnn {

// Rows (steps x batch) of a chunk's time-parallel GEMMs.  On the CPU their speed is flat from here
// on, while the workspace grows with every row and leaves the cache.
constexpr int64_t kCpuChunkRows = 256;

// Steps per chunk: `requested` if positive, else what fills kCpuChunkRows.
inline int64_t chunk_length(int64_t requested, int64_t seq_len, int64_t batch) {
  const int64_t wanted =
      requested > 0 ? requested : (kCpuChunkRows + batch - 1) / std::max<int64_t>(batch, 1);
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(seq_len, 1));
}

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
