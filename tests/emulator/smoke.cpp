// Runs the probes of bench/smoke.h on the emulation: prints what is wrong, and exits with 0 if
// nothing is.
#include "../../bench/smoke.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace fusedrnn::smoke {
namespace {

template <class T>
bool multiplies() {
  float found[kRows * kColumns];
  const std::string failure = emulated::launch(1, kWarpSize, 0, 1, [&] { multiply<T>(found); });
  bool right = failure.empty();
  for (int i = 0; i < kRows * kColumns; ++i) {
    right = right && found[i] == float(product_at<T>(i / kColumns, i % kColumns));
  }
  return right;
}

template <class F>
bool hops(const F& kernel, uint64_t seed) {
  constexpr int count = 20;
  std::vector<Packet> packets(count * kWarpSize);
  memset(packets.data(), 0xff, packets.size() * sizeof(Packet));
  uint32_t counts[2] = {}, wrong = 0;
  const Exchange args{packets.data(), counts, &wrong, count, 1u << 20};
  return emulated::launch(2, kWarpSize, 0, seed, [&] { kernel(args); }).empty() && wrong == 0;
}

}  // namespace
}  // namespace fusedrnn::smoke

int main() {
  using namespace fusedrnn;
  using namespace fusedrnn::smoke;
  int wrong = 0;
  const auto expect = [&](bool right, const char* what) {
    if (!right) std::printf("wrong: %s\n", what);
    wrong += !right;
  };
  expect(multiplies<BFloat16>(), "mma of bfloat16");
  expect(multiplies<Half>(), "mma of float16");
  expect(multiplies<float>(), "mma of TF32");
  for (uint64_t seed : {1, 2, 3}) {
    expect(hops([](const Exchange& args) { hop_by_packets(args); }, seed), "hops by packets");
    expect(hops([](const Exchange& args) { hop_by_flags(args); }, seed), "hops by flags");
  }
  return wrong;
}
