// The GPU driver's answers about persistent kernels: how many of their blocks a GPU runs at once,
// asked once for each kernel, and which kernels it has refused to launch.
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
    static auto& all = *new BlockCounts;  // never freed: torch may be unloaded before
    return all;
  }

  // count(kernel) asks the driver, which may be unable to answer this time (kUnknown).
  template <class F>
  int64_t most(const PersistentKernel& kernel, const F& count) {
    const std::lock_guard lock(mutex_);
    if (refused_.count(key(kernel, 0)) > 0) return kRefused;
    const Key of_kernel = key(kernel, kernel.shared_bytes);
    const auto at = most_.find(of_kernel);
    if (at != most_.end()) return at->second;
    const int64_t counted = count(kernel);
    if (counted == kUnknown) return INT64_MAX;  // the launch will show
    return most_.emplace(of_kernel, counted).first->second;
  }

  // Remembers a refusal for the rest of the process, since other work on a GPU, and the part of it
  // that this process has, seldom change.
  void refuse(const PersistentKernel& kernel) {
    const std::lock_guard lock(mutex_);
    refused_.insert(key(kernel, 0));
  }

  void forget() {  // everything; only for tests
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
