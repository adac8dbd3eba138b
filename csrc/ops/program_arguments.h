// The checked arguments of the operators of programs.  Before anything is computed, it is certain
// that all memory exists that a program reads or writes.
//
// Longer than 350 lines, because all checks belong to one call.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "../base/limits.h"
#include "../program/call.h"
#include "passes.h"
#include "programs.h"
#include "tensors.h"

namespace fusedrnn {

using Tensors = std::vector<Tensor>;

// Weights, (terms, columns) each, and vectors, (1, width) each, in the type of their program.
struct Constants {
  std::vector<Matrix<const void>> weights, vectors;
};

// What forward and backward of a program have in common.
struct ProgramCall {
  int64_t program;
  const Tensors& inputs;   // (T, B, width) each
  const Tensors& carries;  // (B, width) each
  const Constants& constants;
  const Tensors& reset_to;  // of each carry: (B, width) or (1, width), (T, B, width), or empty
  const std::vector<int64_t>& reset_kinds;  // of each carry, as program::ResetKind
  const MaybeTensor& lengths;               // (B) on the CPU
  const MaybeTensor& reset;                 // (T, B)
  const MaybeTensor& seed;
  int64_t stream, first_step;
  bool reverse;
  int64_t chunk;             // steps of a chunk, or 0
  const Tensors& sequences;  // (T, B, width) each
  const Tensors& kept;       // (chunks, B, width), of each carry that is in no sequence
  const Tensors& saved;      // (T * B, columns) of each array, or an empty list
};

// Memory for gradients of weights, (terms, columns) each, and of vectors, in the type in which
// these are added up; null where none is wanted.
struct ConstantGradients {
  std::vector<Matrix<void>> weights;
  std::vector<void*> vectors;
};

// The gradients of results, and memory for those of arguments.  An empty tensor stands for none.
struct ProgramGradients {
  const Tensors &sequences, &last;
  const Tensors &inputs, &carries;
  const ConstantGradients& constants;
  const Tensors& reset_to;
};

class ProgramArguments {
 public:
  // is_backward: whether sequences and states are read and not written.
  ProgramArguments(const ProgramCall& call, bool is_backward)
      : call_(call), is_backward_(is_backward), known_(Programs::all().at(call.program)),
        program_(known_.program), device_(like().device()) {
    check_options();
    check_sizes();
    check_all("sequences", call.sequences, program_.sequences, {seq_len_, batch_}, true);
    check_all("inputs", call.inputs, program_.inputs, {seq_len_, batch_});
    std::vector<int64_t> widths, columns;
    for (const program::Carry& carry : program_.carries) {
      widths.push_back(carry.width);
      if (!carry.is_in_sequence()) kept_widths_.push_back(carry.width);
    }
    check_all("carries", call.carries, widths, {batch_});
    check_resets();
    check_masks();
    for (const program::Array& array : program_.arrays) columns.push_back(array.columns);
    if (!call.saved.empty()) {
      check_all("saved", call.saved, columns, {seq_len_ * batch_}, true, sum_dtype());
    }
    if (!call.kept.empty()) check_kept(call.kept);
  }

  // A tensor of this call.
  const Tensor& like() const {
    const Tensors& known = call_.sequences.empty() ? call_.inputs : call_.sequences;
    FUSEDRNN_CHECK(!known.empty(), "a program needs a sequence or an input");
    return known[0];
  }
  const KnownProgram& known() const { return known_; }
  int64_t seq_len() const { return seq_len_; }
  int64_t batch() const { return batch_; }

