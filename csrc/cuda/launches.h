// The GPU's kernels as the backend calls them.  No torch and no CUDA header here, so that a build
// for the CPU can put its emulation behind the same names (tests/emulator).
#pragma once
#include <cstdint>

#include "../base/launch.h"
#include "../step/step.h"

namespace fusedrnn::cuda {

template <class T>
using Forward = ForwardStep<T, T>;
template <class T>
using Backward = BackwardStep<T, T>;

template <class T>
Launch forward(StageKind kind, const Forward<T>& step, int64_t rows, Stream stream);
template <class T>
Launch backward(StageKind kind, const Backward<T>& step, int64_t rows, Stream stream);

template <class T>
Launch gather(const GatherStep<T, T>& step, int64_t rows, Stream stream);
template <class T>
Launch clear(const ClearStep<T>& step, int64_t rows, Stream stream);

template <class T>
Launch dropout(const DropoutStep<T>& step, int64_t rows, Stream stream);

template <class T>
Launch draw(const DrawStep<T>& step, int64_t rows, Stream stream);

// The number of rows that one thread sums.
constexpr int64_t kSumRows = 64;

// Sums in a fixed order.  partial: memory for partial sums, all_columns() numbers for each kSumRows
// rows.
template <class T>
Launch column_sums(const ColumnSums<T>& sums, Acc<T>* partial, Stream stream);

// *replay_offset = value, in the order of the stream.
Launch set_replay_offset(int64_t* replay_offset, int64_t value, Stream stream);

}  // namespace fusedrnn::cuda
