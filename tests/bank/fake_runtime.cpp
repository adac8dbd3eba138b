// What banks need of the fake GPU of tests/fake_cuda: its streams, for memory that Python gives.
//
// torch computes on the CPU when it is told to, which a GPU would do later.  So what an operation
// has written becomes NaN at once, and is put back by work in its stream; what it has read must be
// the same when its stream comes to it.  Copies are done when their stream comes to them.
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "../fake_cuda/streams.cpp"  // for work that is pending

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace fake {
namespace {

struct Block {
  unsigned char* begin;
  size_t size;
  cudaStream_t stream;
  bool is_free = false;  // for others, in the order of the stream
};
std::map<uintptr_t, std::shared_ptr<Block>> blocks;  // memory of the GPU
std::map<uint64_t, cudaEvent_t> recorded;            // by number, until the test ends

std::shared_ptr<Block> block_of(const void* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return nullptr;
  const auto block = std::prev(after)->second;
  return address < reinterpret_cast<uintptr_t>(block->begin) + block->size ? block : nullptr;
}

void use(const std::shared_ptr<Block>& block, const char* what) {
  if (block != nullptr && block->is_free) {
    note(std::string("race: ") + what + " memory that was given back before");
  }
}

std::shared_ptr<unsigned char[]> copy_of(const void* memory, size_t size) {
  std::shared_ptr<unsigned char[]> copy(new unsigned char[size]);
  memcpy(copy.get(), memory, size);
  return copy;
}

void run_some(size_t count) {
  while (count-- > 0) {
    pending.erase(
        std::remove_if(pending.begin(), pending.end(), [](auto& w) { return w->is_done; }),
        pending.end());
    std::vector<std::shared_ptr<Work>> possible;
    std::copy_if(pending.begin(), pending.end(), std::back_inserter(possible),
                 [](auto& work) { return may_run(*work); });
    if (possible.empty()) return;
    finish(*possible[random_below(possible.size())]);
  }
}

}  // namespace

cudaStream_t torch_stream() { return nullptr; }
bool is_on_gpu(const void* memory, size_t) { return block_of(memory) != nullptr; }

}  // namespace fake

EXPORTED void bank_begin(uint64_t order) {
  run_all();
  for (const auto& [_, block] : blocks) free(block->begin);
  blocks.clear();
  for (const auto& [_, event] : recorded) (void)cudaEventDestroy(event);
  recorded.clear();
  options = {.order = order};
  reset();
  (void)take_notes();
}
EXPORTED const char* bank_take_notes() {
  static std::string notes;
  notes = take_notes();
  return notes.c_str();
}

EXPORTED void* bank_new_stream() {
  cudaStream_t stream = nullptr;
  (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return stream;
}
EXPORTED uint64_t bank_record(void* stream) {
  static uint64_t count = 0;
  cudaEvent_t event = nullptr;
  (void)cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  (void)cudaEventRecord(event, static_cast<cudaStream_t>(stream));
  recorded[++count] = event;
  return count;
}
EXPORTED void bank_wait(void* stream, uint64_t event) {
  const auto at = recorded.find(event);
  if (at == recorded.end()) return note("a wait for no event");
  (void)cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), at->second, 0);
}
EXPORTED void bank_synchronize(uint64_t event) {
  const auto at = recorded.find(event);
  if (at == recorded.end()) return;  // of an earlier test
  for (const auto& work : Works(at->second->works)) run_with_all_before(*work);
}
EXPORTED void bank_run_to_here(void* stream) { run_to_here(static_cast<cudaStream_t>(stream)); }
EXPORTED void bank_run_all() { run_all(); }
// Work that may be done already is, by chance.
EXPORTED void bank_by_chance() {
  if (options.order > 1 && random_below(2) == 0) run_some(random_below(4));
}

// Memory that work in the stream may still be using, as torch gives it out.
EXPORTED void* bank_allocate(size_t size, void* stream) {
  const auto block = std::make_shared<Block>();
  block->begin = static_cast<unsigned char*>(aligned_alloc(512, (size + 511) / 512 * 512));
  block->size = size;
  block->stream = static_cast<cudaStream_t>(stream);
  blocks[reinterpret_cast<uintptr_t>(block->begin)] = block;
  memset(block->begin, 0xff, size);
  (void)enqueue(block->stream, [=] { memset(block->begin, 0xff, size); });
  return block->begin;
}
EXPORTED void bank_give_back(void* memory) {
  const auto block = block_of(memory);
  if (block == nullptr) return;  // of an earlier test
  (void)enqueue(block->stream, [=] {
    memset(block->begin, 0xff, block->size);
    block->is_free = true;
  });
}

// One of the two is memory of the host.
EXPORTED void bank_copy(void* to, const void* from, size_t size, void* handle) {
  const auto stream = static_cast<cudaStream_t>(handle);
  const auto target = block_of(to), source = block_of(from);
  if ((target == nullptr) == (source == nullptr)) return note("a copy within one memory");
  if (target == nullptr) {
    memset(to, 0xff, size);
  } else {
    (void)enqueue(stream, [=] {
      use(target, "a copy to");
      memset(to, 0xff, size);
    });
  }
  (void)enqueue(stream, [=] {
    use(target, "a copy to");
    use(source, "a copy from");
    memcpy(to, from, size);
  });
  if (options.order == 1) run_all();
}
// An operation has read memory of the GPU.
EXPORTED void bank_was_read(const void* memory, size_t size, void* stream, const char* name) {
  const auto block = block_of(memory);
  (void)enqueue(static_cast<cudaStream_t>(stream),
                [=, there = copy_of(memory, size), what = std::string(name)] {
                  use(block, what.c_str());
                  if (memcmp(memory, there.get(), size) != 0) {
                    note("race: " + what + " reads memory that was overwritten before");
                  }
                });
}
// An operation has written memory of the GPU.
EXPORTED void bank_was_written(void* memory, size_t size, void* stream, const char* name) {
  const auto block = block_of(memory);
  (void)enqueue(static_cast<cudaStream_t>(stream),
                [=, there = copy_of(memory, size), what = std::string(name)] {
                  use(block, what.c_str());
                  memcpy(memory, there.get(), size);
                });
  memset(memory, 0xff, size);
}
