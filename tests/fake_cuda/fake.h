// The interface between the parts of the fake GPU.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <string>

namespace fake {

// Calls that the fake GPU ignores, as if the program had left them out.
enum class Bug {
  None,
  LostWait,       // a wait of torch's stream for another
  LostOtherWait,  // a wait of another stream
  LostAttribute,  // the permission for more shared memory
  NotAtOnce,      // no launch is cooperative
  LostBlock,      // a block of each grid
  HalfBlock,      // with half as many threads
  LostMemset,
  KeptError,      // cudaGetLastError does not clear
  LostStride,     // the stride of matrices, whose columns are then contiguous
  LostTranspose,  // the transpose of a product's first matrix, if it is square
};

// Settings for tests.
struct Options {
  uint64_t order = 0;       // of streams and blocks.  0: as enqueued, 1: reversed, else a seed
  bool torch_tf32 = false;  // whether torch's own matrix products of float32 may be rounded
  int device = 0;           // the device of all tensors: see kMultiprocessors
  // Multiprocessors that others leave free; below 0, all.
  int free_multiprocessors = -1;
  // 1: no algorithm is found, 2: the search fails, 3: products are refused, 4: by an algorithm that
  // was found for another number of rows
  int no_gemm = 0;
  int64_t failing_launch = -1;  // the one with this number since control()
  Bug bug = Bug::None;
};
inline Options options;

// Counts since control().
struct Counts {
  int64_t launches, cooperative, gemms, replays, waits;
};
inline Counts counts;
// Searches for algorithms of cuBLASLt since the process began, because the process remembers them.
inline int64_t searches = 0;

// Two GPUs.
constexpr int kMultiprocessors[] = {132, 6};

// Records a fault, a line of text, for the test to read.
void note(const std::string& what);
std::string take_notes();

// Records a fault, which also becomes CUDA's last error.
cudaError_t fail(cudaError_t error, const std::string& why);
// Records a fault after which the GPU cannot be used.
void fault(const std::string& why);
bool is_faulty();
void reset();  // forgets all faults

uint64_t random_below(uint64_t count);

// Enqueues work in a stream: it is recorded, or done by run_all() or run_to_here() at the latest.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> run);
void run_all();                         // in any order that streams and events allow
void run_to_here(cudaStream_t stream);  // the stream's work, and everything that it waits for
bool is_idle();                         // whether no work is left
bool is_capturing(cudaStream_t stream);
bool any_is_capturing();

// torch's current stream: the default stream, or another of its own.
cudaStream_t torch_stream();
void choose_torch_stream(bool own);
// Whether a range is within memory that torch has allocated on the GPU.
bool is_on_gpu(const void* memory, size_t size_bytes);
// Sets whether torch allocates on the fake GPU from now on.
void use_gpu_memory(bool wanted);
void give_freed_back();  // after all work is done

}  // namespace fake
