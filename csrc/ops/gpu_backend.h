// The driver's backend for a GPU: stages by the kernels of cuda/, everything on one stream, without
// allocating or waiting.  Device is the part that calls CUDA: cuda_device.h, or its emulation on
// the CPU (tests/emulator).
//
// Launching a kernel costs about as much as running a small one, so the steps of a chunk are
// recorded into a graph, which later chunks launch at once.
//
// On request, a second stream does work that the steps do not wait for.
#pragma once
#include <algorithm>
#include <type_traits>
#include <utility>

#include "../cuda/launches.h"
#include "../cuda/memory.h"
#include "../cuda/program_launches.h"
#include "../persistent/arguments.h"
#include "../persistent/backward_arguments.h"
#include "../program/stage.h"
#include "stable.h"

namespace fusedrnn {

template <class Element, class Device>
class GpuBackend : public cuda::Memory<Element> {
 public:
  using Memory = cuda::Memory<Element>;
  using T = Element;
  using A = Acc<T>;

  struct Recording {
    int64_t first_row = 0;
    // Whether all kernels of a whole chunk have been loaded and the algorithms of its GEMMs chosen,
    // which depend on addresses too.  Neither may happen during a recording.
    bool is_warm = false;
    typename Device::Graph graph{};
  };

  explicit GpuBackend(Device& device) : device_(device), borrower_(device.borrower()) {}

  // Two streams, until join().
  class Split {
   public:
    explicit Split(Device* device) : device_(device) {
      if (device_ != nullptr) device_->fork();
    }
    ~Split() {  // after an error: the memory that both streams use is about to be freed
      if (device_ != nullptr) device_->abandon();
    }
    Split(Split&& other) noexcept : device_(std::exchange(other.device_, nullptr)) {}
    Split& operator=(Split&&) = delete;
    void join() {
      if (device_ != nullptr) std::exchange(device_, nullptr)->join();
    }

   private:
    Device* device_;
  };
  Split fork(bool wanted) {
    is_split_ = wanted;
    return Split(wanted ? &device_ : nullptr);
  }
  template <class F>
  void on_side_stream(const F& f) {
    if (!is_split_) return f();
    std::swap(scratch_, other_scratch_);
    device_.on_second_stream(f);
    std::swap(scratch_, other_scratch_);
  }
  void sync() {
    if (is_split_) device_.sync();
  }

  void expect(int64_t seq_len, int64_t batch) {
    batch_ = batch;
    terms_of_loop_ = seq_len + batch;
  }

  template <class C>
  void gemm(const Matrix<C>& out, const Matrix<const T>& a, const Matrix<const T>& b,
            bool accumulate, bool is_of_input = false) {
    const int64_t part = terms_at_once(out, a, is_of_input);
    if (part >= a.columns) return product(out, a, b, accumulate);
    for (int64_t begin = 0; begin < a.columns; begin += part) {
      const int64_t count = std::min(part, a.columns - begin);
      product(out, a.column_range(begin, count), b.row_range(begin, count),
              accumulate || begin > 0);
    }
  }

  template <class To, class From>
  void copy(const Matrix<To>& out, const Matrix<From>& from) const {
    device_.by_torch([=, borrower = borrower_] { borrower.copy(out, Matrix<const From>(from)); });
  }
  template <class To, class From>
  void copy_steps(const Sequence<To>& out, int64_t first, const Sequence<const From>& from,
                  int64_t begin, int64_t steps, int64_t batch) const {
    device_.by_torch(
        [=, borrower = borrower_] { borrower.copy_steps(out, first, from, begin, steps, batch); });
  }

  template <class C>
  void zero(const Matrix<C>& out) {
    device_.zero(out.data, size_t(out.rows * out.columns) * sizeof(C));
  }

  void forward(StageKind kind, const cuda::Forward<T>& step, int64_t rows) {
    check(cuda::forward<T>(kind, step, rows, device_.stream()), rows, step.width);
  }
  void backward(StageKind kind, const cuda::Backward<T>& step, int64_t rows) {
    check(cuda::backward<T>(kind, step, rows, device_.stream()), rows, step.width);
  }
  void gather(const GatherStep<T, T>& step, int64_t rows) {
    check(cuda::gather<T>(step, rows, device_.stream()), rows, step.width);
  }
  template <class X>
  void clear(const ClearStep<X>& step, int64_t rows) {
    check(cuda::clear(step, rows, device_.stream()), rows, step.width);
  }
  void dropout(const DropoutStep<T>& step, int64_t rows) {
    check(cuda::dropout<T>(step, rows, device_.stream()), rows, step.width);
  }
  void draw(const DrawStep<T>& step, int64_t rows) {
    check(cuda::draw<T>(step, rows, device_.stream()), rows, step.width);
  }
  void column_sums(const ColumnSums<T>& sums) {
    check(cuda::column_sums<T>(sums, scratch_.partial_sums, device_.stream()), sums.rows,
          sums.all_columns());
  }

  // The stages of programs, and what becomes of their carries.

