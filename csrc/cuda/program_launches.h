// The kernels between the steps of programs, as the backend calls them: see launches.h.
#pragma once
#include <cstdint>

#include "../base/launch.h"
#include "../program/carries.h"

namespace fusedrnn::cuda {

template <class T, class P, class To>
Launch carry_before(const program::CarryBefore<T, P, To>& step, int64_t rows, Stream stream);
template <class T, class P>
Launch carry_last(const program::CarryLast<T, P>& step, int64_t rows, Stream stream);
template <class T>
Launch carry_gradient(const program::CarryGradient<T>& step, int64_t rows, Stream stream);
template <class A>
Launch carry_part(const program::CarryPart<A>& step, int64_t rows, Stream stream);

}  // namespace fusedrnn::cuda
