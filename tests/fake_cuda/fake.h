// What the parts of the fake GPU know of each other.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <string>

namespace fake {

// What the GPU does although the program said something else: as if the program had not said it.
enum class Bug {
  None,
  LostWait,       // of torch's stream for others
  LostOtherWait,  // of others
  LostAttribute,  // that a kernel is allowed more shared memory
  NotAtOnce,      // no launch is cooperative
  LostBlock,      // of each grid
  HalfBlock,      // with half as many threads
  LostMemset,
  KeptError,      // cudaGetLastError does not clear
  LostStride,     // of matrices: each column begins where the one before ends
  LostTranspose,  // of the first matrix of a product, if it is square
};

// What a test may set.
struct Options {
  uint64_t order = 0;  // of streams and blocks.  0: as it was asked for, 1: the other way round
  bool torch_tf32 = false;  // whether torch's own matrix products of float32 may be rounded
  int device = 0;           // where all tensors are: see kMultiprocessors
  // That others leave of the device; below 0, all.
  int free_multiprocessors = -1;
  // 1: no algorithm is found, 2: the search fails, 3: products are refused, 4: by an algorithm that
  // was found for another number of rows
  int no_gemm = 0;
  int64_t failing_launch = -1;  // the one with this number since control()
  Bug bug = Bug::None;
};
inline Options options;

// Since control().
struct Counts {
  int64_t launches, cooperative, gemms, replays, waits;
};
inline Counts counts;
// For algorithms of cuBLASLt, since the process began: so long they are known.
inline int64_t searches = 0;

// Two GPUs.
constexpr int kMultiprocessors[] = {132, 6};

// Remembers what is wrong, a line each, for the test to ask.
void note(const std::string& what);
std::string take_notes();

// Remembers it as CUDA's last error too.
cudaError_t fail(cudaError_t error, const std::string& why);
// One that ends all use of the GPU.
void fault(const std::string& why);
bool is_faulty();
void reset();  // as if nothing had gone wrong

uint64_t random_below(uint64_t count);

// Work for a stream: is done by run_all() or run_to_here() at the latest, or recorded.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> run);
void run_all();                         // and in any order that streams and events allow
void run_to_here(cudaStream_t stream);  // what this stream has been given, and waits for
bool is_idle();                         // nothing is left to be done
bool is_capturing(cudaStream_t stream);
bool any_is_capturing();

// The stream that torch takes for the current one: the default stream, or one of its own.
cudaStream_t torch_stream();
void choose_torch_stream(bool own);
// Whether all of it is memory that torch has allocated on the GPU.
bool is_on_gpu(const void* memory, size_t size_bytes);
// Whether torch allocates there from here on.
void use_gpu_memory(bool wanted);
void give_freed_back();  // once all work is done

}  // namespace fake
