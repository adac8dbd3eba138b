// Errors, devices, memory and launches of the fake GPU, as strict as CUDA is.
//
// The threads of a cooperative launch run on the fibers of tests/emulator, other threads one after
// the other.  g++ does not tell a kernel's registers and launch bounds; a launch with another
// number of threads gives wrong numbers instead of an error.
#include <map>

#include "../../csrc/persistent/device.h"  // brings in the fibers
#include "fake.h"

uint3 blockIdx, threadIdx;

namespace fake {
namespace {

constexpr size_t kSharedBytes = 48 << 10, kSharedOptin = 227 << 10;  // of a block
constexpr int kMostThreads = 1024;
// Registers suffice for one block of a kernel whose blocks wait for each other.
constexpr int kBlocksAtOnce = 1;

cudaError_t last_error = cudaSuccess, sticky = cudaSuccess;
std::string notes;
uint64_t random_state = 1;
std::map<const void*, size_t> allowed_shared;  // dynamic shared memory that a kernel has asked for
int64_t launches = 0;                          // including failed ones

size_t shared_limit(const void* kernel) {
  const auto at = allowed_shared.find(kernel);
  const bool is_lost = options.bug == Bug::LostAttribute || at == allowed_shared.end();
  return is_lost ? kSharedBytes : at->second;
}

int free_multiprocessors() {
  const int all = kMultiprocessors[options.device];
  return options.free_multiprocessors < 0 ? all : std::min(all, options.free_multiprocessors);
}

void run_threads(unsigned blocks, unsigned threads, const std::function<void()>& thread) {
  const uint64_t first = options.order > 1 ? random_below(blocks) : 0;
  for (unsigned i = 0; i < blocks; ++i) {
    const unsigned block = unsigned((first + i) % blocks);
    blockIdx.x = options.order == 1 ? blocks - 1 - block : block;
    for (unsigned j = 0; j < threads; ++j) {
      threadIdx.x = options.order == 1 ? threads - 1 - j : j;
      thread();
    }
  }
}

}  // namespace

void note(const std::string& what) { notes += what + "\n"; }
std::string take_notes() { return std::exchange(notes, {}); }

cudaError_t fail(cudaError_t error, const std::string& why) {
  note(std::string(cudaGetErrorString(error)) + ": " + why);
  return last_error = error;
}
void fault(const std::string& why) { sticky = fail(cudaErrorAssert, why); }
bool is_faulty() { return sticky != cudaSuccess; }

uint64_t random_below(uint64_t count) {
  random_state = (random_state + options.order) * 6364136223846793005u + 1442695040888963407u;
  return (random_state >> 33) % count;
}

void reset() {
  last_error = sticky = cudaSuccess;
  random_state = options.order;
  launches = 0;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   std::function<void()> thread) {
  const auto text = [](auto number) { return std::to_string(number); };
  if (is_faulty()) return sticky;
  if (launches++ == options.failing_launch) {
    return fail(cudaErrorIllegalState, "it was told to fail");
  }
  bool at_once = false;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id != cudaLaunchAttributeCooperative) {
      return fail(cudaErrorNotSupported, "a launch attribute that the fake does not know");
    }
    at_once = config.attrs[i].val.cooperative != 0 && options.bug != Bug::NotAtOnce;
  }
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  if (grid.y * grid.z * block.y * block.z != 1) {
    return fail(cudaErrorNotSupported, "the fake knows one dimension only");
  }
  if (block.x == 0 || block.x > kMostThreads) {
    return fail(cudaErrorInvalidConfiguration, text(block.x) + " threads in a block");
  }
  if (grid.x == 0 || grid.x > INT32_MAX) {
    return fail(cudaErrorInvalidConfiguration, "a grid of " + text(grid.x) + " blocks");
  }
  if (config.dynamicSmemBytes > shared_limit(kernel)) {
    return fail(cudaErrorInvalidValue, text(config.dynamicSmemBytes) +
                                           " bytes of shared memory, allowed are " +
                                           text(shared_limit(kernel)));
  }
  // A kernel with shared memory is one whose blocks wait for each other.
  if (config.dynamicSmemBytes > 0 && !at_once) {
    return fail(cudaErrorInvalidValue, "blocks that wait for each other need not run at once");
  }
  int fit = 0;
  occupancy(&fit, kernel, int(block.x), config.dynamicSmemBytes);
  if (at_once && grid.x > unsigned(fit * free_multiprocessors())) {
    return fail(
        cudaErrorCooperativeLaunchTooLarge,
        text(grid.x) + " blocks at once on " + text(free_multiprocessors()) + " multiprocessors");
  }
  ++counts.launches;
  counts.cooperative += at_once;
  const unsigned blocks = grid.x - (options.bug == Bug::LostBlock && grid.x > 1);
  const unsigned threads = options.bug == Bug::HalfBlock ? block.x / 2 : block.x;
  return enqueue(config.stream, [=, shared = config.dynamicSmemBytes, thread = std::move(thread)] {
    if (!at_once) return run_threads(blocks, threads, thread);
    const std::string failure = fusedrnn::cuda::emulated::launch(int(blocks), int(threads), shared,
                                                                 random_below(UINT32_MAX), thread);
    if (!failure.empty()) fault(failure);
  });
}

cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
    return fail(cudaErrorNotSupported, "an attribute of a kernel that the fake does not know");
  }
  if (value < 0 || size_t(value) > kSharedOptin) {
    return fail(cudaErrorInvalidValue, std::to_string(value) + " bytes of shared memory");
  }
  allowed_shared[kernel] = size_t(value);
  return cudaSuccess;
}

cudaError_t occupancy(int* blocks, const void* kernel, int threads, size_t shared_bytes) {
  const bool fits = threads > 0 && threads <= kMostThreads && shared_bytes <= shared_limit(kernel);
  *blocks = fits ? kBlocksAtOnce : 0;
  return cudaSuccess;
}

}  // namespace fake

using namespace fake;

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDeviceFunction: return "invalid device function";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalState: return "the operation cannot be performed in the present state";
    case cudaErrorLaunchOutOfResources: return "too many resources requested for launch";
    case cudaErrorAssert: return "device-input_gates assert triggered";
    case cudaErrorCooperativeLaunchTooLarge: return "too many blocks in cooperative launch";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
  }
  return "unrecognized error code";
}
cudaError_t cudaGetLastError() {
  if (options.bug == Bug::KeptError) return last_error;
  return std::exchange(last_error, sticky);
}
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = int(std::size(kMultiprocessors));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= int(std::size(kMultiprocessors))) {
    return fail(cudaErrorInvalidDevice, "an attribute of device " + std::to_string(device));
  }
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors[device]; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
    case cudaDevAttrCooperativeLaunch: *value = 1; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(kSharedOptin); return cudaSuccess;
  }
  return fail(cudaErrorNotSupported, "an attribute of a device that the fake does not know");
}

cudaError_t cudaMemsetAsync(void* memory, int byte, size_t count, cudaStream_t stream) {
  if (!is_on_gpu(memory, count)) return fail(cudaErrorInvalidValue, "a memset beside the memory");
  if (options.bug == Bug::LostMemset) return cudaSuccess;
  return enqueue(stream, [=] { memset(memory, byte, count); });
}
