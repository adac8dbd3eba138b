// Other ways for a persistent kernel to take a step, which the benchmark compares with the way of
// the package (bench/phases.h).
#pragma once

namespace fusedrnn::cuda {

enum Variant : unsigned {
  kAsInPackage = 0,
  kRing = 1,  // backward: what a unit reads from memory goes through a ring, as in forward
};

}  // namespace fusedrnn::cuda
