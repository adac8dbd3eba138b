// The memory of the fake GPU, from which torch allocates CPU tensors during a test.
//
// It starts as NaN.  Freed memory may be reused by later work in torch's stream: it becomes NaN in
// the order of that stream, and is returned when all work is done.
#undef TORCH_TARGET_VERSION  // an allocator is no part of torch's stable ABI
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "fake.h"

namespace fake {
namespace {

std::mutex mutex;  // guards both
std::map<uintptr_t, size_t> allocated;
std::vector<void*> freed;

void give_back(void* memory) {
  allocated.erase(reinterpret_cast<uintptr_t>(memory));
  free(memory);
}

void release(void* memory) {
  const std::lock_guard lock(mutex);
  if (is_capturing(torch_stream())) return;  // the graph keeps it for ever
  if (is_idle()) return give_back(memory);
  freed.push_back(memory);
  const size_t size_bytes = allocated.at(reinterpret_cast<uintptr_t>(memory));
  (void)enqueue(torch_stream(), [=] { memset(memory, 0xff, size_bytes); });
}

struct GpuMemory final : c10::Allocator {
  static constexpr size_t kAlignment = 512;

  c10::DataPtr allocate(size_t size_bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (size_bytes == 0) return {nullptr, nullptr, nullptr, cpu};
    const size_t rounded = (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = aligned_alloc(kAlignment, rounded);
    TORCH_CHECK(memory != nullptr, "out of memory");
    memset(memory, 0xff, rounded);
    const std::lock_guard lock(mutex);
    allocated[reinterpret_cast<uintptr_t>(memory)] = size_bytes;
    return {memory, memory, &release, cpu};
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

}  // namespace

void use_gpu_memory(bool wanted) {
  static GpuMemory memory;
  constexpr uint8_t kPriority = 100;  // above the default, so that the default can be restored
  c10::SetCPUAllocator(wanted ? &memory : c10::GetDefaultCPUAllocator(), kPriority);
}

void give_freed_back() {
  const std::lock_guard lock(mutex);
  for (void* memory : freed) give_back(memory);
  freed.clear();
}

bool is_on_gpu(const void* memory, size_t size_bytes) {
  const std::lock_guard lock(mutex);
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const auto after = allocated.upper_bound(address);
  if (after != allocated.begin()) {
    const auto& [begin, size] = *std::prev(after);
    if (address + size_bytes <= begin + size) return true;
  }
  return false;
}

}  // namespace fake