  // Weights and vectors that are tensors of their own.
  Constants checked(const Tensors& weights, const Tensors& vectors) const {
    check_all("vectors", vectors, program_.vectors, {});
    check_weights("weights", weights, known_.dtype, false);
    Constants found;
    for (const Tensor& w : weights) {
      found.weights.push_back({w.const_data_ptr(), w.size(0), w.size(1), w.stride(0), w.stride(1)});
    }
    for (const Tensor& v : vectors) {
      found.vectors.push_back({v.const_data_ptr(), 1, v.size(0), v.size(0), v.stride(0)});
    }
    return found;
  }
  // Memory for their gradients, the same.
  ConstantGradients checked_gradients(const Tensors& weights, const Tensors& vectors) const {
    check_wanted("grad_vectors", vectors, program_.vectors, {}, true, sum_dtype());
    check_weights("grad_weights", weights, sum_dtype(), true);
    ConstantGradients found;
    for (const Tensor& w : weights) {
      found.weights.push_back(is_none(w) ? Matrix<void>{}
                                         : Matrix<void>{w.mutable_data_ptr(), w.size(0), w.size(1),
                                                        w.stride(0), w.stride(1)});
    }
    for (const Tensor& v : vectors) {
      found.vectors.push_back(is_none(v) ? nullptr : v.mutable_data_ptr());
    }
    return found;
  }
  // The carries after the sequence.
  void check_last(const Tensors& last) const {
    check_count("last", last.size(), program_.carries.size());
    for (size_t j = 0; j < last.size(); ++j) {
      check({"last"}, last[j], {batch_, program_.carries[j].width}, true, known_.dtype);
    }
  }
  // What backward needs besides.
  void check_gradients(const ProgramGradients& g) const {
    if (!kept_widths_.empty()) check_kept(call_.kept);
    const Shape whole{seq_len_, batch_};
    check_wanted("grad_sequences", g.sequences, program_.sequences, whole, false, known_.dtype);
    check_wanted("grad_inputs", g.inputs, program_.inputs, whole, true, known_.dtype);
    std::vector<int64_t> widths;
    for (const program::Carry& carry : program_.carries) widths.push_back(carry.width);
    check_wanted("grad_last", g.last, widths, {batch_}, false, known_.dtype);
    check_wanted("grad_carries", g.carries, widths, {batch_}, true, known_.dtype);
    check_count("grad_reset_to", g.reset_to.size(), widths.size());
    for (size_t j = 0; j < widths.size(); ++j) {
      if (is_none(g.reset_to[j])) continue;
      const program::ResetKind kind = kind_of(j);
      FUSEDRNN_CHECK(has_values(kind), "grad_reset_to[", j, "] must be empty, as reset_to is");
      if (kind == program::ResetKind::Steps) {
        check({"grad_reset_to"}, g.reset_to[j], {seq_len_, batch_, widths[j]}, true, known_.dtype);
      } else {
        check({"grad_reset_to"}, g.reset_to[j], {batch_, widths[j]}, true, sum_dtype());
      }
    }
  }

  // Makes available to kernels what may lie elsewhere.  Call once, before call().
  template <class Platform>
  void place(Platform& platform) {
    for (const Tensor& carry : call_.carries) carries_.push_back(Arguments::dense(carry));
    for (size_t j = 0; j < call_.reset_to.size(); ++j) {
      const Tensor& to = call_.reset_to[j];
      const bool is_ready = !has_values(kind_of(j)) || has_unit_columns(to);
      reset_to_.push_back(is_ready ? to : torch::stable::contiguous(to));
    }
    if (!call_.lengths) return;
    lengths_ = data<int64_t>(*call_.lengths);
    if (like().is_cpu()) return;
    Tensor host = allocate(*call_.lengths, {batch_}, ScalarType::Long, "lengths");
    std::copy_n(lengths_, batch_, static_cast<int64_t*>(host.mutable_data_ptr()));
    platform.keep(host);
    device_lengths_ = allocate(like(), {batch_}, ScalarType::Long, "lengths");
    torch::stable::copy_(*device_lengths_, host, /*non_blocking=*/true);
    lengths_ = data<int64_t>(*device_lengths_);
  }