  void stage(const program::Stages& stages, int64_t stage, bool is_backward,
             const program::StageArgs& args, int64_t rows) {
    const int64_t error = stages.launch(stage, is_backward, &args, rows, device_.stream());
    check({is_backward ? "stage_backward" : "stage_forward", int(error)}, rows, args.width);
  }
  template <class P, class To>
  void carry_before(const program::CarryBefore<T, P, To>& step, int64_t rows) {
    check(cuda::carry_before(step, rows, device_.stream()), rows, step.width);
  }
  template <class P>
  void carry_last(const program::CarryLast<T, P>& step, int64_t rows) {
    check(cuda::carry_last(step, rows, device_.stream()), rows, step.width);
  }
  void carry_gradient(const program::CarryGradient<T>& step, int64_t rows) {
    check(cuda::carry_gradient(step, rows, device_.stream()), rows, step.width);
  }
  void carry_part(const program::CarryPart<A>& step, int64_t rows) {
    check(cuda::carry_part(step, rows, device_.stream()), rows, step.width);
  }

  // Runs all steps of a chunk in one kernel.
  void forward_chunk(const cuda::PersistentPlan& plan, const cuda::PersistentForward<T>& chunk,
                     void* workspace) {
    check_chunk(cuda::launch_persistent_forward<T>(plan, chunk, workspace, device_.stream()),
                cuda::kernel_of<T>(plan, /*is_backward=*/false, device_.index()), chunk);
  }

  void backward_data_chunk(const cuda::PersistentPlan& plan,
                           const cuda::PersistentBackward<T>& chunk, void* workspace) {
    check_chunk(cuda::launch_persistent_backward<T>(plan, chunk, workspace, device_.stream()),
                cuda::kernel_of<T>(plan, /*is_backward=*/true, device_.index()), chunk);
  }

  // scratch: the memory of each stream; the second is null if there is no second stream.
  void use_scratch(char* const (&scratch)[2], const ScratchNeeds& needs) {
    Arena first(scratch[0]), second(scratch[1]);
    scratch_ = Memory::carve(first, needs);
    if (scratch[1] != nullptr) other_scratch_ = Memory::carve(second, needs);
  }

  template <class F>
  void enqueue(Recording& recording, bool is_whole, bool repeats, int64_t first_row,
               const F& steps) {
    if (!repeats || !recording.is_warm || is_by_torch_ || !device_.may_record()) {
      recording.is_warm = recording.is_warm || is_whole;
      return steps(nullptr);
    }
    if (!recording.graph.is_recorded()) {
      recording.first_row = first_row;
      device_.record(recording.graph, [&] { steps(scratch_.replay_offset); });
    }
    check(cuda::set_replay_offset(scratch_.replay_offset, first_row - recording.first_row,
                                  device_.stream()),
          1, 1);
    device_.launch(recording.graph);
  }

 private:
  // The number of terms that one product may sum, if float32 is not rounded to TF32.  cuBLASLt sums
  // terms one after another (seen on an H100), with an error that grows with the square root of
  // their number.  The gradient of a weight sums over all rows of a chunk, while a loop sums over
  // the rows of a step and then over the steps.  The gradient of the input has as many terms as in
  // a loop, but cuBLASLt splits a GEMM of a step's few rows, and not one of a chunk's rows.  The
  // products of single steps are the same as in a loop.
  template <class C>
  int64_t terms_at_once(const Matrix<C>& out, const Matrix<const T>& a, bool is_of_input) const {
    constexpr int64_t kRows = 256, kColumns = 128, kAligned = 64;
    if (!std::is_same_v<T, float> || !device_.keeps_float32()) return a.columns;
    const bool sums_rows = a.row_stride == 1;
    const bool is_of_many = is_of_input && out.rows > batch_;
    if (!sums_rows && !is_of_many) return a.columns;
    const int64_t most = sums_rows ? std::max(kRows, terms_of_loop_) : kColumns;
    const int64_t parts = (a.columns + most - 1) / most;
    if (parts <= 1) return a.columns;
    return (a.columns + parts * kAligned - 1) / (parts * kAligned) * kAligned;
  }

  template <class C>
  void product(const Matrix<C>& out, const Matrix<const T>& a, const Matrix<const T>& b,
               bool accumulate) {
    if (device_.gemm(out, a, b, accumulate, scratch_.gemm_workspace,
                     scratch_.gemm_workspace_bytes)) {
      return;
    }
    is_by_torch_ = true;
    const ScalarType type = std::is_same_v<T, float> && device_.torch_rounds_more()
                                ? ScalarType::Double
                                : kScalarType<A>;
    device_.by_torch([=, borrower = borrower_] { borrower.multiply(out, a, b, accumulate, type); });
  }

  template <class Error = std::runtime_error>
  void check(const cuda::Launch& launched, int64_t rows, int64_t width) const {
    if (launched.error == 0) return;
    Device::forget_error();
    fail<Error>("kernel ", launched.kernel, " over ", rows, " rows of ", width, " in ",
                torch::headeronly::toString(kScalarType<T>),
                " failed to launch: ", Device::message(launched.error));
  }
  template <class Chunk>
  void check_chunk(const cuda::Launch& launched, const cuda::PersistentKernel& kernel,
                   const Chunk& chunk) const {
    const int64_t rows = int64_t(chunk.steps) * chunk.batch, width = chunk.step[0].width;
    if (!launched.is_refused) return check(launched, rows, width);
    device_.refuse(kernel);
    check<LaunchRefused>(launched, rows, width);
  }

  Device& device_;
  Borrower borrower_;
  typename Memory::Scratch scratch_{},
      other_scratch_{};  // of the current stream, and of the other one
  int64_t batch_ = 0, terms_of_loop_ = 0;
  bool is_split_ = false;
  bool is_by_torch_ =
      false;  // whether torch did a product: it allocates, which a recording must not
};

}  // namespace fusedrnn
