// A grid of GPU threads on one CPU thread: replaces csrc/persistent/device.h for compilers other
// than nvcc.
//
// Each GPU thread is a fiber, which runs until it has to wait for others.  A seed determines which
// fiber runs next.  Compiled with -fsanitize=thread, each fiber is a thread to the sanitizer, and
// memory is ordered only by barriers, release and acquire: a missing one is reported as a race,
// whatever the order in which the fibers ran.
//
// A grid that cannot go on is distinguished from a slow one, and shared memory starts as NaN. The
// emulation cannot show a wrong idea of the layout of mma, errors within PTX, or time.
//
// Longer than 350 lines, because scheduler, barriers and memory order are one machine.
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define FUSEDRNN_TSAN(call) call
#else
#define FUSEDRNN_TSAN(call)
#endif
// swapcontext asks the system for each switch. The sanitizers follow it, but not longjmp.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define FUSEDRNN_JUMPS false
#else
#define FUSEDRNN_JUMPS true
#endif
// The sanitizer must not watch the emulator's own memory.
#define FUSEDRNN_UNSEEN __attribute__((noinline, no_sanitize_thread))
#define FUSEDRNN_DEVICE inline
#define FUSEDRNN_DEVICE_MEMORY inline

namespace fusedrnn::cuda {
namespace emulated {

struct Lane {
  uint32_t a[4], b[2];
  float d[4];
  uint32_t value, result;
  int source;
};
struct Barrier {
  int arrived;
  unsigned generation;
  char order[2];  // orders memory for the sanitizer; the two alternate
};
struct Warp {
  Barrier barrier;
  int arrived;  // at a collective that orders nothing
  Lane lanes[kWarpSize];
};
struct Block {
  int index;
  Barrier barrier;
  unsigned char* shared;
  Warp* warps;
};
// What a thread has started to copy, and what arrives only when it must.  Other copies arrive at
// once.
struct Copies {
  static constexpr unsigned kMost = 128;
  struct {
    float* to;
    const void* from;
    unsigned group;
  } of[kMost];
  unsigned first, end, group;
};
// Counts of a thread's relaxed loads and pauses.
struct Traffic {
  int packets, words, pauses;
};
struct Context {
  ucontext_t first;  // until it has run once
  jmp_buf later;
  bool has_run;
};
struct Fiber {
  Context context;
  Block* block;
  int thread;
  bool is_done;
  const char* waits_at;
  Traffic traffic;
  Copies copies;
  void* tsan;
};

struct Grid {
  int blocks, threads;
  Fiber *fibers, *current, **ready, **polling;
  int num_ready, num_polling;
  const std::function<void()>* kernel;
  Context scheduler;
  void* scheduler_tsan;
  uint64_t random;
  uint64_t events;  // events that others may wait for
  uint32_t clock;   // how often a thread has read it
  char end;         // orders the kernel before what the host does next
  char failure[200];
};
inline Grid grid;

FUSEDRNN_UNSEEN inline void switch_from(Context& from, Context& to) {
  if (!FUSEDRNN_JUMPS) {
    swapcontext(&from.first, &to.first);
  } else if (_setjmp(from.later) == 0) {
    from.has_run = true;
    if (to.has_run) _longjmp(to.later, 1);
    setcontext(&to.first);
  }
}
FUSEDRNN_UNSEEN inline Fiber& self() { return *grid.current; }
FUSEDRNN_UNSEEN inline Warp& warp() { return self().block->warps[self().thread / kWarpSize]; }
FUSEDRNN_UNSEEN inline Lane& lane() { return warp().lanes[self().thread % kWarpSize]; }
FUSEDRNN_UNSEEN inline void count_event() { ++grid.events; }
FUSEDRNN_UNSEEN inline uint32_t read_clock() { return ++grid.clock; }
FUSEDRNN_UNSEEN inline void count_word() { ++self().traffic.words; }

FUSEDRNN_UNSEEN inline void leave() {
  Fiber& me = self();
  FUSEDRNN_TSAN(__tsan_switch_to_fiber(grid.scheduler_tsan, __tsan_switch_to_fiber_no_sync);)
  switch_from(me.context, grid.scheduler);
}
// Waits until another fiber makes this one ready.
FUSEDRNN_UNSEEN inline void wait_at(const char* where) {
  self().waits_at = where;
  leave();
}
FUSEDRNN_UNSEEN inline void poll() {
  ++self().traffic.pauses;
  grid.polling[grid.num_polling++] = &self();
  wait_at("a poll");
}

// Counts an arrival of one of `threads` threads, the first of which is this block's `first`; the
// last arrival makes the others ready.
FUSEDRNN_UNSEEN inline bool is_last(int& arrived, int first, int threads) {
  if (++arrived < threads) return false;
  arrived = 0;
  ++grid.events;
  Fiber* of_block = grid.fibers + size_t(self().block->index) * grid.threads;
  for (int i = first; i < first + threads; ++i) {
    if (of_block + i != grid.current) grid.ready[grid.num_ready++] = of_block + i;
  }
  return true;
}
FUSEDRNN_UNSEEN inline bool all_lanes_are_here() {
  return is_last(warp().arrived, self().thread / kWarpSize * kWarpSize, kWarpSize);
}
FUSEDRNN_UNSEEN inline char* order_of(Barrier& barrier) {
  return &barrier.order[barrier.generation % 2];
}
FUSEDRNN_UNSEEN inline void arrive(Barrier& barrier, int first, int threads, const char* where) {
  if (is_last(barrier.arrived, first, threads)) {
    ++barrier.generation;
  } else {
    wait_at(where);
  }
}
inline void sync(Barrier& barrier, int first, int threads, const char* where) {
  [[maybe_unused]] char* order = order_of(barrier);
  FUSEDRNN_TSAN(__tsan_release(order);)
  arrive(barrier, first, threads, where);
  FUSEDRNN_TSAN(__tsan_acquire(order);)
}
FUSEDRNN_UNSEEN inline Barrier& block_barrier() { return self().block->barrier; }
FUSEDRNN_UNSEEN inline Barrier& warp_barrier() { return warp().barrier; }
FUSEDRNN_UNSEEN inline int first_of_warp() { return self().thread / kWarpSize * kWarpSize; }

FUSEDRNN_UNSEEN inline uint32_t shuffle(uint32_t value, int distance) {
  Lane& mine = lane();
  mine.value = value;
  mine.source = self().thread % kWarpSize + distance;
  if (all_lanes_are_here()) {
    Lane* lanes = warp().lanes;
    for (int i = 0; i < kWarpSize; ++i) {
      const int source = lanes[i].source;
      lanes[i].result = source < kWarpSize ? lanes[source].value : 0xdeadbeefu;
    }
  } else {
    wait_at("a shuffle");
  }
  return mine.result;
}

FUSEDRNN_UNSEEN inline void set_failure(const char* what) {
  if (grid.failure[0] == 0) snprintf(grid.failure, sizeof grid.failure, "%s", what);
}
FUSEDRNN_UNSEEN inline bool arrives_at_once() { return (grid.random >> 33) % 2 == 0; }
FUSEDRNN_UNSEEN inline void delay_copy(float* to, const void* from) {
  Copies& copies = self().copies;
  if (copies.end - copies.first == Copies::kMost) set_failure("too many copies at a time");
  copies.of[copies.end++ % Copies::kMost] = {to, from, copies.group};
}
inline void copy(float* to, const void* from) {
  if (!arrives_at_once()) return delay_copy(to, from);
  memcpy(to, from, sizeof(float));
}
inline void wait_for_copies(unsigned groups) {
  Copies& copies = self().copies;
  for (; copies.first != copies.end; ++copies.first) {
    const auto& next = copies.of[copies.first % Copies::kMost];
    if (next.group + groups >= copies.group) break;
    memcpy(next.to, next.from, sizeof(float));
  }
}

template <class T>
FUSEDRNN_UNSEEN float number_of(uint32_t word, int index) {
  if constexpr (std::is_same_v<T, float>) {
    return Traits<float>::from_bits(word & ~0x1fffu);
  } else {
    return widen(T{uint16_t(word >> (16 * index))});
  }
}
template <class T>
FUSEDRNN_UNSEEN void multiply(Lane (&lanes)[kWarpSize]) {
  constexpr int in_word = 4 / sizeof(T), depth = 8 * in_word;
  float a[16][depth], b[depth][8];
  for (int l = 0; l < kWarpSize; ++l) {
    const int g = l / 4, q = l % 4;
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < in_word; ++j) {
        a[g + 8 * (i % 2)][in_word * (q + 4 * (i / 2)) + j] = number_of<T>(lanes[l].a[i], j);
        if (i < 2) b[in_word * (q + 4 * i) + j][g] = number_of<T>(lanes[l].b[i], j);
      }
    }
  }
  for (int l = 0; l < kWarpSize; ++l) {
    for (int i = 0; i < 4; ++i) {
      const int row = l / 4 + 8 * (i / 2), column = 2 * (l % 4) + i % 2;
      for (int k = 0; k < depth; ++k) lanes[l].d[i] += a[row][k] * b[k][column];
    }
  }
}
template <class T>
FUSEDRNN_UNSEEN void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Lane& mine = lane();
  for (int i = 0; i < 4; ++i) {
    mine.a[i] = a[i];
    mine.d[i] = d[i];
  }
  mine.b[0] = b0;
  mine.b[1] = b1;
  if (all_lanes_are_here()) {
    multiply<T>(warp().lanes);
  } else {
    wait_at("an mma");
  }
  for (int i = 0; i < 4; ++i) d[i] = mine.d[i];
}

