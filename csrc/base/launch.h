// A launch of a kernel as it is seen without CUDA's headers.
#pragma once

struct CUstream_st;

namespace fusedrnn::cuda {

using Stream = CUstream_st*;

// What became of a launch.  error: a cudaError_t, 0 for success.  is_refused: the driver does not
// run such a grid, of a kernel that has all its blocks run at once; nothing has happened.
struct Launch {
  const char* kernel;
  int error;
  bool is_refused = false;
};

}  // namespace fusedrnn::cuda
