// A single warp that waits for packets: see main().
#include "../../csrc/persistent/exchange.h"

#include <cstdint>
#include <vector>

namespace fusedrnn::cuda {
namespace {

struct Call {
  int tiles;  // of the group
  uint32_t spin_limit;
  int given_up_at;           // when another thread gives up
  std::vector<int> sent_at;  // when each packet is sent
};

// Time is counted in reads: each thread that pauses may read once before any thread reads again.
template <int kCount>
void run(const Call& call) {
  Packet packets[4 * kCount];
  memset(packets, 0xff, sizeof packets);
  uint32_t given_up = 0;
  PersistentForward<BFloat16> args{};
  args.batch = args.blocks = 1;
  args.tiles = call.tiles;
  args.spin_limit = call.spin_limit;
  args.given_up = &given_up;

  const auto send = [&] {
    int last = call.given_up_at;
    for (const int at : call.sent_at) last = at > last ? at : last;
    for (int now = 0; now <= last; ++now) {
      for (int d = 0; d < kCount; ++d) {
        if (now == call.sent_at[d]) store_relaxed(packets + 4 * d, Packet{});
      }
      if (now == call.given_up_at) store_relaxed(&given_up, kGivenUp);
      pause();
    }
  };
  const auto receive = [&] {
    const BlockOfGroup<PersistentForward<BFloat16>> block(args, emulated::shared_memory());
    Packet x[kCount];
    for (int d = 0; d < kCount; ++d) x[d] = load_relaxed(packets + 4 * d);
    block.wait_for(x, packets);
    bool is_complete = true;
    for (const Packet& packet : x) is_complete = is_complete && has_arrived(packet);
    const emulated::Traffic& traffic = emulated::self().traffic;
    printf("%d %d %d %d\n", traffic.pauses, traffic.packets - kCount, traffic.words, is_complete);
  };
  const std::string failure = emulated::launch(2, kWarpSize, 1, 1, [&] {
    if (block_index() == 0) return receive();
    if (thread_index() == 0) send();
  });
  if (!failure.empty()) printf("%s\n", failure.c_str());
}

}  // namespace
}  // namespace fusedrnn::cuda

// Arguments: tiles spin_limit given_up_at sent_at...  Prints for each lane how often it has read
// again, how many packets these reads loaded, how often it has checked whether another thread has
// given up, and whether all packets have arrived.
int main(int count, char** arguments) {
  using namespace fusedrnn::cuda;
  Call call{atoi(arguments[1]), uint32_t(atoi(arguments[2])), atoi(arguments[3]), {}};
  for (int i = 4; i < count; ++i) call.sent_at.push_back(atoi(arguments[i]));
  switch (call.sent_at.size()) {
    case 1: run<1>(call); break;
    case 2: run<2>(call); break;
    case 4: run<4>(call); break;
  }
}