FUSEDRNN_UNSEEN inline Packet load_unseen(const Packet* p) {
  ++self().traffic.packets;
  return *p;
}
FUSEDRNN_UNSEEN inline void store_unseen(Packet* p, const Packet& v) {
  *p = v;
  ++grid.events;
}

inline void call_kernel() { (*grid.kernel)(); }
FUSEDRNN_UNSEEN inline void run_fiber() {
  call_kernel();
  FUSEDRNN_TSAN(__tsan_release(&grid.end);)
  self().is_done = true;
  ++grid.events;
  leave();
}

FUSEDRNN_UNSEEN inline void fail_to_go_on() {
  size_t done = 0;
  const size_t threads = size_t(grid.blocks) * grid.threads;
  const Fiber* stuck = nullptr;
  for (size_t i = 0; i < threads; ++i) {
    done += grid.fibers[i].is_done;
    if (!grid.fibers[i].is_done && stuck == nullptr) stuck = &grid.fibers[i];
  }
  char text[200];
  snprintf(text, sizeof text,
           "deadlock: %zu of %zu threads have ended, thread %d of block %d waits at %s", done,
           threads, stuck->thread, stuck->block->index, stuck->waits_at);
  set_failure(text);
}

FUSEDRNN_UNSEEN inline void schedule() {
  size_t left = size_t(grid.blocks) * grid.threads;
  uint64_t seen = 0;
  int idle = 0;
  while (left > 0 && grid.failure[0] == 0) {
    if (grid.num_ready == 0) {  // all others wait, so polling fibers may read again
      idle = grid.events == seen ? idle + 1 : 0;
      seen = grid.events;
      if (grid.num_polling == 0 || idle > 10000) return fail_to_go_on();
      while (grid.num_polling > 0) grid.ready[grid.num_ready++] = grid.polling[--grid.num_polling];
    }
    grid.random ^= grid.random << 13;
    grid.random ^= grid.random >> 7;
    grid.random ^= grid.random << 17;
    const int next = int((grid.random >> 11) % uint64_t(grid.num_ready));
    grid.current = grid.ready[next];
    grid.ready[next] = grid.ready[--grid.num_ready];
    FUSEDRNN_TSAN(__tsan_switch_to_fiber(grid.current->tsan, __tsan_switch_to_fiber_no_sync);)
    switch_from(grid.scheduler, grid.current->context);
    left -= grid.current->is_done;
  }
}