  template <class T>
  program::Call<T> call() const {
    using A = Acc<T>;
    program::Call<T> c{};
    c.program = &program_;
    c.flow = &known_.flow;
    c.stages = known_.stages;
    c.seq_len = seq_len_;
    c.batch = batch_;
    c.chunk = chunk_;
    c.inputs.reserve(call_.inputs.size());
    for (const Tensor& x : call_.inputs) c.inputs.push_back(sequence<T>(x));
    c.carries.reserve(carries_.size());
    for (const Tensor& carry : carries_) c.carries.push_back(data<T>(carry));
    c.weights.reserve(call_.constants.weights.size());
    for (const Matrix<const void>& w : call_.constants.weights) {
      c.weights.push_back(Matrix<const T>::strided(static_cast<const T*>(w.data), w.rows, w.columns,
                                                   w.row_stride, w.column_stride));
    }
    c.vectors.reserve(call_.constants.vectors.size());
    for (const Matrix<const void>& v : call_.constants.vectors) {
      c.vectors.push_back(
          {static_cast<const T*>(v.data), 1, v.columns, v.columns, v.column_stride});
    }
    c.reset_to.reserve(carries_.size());
    for (size_t j = 0; j < carries_.size(); ++j) c.reset_to.push_back(reset_value<T>(j));
    c.seed = call_.seed ? data<int64_t>(*call_.seed) : nullptr;
    c.stream = call_.stream;
    c.first_step = call_.first_step;
    c.mask = {lengths_, call_.reset ? data<bool>(*call_.reset) : nullptr, seq_len_, batch_,
              call_.reverse ? -1 : 1};
    c.rows_at = call_.lengths ? rows_at_.data() : nullptr;
    c.full_steps = full_steps_;
    c.ends_at = ends_at_;
    c.sequences.reserve(call_.sequences.size());
    for (const Tensor& s : call_.sequences) c.sequences.push_back(kept_memory<T>(s));
    c.kept.reserve(program_.carries.size());
    size_t kept = 0;
    for (const program::Carry& carry : program_.carries) {
      const bool has_none = carry.is_in_sequence() || call_.kept.empty();
      c.kept.push_back(has_none ? nullptr : kept_memory<A>(call_.kept[kept++]));
    }
    for (const Tensor& s : call_.saved) c.saved.push_back(kept_memory<A>(s));
    return c;
  }

  // The gradients that are given must have been checked, and live as long as the result.
  template <class T>
  program::Gradients<T> gradients(const ProgramGradients& g, Tensors& dense) const {
    using A = Acc<T>;
    program::Gradients<T> d{};
    d.sequences.reserve(g.sequences.size());
    for (const Tensor& s : g.sequences) {
      d.sequences.push_back(is_none(s) ? Sequence<const T>{} : sequence<T>(s));
    }
    d.last.reserve(g.last.size());
    dense.reserve(g.last.size());
    for (const Tensor& l : g.last) {
      dense.push_back(Arguments::dense(l));
      d.last.push_back(is_none(l) ? nullptr : data<T>(dense.back()));
    }
    d.inputs.reserve(g.inputs.size());
    for (const Tensor& x : g.inputs) d.inputs.push_back(wanted<T>(x));
    d.carries.reserve(g.carries.size());
    for (const Tensor& c : g.carries) d.carries.push_back(wanted<T>(c));
    d.reset_rows.reserve(g.reset_to.size());
    d.reset_steps.reserve(g.reset_to.size());
    d.weights.reserve(g.constants.weights.size());
    for (const Matrix<void>& w : g.constants.weights) {
      d.weights.push_back(w.data == nullptr
                              ? Matrix<A>{}
                              : Matrix<A>::strided(static_cast<A*>(w.data), w.rows, w.columns,
                                                   w.row_stride, w.column_stride));
    }
    d.vectors.reserve(g.constants.vectors.size());
    for (void* v : g.constants.vectors) d.vectors.push_back(static_cast<A*>(v));
    for (size_t j = 0; j < g.reset_to.size(); ++j) {
      const bool is_steps = kind_of(j) == program::ResetKind::Steps;
      d.reset_rows.push_back(is_steps ? nullptr : wanted<A>(g.reset_to[j]));
      d.reset_steps.push_back(is_steps ? wanted<T>(g.reset_to[j]) : nullptr);
    }
    return d;
  }

  static bool is_none(const Tensor& tensor) { return tensor.dim() == 1 && tensor.numel() == 0; }

