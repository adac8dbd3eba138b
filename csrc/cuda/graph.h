// A CUDA graph: kernels that are recorded once and launched together any number of times.
#pragma once
#include <cuda_runtime.h>

#include <map>
#include <utility>

namespace fusedrnn::cuda {

// Work that has been launched completes even if the graph is destroyed.
class Graph {
 public:
  Graph() = default;
  ~Graph() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  bool is_recorded() const { return executable_ != nullptr; }
  cudaError_t launch(cudaStream_t stream) const { return cudaGraphLaunch(executable_, stream); }

  // Records what enqueue(stream) enqueues, without running it.  The stream is our own: the default
  // stream cannot record, and other code might use one of the user's streams meanwhile.
  template <class F>
  cudaError_t record(int device, const F& enqueue) {
    cudaStream_t stream = nullptr;
    cudaError_t error = recording_stream(device, &stream);
    if (error != cudaSuccess) return error;
    error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
    if (error != cudaSuccess) return error;
    Capture capture{stream};
    enqueue(stream);
    error = capture.end();
    if (error != cudaSuccess) return error;
    return cudaGraphInstantiateWithFlags(&executable_, capture.graph, 0);
  }

 private:
  struct Capture {  // ends the capture even if `enqueue` throws
    cudaStream_t stream;
    cudaGraph_t graph = nullptr;

    ~Capture() {
      if (stream != nullptr) {
        end();
        cudaGetLastError();  // whatever broke the recording has reported its error
      }
      if (graph != nullptr) cudaGraphDestroy(graph);
    }
    cudaError_t end() { return cudaStreamEndCapture(std::exchange(stream, nullptr), &graph); }
  };

  // One for each thread and device.
  static cudaError_t recording_stream(int device, cudaStream_t* stream) {
    struct Streams {
      std::map<int, cudaStream_t> of_device;
      ~Streams() {
        for (const auto& [device, stream] : of_device) cudaStreamDestroy(stream);
      }
    };
    static thread_local Streams streams;
    cudaStream_t& own = streams.of_device[device];
    cudaError_t error = cudaSuccess;
    if (own == nullptr) error = cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking);
    *stream = own;
    return error;
  }

  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace fusedrnn::cuda
