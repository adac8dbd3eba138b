// What the driver says of persistent kernels: how many of their blocks a GPU runs at once, asked
// once for each, and which of them it has refused to launch.
#pragma once
#include <array>
#include <map>
#include <mutex>
#include <set>

#include "../base/gpus.h"
#include "../persistent/arguments.h"

namespace fusedrnn::cuda {

class BlockCounts {
 public:
  static BlockCounts& of_process() {
    static auto& all = *new BlockCounts;  // for ever: torch may be gone before
    return all;
  }

  // count(kernel): asks the driver, which may not answer this time (kUnknown).
  template <class F>
  int64_t most(const PersistentKernel& kernel, const F& count) {
    const std::lock_guard lock(mutex_);
    if (refused_.count(key(kernel, 0)) > 0) return kRefused;
    const Key of_kernel = key(kernel, kernel.shared_bytes);
    const auto at = most_.find(of_kernel);
    if (at != most_.end()) return at->second;
    const int64_t counted = count(kernel);
    if (counted == kUnknown) return INT64_MAX;  // then the launch will tell
    return most_.emplace(of_kernel, counted).first->second;
  }

  // For the rest of the process: what else runs on a GPU, and which part of it this process has,
  // seldom changes.
  void refuse(const PersistentKernel& kernel) {
    const std::lock_guard lock(mutex_);
    refused_.insert(key(kernel, 0));
  }

  void forget() {  // all of it: for tests
    const std::lock_guard lock(mutex_);
    most_.clear();
    refused_.clear();
  }

 private:
  using Key = std::array<int64_t, 6 + kMostStages>;
  static Key key(const PersistentKernel& k, int64_t shared_bytes) {
    Key key{k.device, k.is_backward, k.type, k.depth, k.num_stages, shared_bytes};
    for (int s = 0; s < k.num_stages; ++s) key[size_t(6 + s)] = int64_t(k.stages[s]);
    return key;
  }

  std::mutex mutex_;
  std::map<Key, int64_t> most_;
  std::set<Key> refused_;
};

}  // namespace fusedrnn::cuda