 private:
  template <class T>
  static const T* data(const Tensor& tensor) {
    return static_cast<const T*>(tensor.const_data_ptr());
  }
  template <class P>
  P* kept_memory(const Tensor& tensor) const {
    return is_backward_ ? const_cast<P*>(data<P>(tensor)) : pointer<P>(tensor);
  }
  template <class P>
  static P* wanted(const Tensor& tensor) {
    return is_none(tensor) ? nullptr : pointer<P>(tensor);
  }
  template <class T>
  static Sequence<const T> sequence(const Tensor& t) {
    return {data<T>(t), t.size(2), t.stride(0), t.stride(1), t.stride(2)};
  }
  static bool has_values(program::ResetKind kind) {
    return kind == program::ResetKind::Rows || kind == program::ResetKind::Steps;
  }
  static bool has_unit_columns(const Tensor& t) {
    const int64_t last = t.dim() - 1;
    return t.stride(last) == 1 || t.size(last) == 1;
  }
  program::ResetKind kind_of(size_t j) const {
    return call_.reset_kinds.empty() ? program::ResetKind::Zero
                                     : program::ResetKind(call_.reset_kinds[j]);
  }
  template <class T>
  program::ResetTo<const T> reset_value(size_t j) const {
    const program::ResetKind kind = kind_of(j);
    if (!has_values(kind)) return {kind, nullptr, 0, 0};
    const Tensor& to = reset_to_[j];
    const int64_t rows = to.dim() - 2;
    const int64_t row_stride = to.size(rows) == 1 ? 0 : to.stride(rows);
    return {kind, data<T>(to), row_stride, rows == 1 ? to.stride(0) : 0};
  }
  ScalarType sum_dtype() const {
    return known_.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  }

  void check_count(const char* name, size_t count, size_t expected) const {
    FUSEDRNN_CHECK(count == expected, name, " must have ", expected,
                   " tensors for this program, got ", count);
  }
  // What an error calls a tensor, of which there mostly is none.
  struct Name {
    const char* list;
    size_t i = SIZE_MAX;
  };
  static std::string name_of(const Name& name) {
    if (name.i == SIZE_MAX) return name.list;
    return std::string(name.list) + "[" + text_of(name.i) + "]";
  }
  // At most three sizes, in no memory of its own.
  struct Shape {
    int64_t sizes[3] = {};
    size_t dims = 0;

    Shape(std::initializer_list<int64_t> given) {
      for (const int64_t size : given) sizes[dims++] = size;
    }
    Shape with(int64_t size) const {
      Shape longer = *this;
      longer.sizes[longer.dims++] = size;
      return longer;
    }
  };

  void check(const Name& name, const Tensor& tensor, const Shape& shape, bool is_contiguous,
             ScalarType dtype) const {
    const auto sizes = tensor.sizes();
    if (!std::equal(sizes.begin(), sizes.end(), shape.sizes, shape.sizes + shape.dims)) {
      fail(name_of(name), " must have shape ", shape_text({shape.sizes, shape.dims}), ", got ",
           shape_text(sizes));
    }
    if (tensor.scalar_type() != dtype) {
      fail(name_of(name), " must be ", torch::headeronly::toString(dtype), ", got ",
           torch::headeronly::toString(tensor.scalar_type()));
    }
    if (tensor.device() != device_) {
      fail(name_of(name), " must be on the device of the other tensors");
    }
    if (is_contiguous && !tensor.is_contiguous()) fail(name_of(name), " must be contiguous");
  }
  // Checks tensors of the shape (*leading, width) each.
  void check_all(const char* name, const Tensors& tensors, const std::vector<int64_t>& widths,
                 const Shape& leading, bool is_contiguous, ScalarType dtype) const {
    check_count(name, tensors.size(), widths.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      check({name, i}, tensors[i], leading.with(widths[i]), is_contiguous, dtype);
    }
  }
  void check_all(const char* name, const Tensors& tensors, const std::vector<int64_t>& widths,
                 const Shape& leading, bool is_contiguous = false) const {
    check_all(name, tensors, widths, leading, is_contiguous, known_.dtype);
  }
  // The same for tensors that may be empty.
  void check_wanted(const char* name, const Tensors& tensors, const std::vector<int64_t>& widths,
                    const Shape& leading, bool is_contiguous, ScalarType dtype) const {
    check_count(name, tensors.size(), widths.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (is_none(tensors[i])) continue;
      check({name, i}, tensors[i], leading.with(widths[i]), is_contiguous, dtype);
    }
  }

