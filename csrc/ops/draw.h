// Random numbers by themselves, as the kernels draw them.
#pragma once
#include <algorithm>

#include "passes.h"

namespace fusedrnn {

// Checks all arguments of draw() but the dtype.
inline void check_draw(const Tensor& seed, int64_t first_step, int64_t steps, int64_t batch,
                       int64_t width, int64_t stream, int64_t distribution) {
  FUSEDRNN_CHECK(seed.scalar_type() == ScalarType::Long, "seed must be Long, got ",
                 torch::headeronly::toString(seed.scalar_type()));
  FUSEDRNN_CHECK(seed.numel() == 1, "seed must have one element, got ", shape_text(seed.sizes()));
  FUSEDRNN_CHECK(steps >= 0 && batch >= 0 && width >= 0,
                 "steps, batch and width must be 0 or more, got ", steps, ", ", batch, " and ",
                 width);
  const int64_t rows = times(std::max<int64_t>(steps, 1), std::max<int64_t>(batch, 1));
  FUSEDRNN_CHECK(rows <= kMostRows && width <= kMostRows,
                 "steps * batch and width must be below 2^32, got ", steps, ", ", batch, " and ",
                 width);
  FUSEDRNN_CHECK(times(rows, width) <= kMostNumbers,
                 "sizes are too large: there may be 2^50 numbers, got ", steps, " steps of ", batch,
                 " rows of ", width);
  FUSEDRNN_CHECK(first_step >= 0 && first_step <= kMostRows - steps,
                 "first_step must be 0 or more, and below 2^32 with all steps, got ", first_step);
  FUSEDRNN_CHECK(stream >= 0 && stream <= UINT32_MAX, "stream must be in [0, 2^32), got ", stream);
  FUSEDRNN_CHECK(distribution == 0 || distribution == 1,
                 "distribution must be 0 (normal) or 1 (uniform), got ", distribution);
}

// The operator `draw`: the numbers of the steps from first_step on, (steps, batch, width), on the
// device of seed.  stream: the last word of the Philox counter, as a layer's noise_stream is.
template <class Platform>
Tensor draw_operator(Tensor seed, int64_t first_step, int64_t steps, int64_t batch, int64_t width,
                     int64_t stream, int64_t distribution, ScalarType dtype) {
  check_draw(seed, first_step, steps, batch, width, stream, distribution);
  return dispatch_dtype("dtype", dtype, [&](auto element) {
    using T = decltype(element);
    Platform platform(seed, Tuning::of(0));
    Tensor out = allocate(seed, {steps, batch, width}, dtype, "the random numbers");
    if (out.numel() == 0) return out;
    BackendOf<Platform, T> backend = platform.template backend<T>();
    backend.draw({.width = width,
                  .batch = batch,
                  .seed = Arguments::data<int64_t>(seed),
                  .stream = stream,
                  .first_step = first_step,
                  .distribution = Distribution(distribution),
                  .out = pointer<T>(out)},
                 steps * batch);
    return out;
  });
}

}  // namespace fusedrnn
