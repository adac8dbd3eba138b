// Every function of functions.h over floats, in vectors of one instruction set and one by one, with
// denormals kept and flushed: `math_sweep NAME STRIDE [CONSTANT...]`. Prints what it measured and
// exits with 1 if a bound is broken or bits differ that must not. STRIDE 1 takes all floats. A
// larger one takes every STRIDE-th, and all near the places where a function changes its ways: the
// ends of exponents, the constants of the code, and what belongs to single functions.
#include "check.h"
// (the instruction set first)
#include <atomic>
#include <thread>

#include "functions.h"

namespace {

using namespace fusedrnn;
using namespace fusedrnn::check;

constexpr int kBlock = 4096;  // a multiple of all vector widths

// Floats whose bits are first, first + stride, ...
struct Block {
  uint32_t first, stride;
  int count;
};

class Sample {
 public:
  explicit Sample(uint32_t stride) { add(0, ((uint64_t{1} << 32) - 1) / stride + 1, stride); }

  // x, also with the other sign, and its neighbours on both sides.
  void add_around(float x, int neighbours) {
    for (float y : {x, -x}) add(bits_of(y) - neighbours, 2 * neighbours + 1, 1);
  }

  void add_special(const std::vector<float>& constants) {
    for (float x : constants) {
      for (float scale : {0.5f, 1.0f, 2.0f}) add_around(scale * x, 4096);
    }
    for (uint32_t exponent = 0; exponent < 256; ++exponent) {
      add_around(float_of(exponent << 23), 16);
      add_around(float_of(exponent << 23 | 0x3504f3), 16);  // log turns at sqrt(2)
    }
    for (int k = 1; k <= 520; ++k) add_around(static_cast<float>(k * (M_LN2 / 4)), 16);  // exp
    for (int k = 0; k <= 8; ++k) add_around(k / 8.0f, 64);                               // sincospi
  }

  const std::vector<Block>& blocks() const { return blocks_; }

 private:
  void add(uint32_t first, uint64_t count, uint32_t stride) {
    for (uint64_t i = 0; i < count; i += kBlock) {
      const int left = static_cast<int>(count - i < kBlock ? count - i : kBlock);
      blocks_.push_back({static_cast<uint32_t>(first + i * stride), stride, left});
    }
  }

  std::vector<Block> blocks_;
};

// Out of line and touching memory, so that calls are neither moved to where the mode differs, nor
// merged with a call in the other mode.
template <class Function>
__attribute__((noinline)) void of_vectors(const float* x, float* y, int n) {
  for (int i = 0; i < n; i += kLanes) store(y + i, Function::apply(load(x + i)));
  __asm__ volatile("" : : : "memory");
}

// Volatile, so that the compiler does not vectorise the loop.
template <class Function>
__attribute__((noinline)) void of_floats(const volatile float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = Function::apply(static_cast<float>(x[i]));
  __asm__ volatile("" : : : "memory");
}

// The results of a block in one mode.
struct Results {
  float vector[kBlock], scalar[kBlock], second_way[kBlock];

  template <class Function>
  void compute(const float* x, int n) {
    of_vectors<Function>(x, vector, n);
    of_floats<Function>(x, scalar, n);
    using Same = typename Function::Same;
    if constexpr (!std::is_void_v<Same>) of_vectors<Same>(x, second_way, n);
  }
};

struct Counts {
  uint64_t floats = 0;
  Tally kept, flushed, scalar, second_way, modes;