  void check_options() const {
    FUSEDRNN_CHECK(call_.chunk >= 0, "chunk must be 0 (automatic) or more, got ", call_.chunk);
    FUSEDRNN_CHECK(call_.stream >= 0, "stream must be 0 or more, got ", call_.stream);
    for (const int64_t stream : program_.streams) {
      FUSEDRNN_CHECK(call_.stream <= int64_t(UINT32_MAX) - stream,
                     "stream must be below 2^32 with those of the program, got ", call_.stream);
    }
    FUSEDRNN_CHECK(!program_.draws() || call_.seed, "this program needs a seed");
    if (!call_.seed) return;
    const Tensor& seed = *call_.seed;
    FUSEDRNN_CHECK(seed.scalar_type() == ScalarType::Long && seed.numel() == 1,
                   "seed must be one Long, got ", torch::headeronly::toString(seed.scalar_type()),
                   " of shape ", shape_text(seed.sizes()));
    FUSEDRNN_CHECK(seed.device() == device_, "seed must be on the device of the other tensors");
  }
  void check_sizes() {
    const Tensor& sequence = like();
    FUSEDRNN_CHECK(sequence.dim() == 3, "sequences must have 3 dimensions, got ",
                   shape_text(sequence.sizes()));
    seq_len_ = sequence.size(0);
    batch_ = sequence.size(1);
    FUSEDRNN_CHECK(seq_len_ > 0, "expected a sequence of at least one step, got ",
                   shape_text(sequence.sizes()));
    check_program_sizes(known_, seq_len_, batch_);
    FUSEDRNN_CHECK(call_.first_step >= 0 && call_.first_step <= kMostRows - seq_len_,
                   "first_step must be 0 or more, and below 2^32 with all steps, got ",
                   call_.first_step);
    chunk_ = program_chunk(known_, call_.chunk, seq_len_, batch_);
  }
  void check_weights(const char* name, const Tensors& weights, ScalarType dtype,
                     bool is_gradient) const {
    check_count(name, weights.size(), size_t(program_.weights()));
    for (const program::Product& product : program_.products) {
      const Tensor& weight = weights[size_t(product.weight)];
      if (is_gradient && is_none(weight)) continue;
      const Name of{name, size_t(product.weight)};
      check(of, weight, {product.terms, product.columns}, false, dtype);
      if (!is_gradient) continue;
      const auto lies = [&](int64_t row_stride, int64_t column_stride) {
        return (weight.size(0) == 1 || weight.stride(0) == row_stride) &&
               (weight.size(1) == 1 || weight.stride(1) == column_stride);
      };
      FUSEDRNN_CHECK(lies(product.columns, 1) || lies(1, product.terms), name_of(of),
                     " must be contiguous, or its transpose must be");
    }
  }
  void check_resets() const {
    const size_t count = program_.carries.size();
    FUSEDRNN_CHECK(call_.reset_to.size() == call_.reset_kinds.size() &&
                       (call_.reset_to.size() == count || call_.reset_to.empty()),
                   "reset_to and reset_kinds must have ", count, " entries each, or none, got ",
                   call_.reset_to.size(), " and ", call_.reset_kinds.size());
    for (size_t j = 0; j < call_.reset_to.size(); ++j) {
      const int64_t kind = call_.reset_kinds[j], width = program_.carries[j].width;
      const Tensor& to = call_.reset_to[j];
      FUSEDRNN_CHECK(kind >= 0 && kind <= int64_t(program::ResetKind::Keep),
                     "reset_kinds must be in [0, ", int64_t(program::ResetKind::Keep), "], got ",
                     kind);
      if (!has_values(kind_of(j))) {
        FUSEDRNN_CHECK(is_none(to), name_of(Name{"reset_to", j}), " must be empty for kind ", kind,
                       ", got ", shape_text(to.sizes()));
      } else if (kind_of(j) == program::ResetKind::Steps) {
        check({"reset_to", j}, to, {seq_len_, batch_, width}, false, known_.dtype);
      } else {
        const bool is_one_row = to.dim() == 2 && to.size(0) == 1;
        check({"reset_to", j}, to, {is_one_row ? 1 : batch_, width}, false, known_.dtype);
      }
    }
  }
  void check_masks() {
    if (call_.reset) {
      check({"reset"}, *call_.reset, {seq_len_, batch_}, true, ScalarType::Bool);
    }
    full_steps_ = seq_len_;
    if (!call_.lengths) return;
    const Tensor& tensor = *call_.lengths;
    FUSEDRNN_CHECK(tensor.is_cpu() && tensor.scalar_type() == ScalarType::Long &&
                       tensor.dim() == 1 && tensor.size(0) == batch_ && tensor.is_contiguous(),
                   "lengths must be ", batch_, " contiguous Longs on the CPU, got ",
                   torch::headeronly::toString(tensor.scalar_type()), " of shape ",
                   shape_text(tensor.sizes()));
    read_lengths(data<int64_t>(tensor));
  }
  void read_lengths(const int64_t* lengths) {
    rows_at_.assign(size_t(seq_len_), 0);
    ends_at_.assign(size_t(seq_len_), false);
    for (int64_t b = 0; b < batch_; ++b) {
      FUSEDRNN_CHECK(lengths[b] >= 0 && lengths[b] <= seq_len_, "lengths must be in [0, ", seq_len_,
                     "], got ", lengths[b]);
      full_steps_ = std::min(full_steps_, lengths[b]);
      if (lengths[b] == 0) continue;
      rows_at_[size_t(lengths[b] - 1)] = b + 1;
      ends_at_[call_.reverse ? 0 : size_t(lengths[b] - 1)] = true;
    }
    for (int64_t t = seq_len_ - 2; t >= 0; --t) {
      rows_at_[size_t(t)] = std::max(rows_at_[size_t(t)], rows_at_[size_t(t + 1)]);
    }
  }
  void check_kept(const Tensors& kept) const {
    check_all("kept", kept, kept_widths_, {(seq_len_ + chunk_ - 1) / chunk_, batch_}, true,
              sum_dtype());
  }