// Runs kernel() in each thread; returns what went wrong, or "".
FUSEDRNN_UNSEEN inline std::string launch(int blocks, int threads, size_t shared_bytes,
                                          uint64_t seed, const std::function<void()>& kernel) {
  const size_t all = size_t(blocks) * threads, stack = size_t(64) << 10;
  auto* stacks = static_cast<char*>(mmap(nullptr, all * stack, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (stacks == MAP_FAILED) return "no memory for stacks";
  grid = {};
  grid.blocks = blocks;
  grid.threads = threads;
  grid.kernel = &kernel;
  grid.random = seed * 0x9E3779B97F4A7C15u + 1;
  grid.fibers = static_cast<Fiber*>(calloc(all, sizeof(Fiber)));
  grid.ready = static_cast<Fiber**>(calloc(all, sizeof(Fiber*)));
  grid.polling = static_cast<Fiber**>(calloc(all, sizeof(Fiber*)));
  auto* of_grid = static_cast<Block*>(calloc(blocks, sizeof(Block)));
  FUSEDRNN_TSAN(grid.scheduler_tsan = __tsan_get_current_fiber();)
  for (int b = 0; b < blocks; ++b) {
    Block& block = of_grid[b];
    block.index = b;
    block.shared = static_cast<unsigned char*>(aligned_alloc(64, (shared_bytes + 64) / 64 * 64));
    memset(block.shared, 0xff, shared_bytes);
    block.warps = static_cast<Warp*>(calloc(threads / kWarpSize, sizeof(Warp)));
    for (int t = 0; t < threads; ++t) {
      const size_t index = size_t(b) * threads + t;
      Fiber& fiber = grid.fibers[index];
      fiber.block = &block;
      fiber.thread = t;
      getcontext(&fiber.context.first);
      fiber.context.first.uc_stack.ss_sp = stacks + index * stack;
      fiber.context.first.uc_stack.ss_size = stack;
      fiber.context.first.uc_link = nullptr;
      makecontext(&fiber.context.first, run_fiber, 0);
      FUSEDRNN_TSAN(fiber.tsan = __tsan_create_fiber(0);)
      grid.ready[grid.num_ready++] = &fiber;
    }
  }
  schedule();
  FUSEDRNN_TSAN(__tsan_acquire(&grid.end);)
  for (size_t i = 0; i < all; ++i) {
    FUSEDRNN_TSAN(__tsan_destroy_fiber(grid.fibers[i].tsan);)
  }
  for (int b = 0; b < blocks; ++b) {
    free(of_grid[b].shared);
    free(of_grid[b].warps);
  }
  free(of_grid);
  free(grid.fibers);
  free(grid.ready);
  free(grid.polling);
  munmap(stacks, all * stack);
  return grid.failure;
}

FUSEDRNN_UNSEEN inline unsigned char* shared_memory() { return self().block->shared; }

}  // namespace emulated

FUSEDRNN_UNSEEN inline int thread_index() { return emulated::self().thread; }
FUSEDRNN_UNSEEN inline int block_index() { return emulated::self().block->index; }
FUSEDRNN_UNSEEN inline int grid_blocks() { return emulated::grid.blocks; }
FUSEDRNN_UNSEEN inline unsigned char* shared_memory() { return emulated::shared_memory(); }

inline void sync_block() {
  emulated::sync(emulated::block_barrier(), 0, emulated::grid.threads, "a barrier of the block");
}
inline void sync_warp() {
  emulated::sync(emulated::warp_barrier(), emulated::first_of_warp(), kWarpSize,
                 "a barrier of the warp");
}

inline Packet load_relaxed(const Packet* p) { return emulated::load_unseen(p); }
inline void load_relaxed_if(bool is_there, const Packet* p, Packet& v) {
  if (is_there) v = load_relaxed(p);
}
inline void store_relaxed(Packet* p, const Packet& v) { emulated::store_unseen(p, v); }
inline Packet load_plain(const Packet* p) { return *p; }
inline void store_plain(Packet* p, const Packet& v) { *p = v; }

inline uint32_t load_acquire(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_release(uint32_t* p, uint32_t v) {
  emulated::count_event();
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline uint32_t load_relaxed(const uint32_t* p) {
  emulated::count_word();
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void store_relaxed(uint32_t* p, uint32_t v) {
  emulated::count_event();
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}

inline int64_t wide_product(int a, int b) { return int64_t(a) * b; }

inline uint32_t shuffle_down(uint32_t v, int distance) { return emulated::shuffle(v, distance); }

inline uint32_t round_to_tf32(float x) {
  return x == x ? (Traits<float>::bits(x) + 0x1000u) & ~0x1fffu : 0x7fffffffu;
}

template <class T>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated::mma<T>(d, a, b0, b1);
}

inline uint32_t clock_after(uint32_t) { return emulated::read_clock(); }
inline void store_if(bool is_wanted, uint32_t* p, uint32_t first, uint32_t second) {
  if (!is_wanted) return;
  p[0] = first;
  p[1] = second;
}

inline void copy_async(float* shared, const void* from) { emulated::copy(shared, from); }
inline void end_of_copies() { ++emulated::self().copies.group; }
template <int kGroups>
void wait_for_copies() {
  emulated::wait_for_copies(kGroups);
}

inline void pause() { emulated::poll(); }

inline void give_up() {
  emulated::set_failure("other blocks have not sent their results in time");
  emulated::wait_at("its end");
}

}  // namespace fusedrnn::cuda