  void add(const Counts& other) {
    floats += other.floats;
    kept.add(other.kept), flushed.add(other.flushed), scalar.add(other.scalar);
    second_way.add(other.second_way), modes.add(other.modes);
  }
};

bool may_depend_on_mode(float y) { return y == 0 || is_denormal(y); }

#if defined(CHECK_AVX512) || defined(CHECK_AVX2)
constexpr double kMoreRoundings = 1;
#else
constexpr double kMoreRoundings = 4.0 / 3;  // no fused multiply-add
#endif

template <class Function>
void sweep(const Block& block, Counts& counts) {
  float x[kBlock] = {};
  double exact[kBlock];
  Results kept, flushed;
  int n = 0;
  for (int i = 0; i < block.count; ++i) {
    const float value = float_of(block.first + i * block.stride);
    if (!Function::covers(value)) continue;
    exact[n] = Function::exact(value);
    x[n++] = value;
  }
  kept.compute<Function>(x, n);
  {
    const cpu::FlushDenormals flush;
    flushed.compute<Function>(x, n);
  }
  counts.floats += n;
  for (int i = 0; i < n; ++i) {
    const float a = kept.vector[i], b = flushed.vector[i];
    const double bound = Function::kBound * kMoreRoundings;
    const double error = Function::error(exact[i], a);
    const bool is_same = same(a, b);
    counts.kept.add(error, bound, x[i]);
    counts.flushed.add(is_same ? error : Function::error(exact[i], b), bound, x[i]);
    if (!is_same && !is_denormal(x[i]) && !may_depend_on_mode(a) && !may_depend_on_mode(b)) {
      counts.modes.add(kWrong, 0, x[i]);
    }
    for (const Results* y : {&kept, &flushed}) {
      if (!same(y->vector[i], y->scalar[i])) counts.scalar.add(kWrong, 0, x[i]);
      if constexpr (!std::is_void_v<typename Function::Same>) {
        if (!same(y->vector[i], y->second_way[i])) counts.second_way.add(kWrong, 0, x[i]);
      }
    }
  }
}

// Runs in as many threads as there are cores.
template <class Function>
Counts sweep(const std::vector<Block>& blocks) {
  const unsigned cores = std::thread::hardware_concurrency();
  std::vector<Counts> counts(cores > 0 ? cores : 1);
  std::vector<std::thread> threads;
  std::atomic<size_t> next{0};
  for (Counts& mine : counts) {
    threads.emplace_back([&blocks, &next, &mine] {
      Counts found;
      for (size_t i; (i = next++) < blocks.size();) sweep<Function>(blocks[i], found);
      mine = found;
    });
  }
  for (std::thread& thread : threads) thread.join();
  Counts all;
  for (const Counts& found : counts) all.add(found);
  return all;
}

bool passes(const char* name, const char* what, const Tally& tally) {
  if (tally.failures == 0) return true;
  std::printf("FAILED %s, %s: %llu times, as at %.9g (%a)\n", name, what, tally.failures, tally.x(),
              tally.x());
  return false;
}

template <class Function>
bool report(const Counts& counts) {
  const auto print = [](const char* what, const Tally& tally) {
    if (tally.error() == 0) return void(std::printf("%s 0", what));
    std::printf("%s %.4g%s at %.9g", what, tally.error(), Function::kUnit, tally.x());
  };
  std::printf("%s: %llu floats, ", Function::kName, static_cast<unsigned long long>(counts.floats));
  print("error", counts.kept);
  if (counts.flushed.worst != counts.kept.worst) print(", with denormals flushed", counts.flushed);
  std::printf("\n");
  const char* name = Function::kName;
  bool passed = passes(name, "error with denormals kept", counts.kept);
  passed &= passes(name, "error with denormals flushed", counts.flushed);
  passed &= passes(name, "vector and float differ", counts.scalar);
  passed &= passes(name, "the function of two results differs", counts.second_way);
  passed &= passes(name, "modes differ", counts.modes);
  return passed;
}

}  // namespace

int main(int argc, char** argv) {
  int status = 2;
  const int stride = argc > 2 ? std::atoi(argv[2]) : 0;
  if (stride > 0) {
    Sample sample(stride);
    std::vector<float> constants;
    for (int i = 3; i < argc; ++i) constants.push_back(std::strtof(argv[i], nullptr));
    if (stride > 1) sample.add_special(constants);
    for_each_function([&](auto function) {
      using Function = decltype(function);
      if (std::strcmp(argv[1], Function::kName) != 0) return;
      status = report<Function>(sweep<Function>(sample.blocks())) ? 0 : 1;
    });
  }
  if (status == 2) std::printf("usage: math_sweep NAME STRIDE [CONSTANT...]\n");
  return status;
}
