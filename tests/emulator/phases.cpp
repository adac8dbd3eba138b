// Runs bench/phases.h on the emulation.  Arguments: cell pass steps batch hidden schedule.
#include "../../bench/phases.h"

#include <cstdlib>

namespace fusedrnn::phases {
namespace {

struct EmulatedDevice {
  uint64_t schedule;
  std::string failure;

  static Gpu gpu() { return {"", 90, 8, int64_t(100) << 10}; }
  static void* allocate(size_t bytes) {  // its end is the end of the memory, for the sanitizer
    return std::aligned_alloc(16, (bytes + 15) / 16 * 16);
  }
  static void set(void* memory, int byte, size_t bytes) { memset(memory, byte, bytes); }
  static void write(void* memory, const void* from, size_t bytes) { memcpy(memory, from, bytes); }
  static void read(void* to, const void* memory, size_t bytes) { memcpy(to, memory, bytes); }
  static void rewrite(float*, int64_t) {}
  template <unsigned kVariant, class Stages, class Args>
  float run(Stages stages, const PersistentPlan& plan, const Args& args) {
    if (plan.depth != 1) failure = "only depth 1 is compiled";
    if (!failure.empty()) return 0;
    failure = emulated::launch(
        plan.grid(), kPersistentThreads, size_t(plan.shared_bytes), schedule++,
        [&] { run_variant<kVariant, 1>(stages, args, emulated::shared_memory()); });
    return 0;
  }
#if defined(FUSEDRNN_PHASE_CLOCKS)
  static void set_log(const PhaseLog& log) { phase_log = log; }
#endif
};

int run_cell(EmulatedDevice& device, bool is_backward, const Call& call) {
  const auto run = [&](auto stages) {
    return is_backward ? backward(device, stages, call) : forward(device, stages, call);
  };
  const std::string cell = call.cell;
  if (cell == "gru") return run(cuda::cells::gru{});
  if (cell == "lstm") return run(cuda::cells::lstm{});
  return run(cuda::cells::stochastic_gru{});
}

}  // namespace
}  // namespace fusedrnn::phases

int main(int, char** words) {
  using namespace fusedrnn;
  const auto number = [&](int i) { return int64_t(atoi(words[i])); };
  const phases::Call call{words[1], number(3), number(4), number(5), /*launches=*/2};
  phases::EmulatedDevice device{uint64_t(number(6)), ""};
  const bool is_backward = std::string(words[2]) == "backward";
  const int status = phases::run_cell(device, is_backward, call);
  return device.failure.empty() ? status : phases::refuse(device.failure);
}
