// The result of launching a kernel, for code that does not include CUDA's headers.
#pragma once

struct CUstream_st;

namespace fusedrnn::cuda {

using Stream = CUstream_st*;

// The outcome of a launch.  error: a cudaError_t, 0 for success.  is_refused: the kernel needs all
// its blocks to run at once and the driver cannot run so many; nothing has been launched.
struct Launch {
  const char* kernel;
  int error;
  bool is_refused = false;
};

}  // namespace fusedrnn::cuda