 public:
  // Checks that all sizes are small enough for byte counts to stay far below 2^63.
  static void check_program_sizes(const KnownProgram& known, int64_t seq_len, int64_t batch) {
    check_rows(seq_len, batch);
    int64_t features = 0;
    const program::Program& p = known.program;
    const auto add = [&](int64_t width) { features = plus(features, width); };
    for (const auto* widths : {&p.inputs, &p.sequences, &p.vectors}) {
      for (const int64_t width : *widths) add(width);
    }
    for (const program::Carry& carry : p.carries) add(carry.width);
    for (const program::Value& value : p.values) add(value.columns);
    for (const program::Array& array : p.arrays) add(array.columns);
    for (const program::Stage& stage : p.stages) add(stage.width);
    const int64_t rows = times(std::max<int64_t>(seq_len, 1), std::max<int64_t>(batch, 1));
    FUSEDRNN_CHECK(times(rows, features) <= kMostNumbers,
                   "sizes are too large: a program may have 2^50 numbers, got ", seq_len,
                   " steps of ", batch, " rows of ", features, " columns");
  }
  // The steps of a chunk, if a caller asks for `chunk` or for none.
  static int64_t program_chunk(const KnownProgram& known, int64_t chunk, int64_t seq_len,
                               int64_t batch) {
    constexpr int64_t kRows = 256;  // as plan_by_sizes() in driver/planner.h
    if (chunk > 0) return std::min(chunk, seq_len);
    const int64_t rows = std::max<int64_t>(batch, 1);
    if (known.stages.is_for_gpu()) return gpu_chunk(seq_len, rows);
    return std::min((kRows + rows - 1) / rows, seq_len);
  }
  // On a GPU a chunk has more rows, since small kernels take as long as their launches: 1024 or
  // more, in at least 8 steps, so that carries that are kept before each chunk take an eighth of
  // those of all steps, or less.  The workspace is that of 8 steps of a large batch, whatever the
  // length; where 8 steps would be more than the square root of the length, of as many.  Products
  // are fastest if rows are a multiple of 128.
  static int64_t gpu_chunk(int64_t seq_len, int64_t batch) {
    constexpr int64_t kRows = 1024, kSteps = 8;
    int64_t steps = 1;
    while (steps < kSteps && steps * steps < seq_len) ++steps;
    const int64_t least = std::max((kRows + batch - 1) / batch, steps);
    return Chunks(seq_len, batch, /*on_gpu=*/true).at_least(least);
  }

 private:
  const ProgramCall call_;
  const bool is_backward_;
  const KnownProgram& known_;
  const program::Program& program_;
  const torch::stable::Device device_;
  int64_t seq_len_, batch_, chunk_, full_steps_;
  std::vector<int64_t> kept_widths_, rows_at_;
  std::vector<bool> ends_at_;
  Tensors carries_, reset_to_;
  MaybeTensor device_lengths_;
  const int64_t* lengths_ = nullptr;
};

}  // namespace fusedrnn
