// A second stream in addition to torch's current one, for work that may run at the same time.
#pragma once
#include <cuda_runtime.h>

#include <map>

namespace fusedrnn::cuda {

struct SecondStream {
  cudaStream_t stream = nullptr;
  cudaEvent_t of_first = nullptr, of_second = nullptr;  // the other stream waits for this event
};

// One for each thread and device, so that a capture by one thread does not involve another.  It has
// the lowest priority, because callers wait for the other streams.
inline cudaError_t second_stream(int device, SecondStream* second) {
  struct Streams {
    std::map<int, SecondStream> of_device;
    ~Streams() {
      for (const auto& [device, own] : of_device) {
        if (own.of_second != nullptr) cudaEventDestroy(own.of_second);
        if (own.of_first != nullptr) cudaEventDestroy(own.of_first);
        if (own.stream != nullptr) cudaStreamDestroy(own.stream);
      }
    }
  };
  static thread_local Streams streams;
  SecondStream& own = streams.of_device[device];
  cudaError_t error = cudaSuccess;
  if (own.stream == nullptr) {
    int least = 0, greatest = 0;
    error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (error != cudaSuccess) return error;
    error = cudaStreamCreateWithPriority(&own.stream, cudaStreamNonBlocking, least);
  }
  for (cudaEvent_t* event : {&own.of_first, &own.of_second}) {
    if (error == cudaSuccess && *event == nullptr) {
      error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
    }
  }
  *second = own;
  return error;
}

}  // namespace fusedrnn::cuda
