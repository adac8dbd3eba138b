// Any cell through time: chunks, GEMMs, stages, weight gradients.  No cell is named here and no
// dtype is fixed; a backend supplies GEMMs, copies and the loops over rows.
//
// Forward keeps nothing but the output, and of a cell with a state beside it the states before each
// chunk.  Every h_{t-1} is in the output, so backward needs no replay: for a chunk of steps, GEMMs
// over all its rows at once and one pass of each stage rebuild the intermediates, and only the
// adjoint chain dh_t -> dh_{t-1} runs step by step (and before it the states, without GEMMs).  The
// workspace is that of one chunk, whatever the length of the sequence.
//
// Time may run backwards.  Then "begin" and "t" of a chunk still count in the order of work, and
// rows lie as they do in memory: Chunk knows where.
//
// Backend: types T (tensors), O (GEMM operands), A = Acc<T>, and
//   gemm(Matrix<A> out, Matrix<const O> a, Matrix<const O> b, accumulate)   out (+)= a b; and then
//       whether it is the gradient of the input
//   copy(Matrix<To> out, Matrix<const From> from)                           converts
//   copy_steps(Sequence<To> out, first, Sequence<const From> from, begin, steps, batch)
//   forward / backward(StageKind, step, rows), gather / clear(step, rows): see step.h
//   column_sums(ColumnSums)
//   enqueue(Recording, is_whole, repeats, first_row, steps)   calls steps(shift), or replays what
//       an earlier call with `repeats` did, further on in the sequence by the difference of
//       first_row; is_whole: no step of a chunk is missing
//   forward_chunk(plan, PersistentForward, workspace): all steps of a chunk, if kPersistent
//   adjoint_chunk(plan, PersistentBackward, workspace): its adjoint chain, if kPersistent
//   kReplays: whether enqueue may do so.  kGemmRounds: whether gemm takes a Matrix<T> out as well.
//   scratch_bytes(ScratchNeeds), use_scratch(pointers, ScratchNeeds): memory of its own in the
//       workspace, for each stream
//   expect(seq_len, batch): of the whole sequence
//   split(wanted): an object.  While it lives, and if it is wanted, aside(f) calls f() for a second
//       stream, and meet() makes each of the two wait for what the other has been given so far; in
//       the end the first one does.  Else there is one stream for all.
#pragma once
#include <algorithm>
#include <type_traits>
#include <utility>

#include "cuda/persistent_backward_step.h"
#include "workspace.h"

namespace fusedrnn {

template <class Backend>
class Driver {
 public:
  using T = typename Backend::T;
  using O = typename Backend::O;
  using A = Acc<T>;

  Driver(const Backend& backend, const Layer<T>& layer) : backend_(backend), layer_(layer) {}

  int64_t forward_workspace_bytes() const {
    Arena arena;
    ForwardBuffers(layer_, arena);
    return arena.size_bytes();
  }
  int64_t backward_workspace_bytes(const Gradients<T>& gradients) const {
    Arena arena;
    BackwardBuffers(layer_, gradients, arena);
    return arena.size_bytes();
  }

  // Multiply-adds of the recurrent GEMMs of a step.
  int64_t step_work() const {
    int64_t work = 0;
    for (int s = 0; s <= layer_.last(); ++s) {
      work += layer_.columns(s) * layer_.weight[layer_.projection(s)].columns;
    }
    return work * layer_.batch;
  }

  // keep: seq_len * batch * kept_columns() numbers for the pre-activations, or null.  c_n: null if
  // the cell has no state but h.
  void forward(T* h_n, T* c_n, A* keep, void* workspace) {
    Arena arena(workspace);
    ForwardBuffers buffers(layer_, arena);
    prepare(buffers);
    if (buffers.carry != nullptr) {
      copy_rows(buffers.carry, layer_.has_state() ? layer_.cx : layer_.hx, hidden());
    }
    carry_ = buffers.carry;
    if (buffers.h != nullptr) copy_rows(buffers.h, layer_.hx, output());
    forward_chunks(Kept<A>(layer_, keep), buffers);
    if (buffers.h != nullptr) {
      copy_rows(h_n, buffers.h, output());
    } else {
      const Chunk last = chunk_at(layer_.chunks() - 1);
      backend_.copy(Matrix<T>::contiguous(h_n, layer_.batch, output()),
                    layer_.output_rows(last.first_row + last.row(last.steps - 1), layer_.batch));
    }
    if (c_n != nullptr) copy_rows(c_n, carry_, hidden());
  }

  // keep: what forward left there, or null to compute it again.  Whatever stands where gradients of
  // weights are wanted is overwritten, all of it.
  void backward(const Gradients<T>& gradients, const A* keep, void* workspace) {
    Arena arena(workspace);
    BackwardBuffers buffers(layer_, gradients, arena);
    prepare(buffers);
    start_adjoint(buffers.dh, gradients.h_n, output());
    if (layer_.has_state()) start_adjoint(buffers.dc, gradients.c_n, hidden());
    backward_chunks(gradients, Kept<const A>(layer_, keep), buffers);
    clear_rest(gradients);
    if (shares_bias_gradient(gradients)) {
      const int64_t columns = layer_.shared_columns();
      backend_.copy(Matrix<A>::contiguous(gradients.bias[0], 1, columns),
                    Matrix<const A>::contiguous(shared_bias(gradients), 1, columns));
    }
    if (gradients.hx != nullptr) copy_rows(gradients.hx, buffers.dh, output());
    if (gradients.cx != nullptr) copy_rows(gradients.cx, buffers.dc, hidden());
  }

 private:
  using Space = Workspace<Backend>;
  using Rebuilt = typename Space::Rebuilt;
  using Buffers = typename Space::Buffers;
  using ForwardBuffers = typename Space::Forward;
  using BackwardBuffers = typename Space::Backward;
  using Recording = typename Backend::Recording;
  static constexpr bool kTensorIsOperand = Space::kTensorIsOperand;
  static constexpr int64_t kLeastReplays = 3;

  // Steps that are worked on at once, and where their rows lie.
  struct Chunk {
    int64_t index, begin, steps;  // begin: steps done before it
    int64_t first, first_row;     // the earliest step in memory, and its first row
    int64_t batch;
    bool is_reversed;

    int64_t step(int64_t t) const { return is_reversed ? steps - 1 - t : t; }  // from `first` on
    int64_t row(int64_t t) const { return step(t) * batch; }
    int64_t rows() const { return steps * batch; }
  };

  Chunk chunk_at(int64_t index) const {
    Chunk c{};
    c.index = index;
    c.begin = index * layer_.chunk;
    c.steps = std::min(layer_.chunk, layer_.seq_len - c.begin);
    c.is_reversed = layer_.mask.direction < 0;
    c.first = c.is_reversed ? layer_.seq_len - c.begin - c.steps : c.begin;
    c.batch = layer_.batch;
    c.first_row = c.first * c.batch;
    return c;
  }
  bool is_finished(const Chunk& chunk) const { return layer_.rows_of_step(chunk.first) == 0; }

  // While one stream goes through the steps of a chunk, another, if there is one, multiplies the
  // inputs of the next.
  void forward_chunks(const Kept<A>& kept, ForwardBuffers& buffers) {
    Recording recording;
    auto streams = backend_.split(layer_.overlaps);
    const auto project = [&](int64_t index) {
      if (index == layer_.chunks() || is_finished(chunk_at(index))) return;
      backend_.aside([&] { project_input(chunk_at(index), buffers); });
    };
    if (layer_.overlaps) project(0);
    for (int64_t index = 0; index < layer_.chunks(); ++index) {
      const Chunk chunk = chunk_at(index);
      if (!layer_.overlaps) project(index);
      backend_.meet();
      if (layer_.states != nullptr && carry_ != state_before(chunk)) {
        copy_rows(state_before(chunk), carry_, hidden());
      }
      if (!is_finished(chunk)) forward_chunk(chunk, kept, buffers, recording);
      if (layer_.is_packed()) pack(output_sequence(), buffers.output, chunk);
      if (layer_.overlaps) project(index + 1);
    }
    streams.join();
  }

  // While one stream goes back through the steps of a chunk, another, if there is one, makes
  // gradients of what the chunk behind has left, and rebuilds the chunk before.
  void backward_chunks(const Gradients<T>& gradients, const Kept<const A>& kept,
                       BackwardBuffers& buffers) {
    Recording recording;
    auto streams = backend_.split(layer_.overlaps);
    const auto rebuild_before = [&](int64_t index) {
      do {
        if (--index < 0) return index;
      } while (is_finished(chunk_at(index)));
      backend_.aside([&] { rebuild(chunk_at(index), kept, buffers); });
      return index;
    };
    int64_t index = rebuild_before(layer_.chunks());
    backend_.meet();
    while (index >= 0) {
      const Chunk chunk = chunk_at(index);
      adjoint_chain(chunk, gradients, kept, buffers, recording);
      if (layer_.overlaps) index = rebuild_before(index);
      backend_.meet();
      backend_.aside([&] { leaf_gradients(chunk, gradients, buffers); });
      if (!layer_.overlaps) index = rebuild_before(index);
    }
    streams.join();
  }

  // Features of the state beside h, and of h.
  int64_t hidden() const { return layer_.sizes.hidden; }
  int64_t output() const { return layer_.sizes.output; }
  A* state_before(const Chunk& chunk) const {
    return layer_.states + chunk.index * layer_.batch * hidden();
  }
  template <class To, class From>
  void copy_rows(To* out, const From* from, int64_t columns) {
    backend_.copy(Matrix<To>::contiguous(out, layer_.batch, columns),
                  Matrix<const From>::contiguous(from, layer_.batch, columns));
  }
  void start_adjoint(A* d, const T* gradient, int64_t columns) {
    if (gradient != nullptr) {
      copy_rows(d, gradient, columns);
    } else {
      backend_.zero(Matrix<A>::contiguous(d, layer_.batch, columns));
    }
  }

  // The steps of a chunk.  All chunks but the first and a short last one are alike; to record them
  // pays for a few of these.
  template <class F>
  void enqueue_steps(Recording& recording, const Chunk& chunk, const F& enqueue) {
    const bool is_whole = chunk.steps == layer_.chunk;
    const bool repeats = chunk.begin > 0 && is_whole && layer_.rows_at == nullptr &&
                         layer_.seq_len > kLeastReplays * layer_.chunk;
    backend_.enqueue(recording, is_whole, repeats, chunk.first_row, enqueue);
  }

  // The same memory as another type, which it is wherever this is called.
  template <class To, class From>
  static To* same(From* p) {
    return reinterpret_cast<To*>(p);
  }

  // Weights and biases in the types that GEMMs and stages read: the user's own memory where it
  // serves, so that float weights are never copied.
  void prepare(const Buffers& buffers) {
    backend_.use_scratch(buffers.scratch, buffers.needs);
    backend_.expect(layer_.seq_len, layer_.batch);
    for (int p = 0; p < layer_.cell.num_projections; ++p) {
      const Matrix<const T>& w = layer_.weight[p];
      if (Space::weight_is_ready(w)) {
        if constexpr (kTensorIsOperand) weight_[p] = w;
      } else {
        const auto copy = Matrix<O>::contiguous(buffers.weight[p], w.rows, w.columns);
        backend_.copy(copy, w);
        weight_[p] = copy;
      }
      const Matrix<const T>& b = layer_.bias[p];
      if (b.data == nullptr) {
        bias_[p] = nullptr;
      } else if (Space::bias_is_ready(b)) {
        bias_[p] = reinterpret_cast<const A*>(b.data);
      } else {
        backend_.copy(Matrix<A>::contiguous(buffers.bias[p], 1, b.columns), b);
        bias_[p] = buffers.bias[p];
      }
    }
  }

  // copy: null where the user's own memory serves.
  Matrix<const O> input_rows(const Chunk& chunk, O* copy) {
    if constexpr (kTensorIsOperand) {
      if (copy == nullptr) {
        return {layer_.input.at(chunk.first), chunk.rows(), layer_.sizes.input,
                layer_.input.row_stride(layer_.seq_len, layer_.batch), 1};
      }
    }
    unpack(copy, layer_.input, chunk);
    if (layer_.mask.lengths != nullptr) {
      backend_.clear(ClearStep<O>{layer_.sizes.input, chunk.first_row, layer_.mask, copy},
                     chunk.rows());
    }
    if (layer_.dropout > 0) drop(copy, chunk);
    return Matrix<const O>::contiguous(copy, chunk.rows(), layer_.sizes.input);
  }

  // The steps of a chunk as rows of the workspace, whatever strides they have in memory.
  template <class To, class From>
  void unpack(To* rows, const Sequence<From>& sequence, const Chunk& chunk) {
    backend_.copy_steps(Sequence<To>::contiguous(rows, layer_.batch, sequence.width), 0,
                        Sequence<const std::remove_const_t<From>>(sequence), chunk.first,
                        chunk.steps, layer_.batch);
  }
  void pack(const Sequence<T>& sequence, const T* rows, const Chunk& chunk) {
    backend_.copy_steps(sequence, chunk.first,
                        Sequence<const T>::contiguous(rows, layer_.batch, sequence.width), 0,
                        chunk.steps, layer_.batch);
  }

  // The input of a chunk, or the gradient of what is left of it.
  void drop(O* x, const Chunk& chunk) {
    const double p = layer_.dropout;
    const DropoutStep<O> step{layer_.sizes.input,   chunk.first_row,         layer_.batch,
                              layer_.zoneout.seed,  layer_.dropout_layer,    layer_.first_step,
                              uint64_t(p * 0x1p32), p < 1 ? 1 / (1 - p) : 0, x};
    backend_.dropout(step, chunk.rows());
  }

  // eps, or the output's gradient, of a chunk; null if there is none.
  Rows<const T> rows_of(const Sequence<const T>& sequence, const Chunk& chunk, T* copy) {
    if (sequence.data == nullptr) return {};
    if (copy == nullptr) {
      return {sequence.at(chunk.first), sequence.row_stride(layer_.seq_len, layer_.batch), true};
    }
    unpack(copy, sequence, chunk);
    return {copy, sequence.width, false};
  }
  template <class P>
  static Rows<P> from_row(Rows<P> rows, int64_t row) {
    if (rows.data != nullptr) rows.data += row * rows.stride;
    return rows;
  }
  Sequence<T> output_sequence() const {
    return layer_.sequence(layer_.output, output(), layer_.output_stride);
  }
  // The output from a row on, if it is not packed.
  template <class P = T>
  Rows<P> output_from(int64_t row) const {
    return {same<P>(layer_.output + row * layer_.output_stride), layer_.output_stride, true};
  }

  // eps: of the chunk
  Noise<T> noise(const Rows<const T>& eps, int64_t row) const {
    return {from_row(eps, row), layer_.seed, layer_.layer, layer_.first_step};
  }

  Matrix<const O> weight(int s) const {  // a stage may read only the first rows of its projection
    return weight_[layer_.projection(s)].row_range(0, layer_.columns(s));
  }

  // What forward and backward fill in alike.  `row` counts from the start of the chunk; pre: the
  // pre-activations from that row on, or null to combine them from side and projection.
  template <class Step>
  Step make_step(int s, const Chunk& chunk, int64_t row, const A* pre, const A* side,
                 const A* projection) const {
    Step step{};
    step.width = layer_.width(s);
    step.is_last = s == layer_.last();
    step.first_row = chunk.first_row + row;
    step.mask = layer_.mask;
    step.zoneout = layer_.zoneout;
    step.pre = pre;
    step.side = side;
    step.side_bias = bias_[0];
    step.projection = projection;
    step.projection_bias = bias_[layer_.projection(s)];
    return step;
  }

  void project_input(const Chunk& chunk, const ForwardBuffers& buffers) {
    A* side = buffers.side_of(chunk.index);
    backend_.gemm(Matrix<A>::contiguous(side, chunk.rows(), layer_.side_columns()),
                  input_rows(chunk, buffers.x), weight_[0].transposed(), false);
  }

  void forward_chunk(const Chunk& chunk, const Kept<A>& kept, ForwardBuffers& buffers,
                     Recording& recording) {
    const Rows<const T> eps = rows_of(layer_.eps, chunk, buffers.eps);
    if constexpr (Backend::kPersistent) {
      if (layer_.is_persistent) return forward_at_once(chunk, eps, kept, buffers);
    }
    enqueue_steps(recording, chunk, [&](const int64_t* shift) {
      for (int64_t t = 0; t < chunk.steps; ++t) {
        forward_step(chunk, t, eps, shift, kept, buffers);
      }
    });
  }

  // h_{t-1} of step t as a GEMM reads it: where it does not stand in the output, stages leave it in
  // buffers.
  Matrix<const O> h_operand(const Chunk& chunk, int64_t t, int64_t rows,
                            const ForwardBuffers& buffers) const {
    if (buffers.h != nullptr) return Matrix<const O>::contiguous(buffers.h, rows, output());
    if (chunk.begin + t == 0) {
      return Matrix<const O>::contiguous(same<const O>(layer_.hx), rows, output());
    }
    const int64_t before = chunk.first_row + chunk.row(t) - layer_.mask.direction * layer_.batch;
    return {same<const O>(layer_.output + before * layer_.output_stride), rows, output(),
            layer_.output_stride, 1};
  }

  // Stage s of step t, whose GEMM gives `projection`.
  ForwardStep<T, O> forward_stage(int s, const Chunk& chunk, int64_t t, const Matrix<const O>& h,
                                  const A* projection, const Rows<const T>& eps,
                                  const Kept<A>& kept, const ForwardBuffers& buffers) const {
    const int64_t row = chunk.row(t), from_start = chunk.first_row + row;
    const A* side = buffers.side_of(chunk.index) + row * layer_.side_columns();
    auto step = make_step<ForwardStep<T, O>>(s, chunk, row, nullptr, side, projection);
    step.noise = noise(eps, row);
    step.keep = kept.at(s, from_start);
    if (s == layer_.core()) {
      step.carry = {buffers.carry, hidden()};
      step.carry_out = buffers.carry;
      if (buffers.carry == nullptr) step.carry = {same<const A>(h.data), h.row_stride};
    }
    if (step.is_last) {
      step.output = output_from(from_start);
      if (layer_.is_packed()) step.output = {buffers.output + row * output(), output(), false};
      step.operand = buffers.h;
      if (layer_.has_state()) step.h = {h.data, h.row_stride, false};
    } else {
      step.operand = buffers.operand[s];
    }
    return step;
  }

  void forward_step(const Chunk& chunk, int64_t t, const Rows<const T>& eps, const int64_t* shift,
                    const Kept<A>& kept, const ForwardBuffers& buffers) {
    const int64_t rows = layer_.rows_of_step(chunk.first + chunk.step(t));
    if (rows == 0) return;
    A* side = buffers.side_of(chunk.index) + chunk.row(t) * layer_.side_columns();
    const Matrix<const O> h = h_operand(chunk, t, rows, buffers);
    Matrix<const O> operand = h;
    for (int s = 0; s <= layer_.last(); ++s) {
      const bool adds_up = layer_.adds_up(s);
      const auto projection =
          Matrix<A>::contiguous(adds_up ? side : buffers.projection[s], rows, layer_.columns(s));
      backend_.gemm(projection, operand, weight(s).transposed(), adds_up);
      auto step = forward_stage(s, chunk, t, h, projection.data, eps, kept, buffers);
      step.shift = shift;
      backend_.forward(layer_.cell.stages[s].kind, step, rows);
      operand = Matrix<const O>::contiguous(step.operand, rows, step.width);
    }
  }

  void forward_at_once(const Chunk& chunk, const Rows<const T>& eps, const Kept<A>& kept,
                       ForwardBuffers& buffers) {
    cuda::PersistentForward<T> all{};
    const Chunk next = chunk_at(chunk.index + 1);
    const bool has_next = next.index < layer_.chunks() && !is_finished(next);
    const auto h = Matrix<const O>::contiguous(buffers.h, layer_.batch, output());
    for (int s = 0; s <= layer_.last(); ++s) {
      all.step[s] = forward_stage(s, chunk, 0, h, nullptr, eps, kept, buffers);
      all.weight[s] = weight(s);
    }
    all.step[layer_.last()].operand = buffers.h_after;  // others may still read the h before
    if (layer_.states != nullptr) {  // which the kernel goes through, from one to the next
      auto& core = all.step[layer_.core()];
      core.carry = {state_before(chunk), hidden()};
      if (has_next) core.carry_out = state_before(next);
      carry_ = core.carry_out;
    }
    all.turn = {launches_++, has_next};
    all.h = {h.data, h.row_stride, false};
    all.steps = int(chunk.steps);
    all.batch = int(layer_.batch);
    all.row_step = layer_.mask.direction * all.batch;
    backend_.forward_chunk(layer_.persistent, all, buffers.exchange);
    std::swap(buffers.h, buffers.h_after);
  }

  // h_{t-1} of a chunk's rows, in up to two pieces because that of the first step is hx.
  // f(piece, index of its first row)
  template <class F>
  void for_h_before(const Chunk& chunk, const F& f) const {
    const int64_t from_hx = chunk.begin == 0 ? layer_.batch : 0, others = chunk.rows() - from_hx;
    const int64_t first = chunk.is_reversed ? chunk.first_row + layer_.batch
                                            : chunk.first_row + from_hx - layer_.batch;
    if (from_hx > 0) {
      f(Matrix<const T>::contiguous(layer_.hx, from_hx, output()), chunk.row(0));
    }
    if (others > 0) {
      f(Matrix<const T>(layer_.output_rows(first, others)), chunk.is_reversed ? 0 : from_hx);
    }
  }

  // What stage s projects, as GEMM operands: h_{t-1}, or the result of the stage before.
  // f(piece, index of its first row)
  template <class F>
  void for_source(int s, const Chunk& chunk, const Rebuilt& rebuilt, const F& f) const {
    const O* dense = s > 0 ? rebuilt.operand[s - 1] : rebuilt.h;
    if (dense != nullptr) {
      const int64_t width = s > 0 ? layer_.width(s - 1) : output();
      f(Matrix<const O>::contiguous(dense, chunk.rows(), width), int64_t(0));
    } else if constexpr (kTensorIsOperand) {
      for_h_before(chunk, f);
    }
  }

  // h_{t-1} of a chunk's rows that have one in the output.  copy: of a packed one.
  Rows<const T> output_before(const Chunk& chunk, T* copy) {
    const int64_t direction = layer_.mask.direction;
    if (copy == nullptr) return output_from<const T>(chunk.first_row - direction * layer_.batch);
    // The step before the first one, or behind the last, is none.
    const int64_t first = std::max<int64_t>(chunk.first - direction, 0);
    const int64_t last = std::min(chunk.first - direction + chunk.steps, layer_.seq_len);
    backend_.copy_steps(Sequence<T>::contiguous(copy, layer_.batch, output()),
                        first - (chunk.first - direction), Sequence<const T>(output_sequence()),
                        first, last - first, layer_.batch);
    return {copy, output(), false};
  }

  // The intermediates of a chunk up to the core, all steps at once: GEMM results unless
  // pre-activations are kept, and of each stage before the core its result and its factors.
  void rebuild(const Chunk& chunk, const Kept<const A>& kept, BackwardBuffers& buffers) {
    const Rows<const T> eps = rows_of(layer_.eps, chunk, buffers.eps);
    Rebuilt& rebuilt = buffers.of(chunk.index);
    if (layer_.mask.any()) {
      const GatherStep<T, O> step{output(),  chunk.first_row, output_before(chunk, rebuilt.output),
                                  layer_.hx, layer_.mask,     rebuilt.h};
      backend_.gather(step, chunk.rows());
    } else if (rebuilt.h != nullptr) {
      for_h_before(chunk, [&](const Matrix<const T>& h, int64_t first) {
        backend_.copy(Matrix<O>::contiguous(rebuilt.h + first * output(), h.rows, output()), h);
      });
    }
    if (layer_.has_state() && !layer_.is_persistent) {
      copy_rows(rebuilt.state + chunk.row(0) * hidden(), state_before(chunk), hidden());
    }
    const Planes<A>& planes = rebuilt.planes;
    rebuilt.input = input_rows(chunk, rebuilt.x);
    const bool is_kept = kept.at(0, chunk.first_row) != nullptr;
    for (int s = 0; s <= layer_.core(); ++s) {
      if (!is_kept) {
        for_source(s, chunk, rebuilt, [&](const Matrix<const O>& source, int64_t first) {
          backend_.gemm(projection(planes, s, chunk).row_range(first, source.rows), source,
                        weight(s).transposed(), false);
        });
      }
      if (s < layer_.core()) {
        auto step = make_step<ForwardStep<T, O>>(s, chunk, 0, kept.at(s, chunk.first_row), nullptr,
                                                 planes.projection[s]);
        step.noise = noise(eps, 0);
        step.operand = rebuilt.operand[s];
        step.factors = rebuilt.factors[s];
        step.factor_blocks = rebuilt.factor_blocks;
        backend_.forward(layer_.cell.stages[s].kind, step, chunk.rows());
      }
    }
    if (is_kept) return;
    for_side(planes, chunk, [&](const Matrix<A>& side, const Matrix<const O>& w, int64_t first) {
      backend_.gemm(side, rebuilt.input, w.transposed(), first < layer_.shared_columns());
    });
  }

  template <class P>
  Matrix<P> projection(const Planes<P>& planes, int s, const Chunk& chunk) const {
    return Matrix<P>::contiguous(planes.projection[s], chunk.rows(), layer_.columns(s));
  }
  // The columns that the input's weight makes: first those that stand in the core's projection.
  // f(columns, their rows of the weight, index of the first)
  template <class P, class F>
  void for_side(const Planes<P>& planes, const Chunk& chunk, const F& f) const {
    const int64_t shared = layer_.shared_columns(), alone = layer_.columns_alone();
    if (shared > 0) {
      f(projection(planes, layer_.core(), chunk).column_range(0, shared),
        weight_[0].row_range(0, shared), 0);
    }
    if (alone > 0) {
      f(Matrix<P>::contiguous(planes.side, chunk.rows(), alone),
        weight_[0].row_range(shared, alone), shared);
    }
  }

  // What backward of a stage reads if not GEMM results: its factors, or the pre-activations that
  // are kept, if they are.
  const A* ready(int s, const Chunk& chunk, int64_t row, const Kept<const A>& kept,
                 const Rebuilt& rebuilt) const {
    if (!traits(layer_.cell.stages[s].kind).has_factors) return kept.at(s, chunk.first_row + row);
    return rebuilt.factors[s] + row * rebuilt.factor_blocks * layer_.width(s);
  }

  // dh_t -> dh_{t-1} through a chunk, which leaves the gradients of all GEMM results.
  void adjoint_chain(const Chunk& chunk, const Gradients<T>& gradients, const Kept<const A>& kept,
                     BackwardBuffers& buffers, Recording& recording) {
    const Rows<const T> grad_output = rows_of(gradients.output, chunk, buffers.grad_output);
    if constexpr (Backend::kPersistent) {
      if (layer_.is_persistent) {
        const auto args = chain_arguments(chunk, grad_output, gradients, kept, buffers);
        return backend_.adjoint_chunk(layer_.persistent, args, buffers.of(chunk.index).exchange);
      }
    }
    enqueue_steps(recording, chunk, [&](const int64_t* shift) {
      if (layer_.has_state()) {
        const int64_t steps = layer_.core() < layer_.last() ? chunk.steps : chunk.steps - 1;
        for (int64_t t = 0; t < steps; ++t) state_step(chunk, t, shift, kept, buffers);
      }
      for (int64_t t = chunk.steps - 1; t >= 0; --t) {
        adjoint_step(chunk, t, grad_output, shift, gradients, kept, buffers);
      }
    });
  }

  // The same for one kernel, which leaves dh and dc where they were.
  cuda::PersistentBackward<T> chain_arguments(const Chunk& chunk, const Rows<const T>& grad_output,
                                              const Gradients<T>& gradients,
                                              const Kept<const A>& kept,
                                              const BackwardBuffers& buffers) const {
    cuda::PersistentBackward<T> args{};
    const Rebuilt& rebuilt = buffers.of(chunk.index);
    const int64_t row = chunk.row(0), from_start = chunk.first_row + row;
    const bool is_first = chunk.begin == 0;
    const Planes<A> at = rebuilt.planes.from_row(layer_, row);
    const Planes<O> d = rebuilt.gradient.from_row(layer_, row);
    for (int s = 0; s <= layer_.last(); ++s) {
      const A* pre = ready(s, chunk, row, kept, rebuilt);
      auto step = make_step<BackwardStep<T, O>>(s, chunk, row, pre, at.side, at.projection[s]);
      step.factor_blocks = rebuilt.factor_blocks;
      step.dside = d.side;
      step.dprojection = d.projection[s];
      if (step.is_last) {
        step.dout = buffers.dh;
        step.grad_output = from_row(grad_output, row);
      }
      if (gradients.eps != nullptr) step.deps = gradients.eps + from_start * step.width;
      args.step[s] = step;
      args.weight[s] = weight(s);
    }
    auto& step = args.step[layer_.core()];
    if (layer_.has_state()) {
      step.dcarry = buffers.dc;
      args.first_state = state_before(chunk);
      args.state = rebuilt.state + row * hidden();
      if (!step.is_last) args.operand = rebuilt.operand[layer_.core()] + row * step.width;
    } else if (rebuilt.h != nullptr) {
      step.carry = {rebuilt.h + row * output(), output(), false};
    } else {
      step.carry = output_from<const O>(from_start - layer_.mask.direction * layer_.batch);
      if (is_first) args.first_carry = {layer_.hx, output(), false};
    }
    args.steps = int(chunk.steps);
    args.batch = int(layer_.batch);
    args.row_step = int(layer_.mask.direction * layer_.batch);
    args.wants_dh = !is_first || gradients.hx != nullptr;
    return args;
  }

  // The state before step t + 1 from that before step t, and what the stage behind projects.
  void state_step(const Chunk& chunk, int64_t t, const int64_t* shift, const Kept<const A>& kept,
                  const BackwardBuffers& buffers) {
    const int s = layer_.core();
    const int64_t row = chunk.row(t);
    const Rebuilt& rebuilt = buffers.of(chunk.index);
    const Planes<A> at = rebuilt.planes.from_row(layer_, row);
    auto step = make_step<ForwardStep<T, O>>(s, chunk, row, kept.at(s, chunk.first_row + row),
                                             at.side, at.projection[s]);
    step.shift = shift;
    step.is_last = false;  // h stands in the output
    step.carry = {rebuilt.state + row * hidden(), hidden()};
    if (t + 1 < chunk.steps) step.carry_out = rebuilt.state + chunk.row(t + 1) * hidden();
    if (s < layer_.last()) step.operand = rebuilt.operand[s] + row * layer_.width(s);
    backend_.forward(layer_.cell.stages[s].kind, step, layer_.batch);
  }

  void adjoint_step(const Chunk& chunk, int64_t t, const Rows<const T>& grad_output,
                    const int64_t* shift, const Gradients<T>& gradients, const Kept<const A>& kept,
                    const BackwardBuffers& buffers) {
    const int64_t batch = layer_.batch, row = chunk.row(t), from_start = chunk.first_row + row;
    const int64_t rows = layer_.rows_of_step(chunk.first + chunk.step(t));
    const bool is_first = chunk.begin + t == 0;
    const Rebuilt& rebuilt = buffers.of(chunk.index);
    const Planes<A> at = rebuilt.planes.from_row(layer_, row);
    const Planes<O> d = rebuilt.gradient.from_row(layer_, row);
    for (int s = layer_.last(); s >= 0; --s) {
      const StageKind kind = layer_.cell.stages[s].kind;
      const A* pre = ready(s, chunk, row, kept, rebuilt);
      auto step = make_step<BackwardStep<T, O>>(s, chunk, row, pre, at.side, at.projection[s]);
      step.factor_blocks = rebuilt.factor_blocks;
      step.shift = shift;
      step.dside = d.side;
      step.dprojection = d.projection[s];
      if (s == layer_.core()) {
        if (layer_.has_state()) {
          step.state = rebuilt.state + row * hidden();
        } else if (rebuilt.h != nullptr) {
          step.carry = {rebuilt.h + row * output(), output(), false};
        } else if (is_first) {
          step.carry = {same<const O>(layer_.hx), output(), true};
        } else {
          step.carry = output_from<const O>(from_start - layer_.mask.direction * batch);
        }
        step.dcarry = layer_.has_state() ? buffers.dc : buffers.dh;
      }
      step.dout = step.is_last ? buffers.dh : buffers.dstage[s];
      if (step.is_last) step.grad_output = from_row(grad_output, row);
      if (gradients.eps != nullptr) step.deps = gradients.eps + from_start * step.width;
      backend_.backward(kind, step, batch);

      const auto dprojection =
          Matrix<const O>::contiguous(d.projection[s], rows, layer_.columns(s));
      if (rows == 0) continue;
      if (s > 0) {
        const int64_t width = layer_.width(s - 1);
        backend_.gemm(Matrix<A>::contiguous(buffers.dstage[s - 1], rows, width), dprojection,
                      weight(s), false);
      } else if (!is_first || gradients.hx != nullptr) {
        backend_.gemm(Matrix<A>::contiguous(buffers.dh, rows, output()), dprojection, weight(0),
                      true);
      }
    }
  }

  // Gradients of input and weights, all steps of a chunk at once.  Those of weights are sums over
  // chunks, which the first one worked on writes and later ones add to, all on one stream.
  void leaf_gradients(const Chunk& chunk, const Gradients<T>& gradients,
                      const BackwardBuffers& buffers) {
    const Rebuilt& rebuilt = buffers.of(chunk.index);
    if (gradients.input != nullptr) input_gradient(chunk, gradients, rebuilt);
    const bool has_earlier = std::exchange(has_weight_gradients_, true);
    ColumnSums<O> sums{};
    sums.accumulate = has_earlier;
    for (int s = 0; s <= layer_.last(); ++s) {
      const int p = layer_.projection(s);
      const Matrix<O> d = projection(rebuilt.gradient, s, chunk);
      bool adds = has_earlier;
      for_source(s, chunk, rebuilt, [&](const Matrix<const O>& source, int64_t first) {
        weight_gradient(gradients.weight[p], d.row_range(first, source.rows), source, adds);
        adds = true;
      });
      if (gradients.bias[p] != nullptr) sums.add(d, gradients.bias[p]);
    }
    for_side(rebuilt.gradient, chunk,
             [&](const Matrix<const O>& d, const Matrix<const O>&, int64_t first) {
               A *weight = gradients.weight[0], *bias = gradients.bias[0];
               if (weight != nullptr) weight += first * rebuilt.input.columns;
               weight_gradient(weight, d, rebuilt.input, has_earlier);
               const bool is_shared = first < layer_.shared_columns();
               if (bias != nullptr && !(is_shared && shares_bias_gradient(gradients))) {
                 sums.add(d, bias + first);
               }
             });
    if (sums.count > 0) backend_.column_sums(sums);
  }

  void input_gradient(const Chunk& chunk, const Gradients<T>& gradients, const Rebuilt& rebuilt) {
    const bool drops = layer_.dropout > 0 && gradients.completes_input;
    const int64_t width = layer_.sizes.input;
    const Sequence<T> packed = layer_.sequence(gradients.input, width, width);
    T* at = gradients.input + chunk.first_row * width;
    if (layer_.is_packed()) at = rebuilt.grad_input;
    if (layer_.is_packed() && gradients.adds_to_input) unpack(at, packed, chunk);
    const auto dx = Matrix<T>::contiguous(at, chunk.rows(), width);
    const auto add_up = [&](const auto& sum) {
      bool adds = gradients.adds_to_input;
      for_side(rebuilt.gradient, chunk,
               [&](const Matrix<const O>& d, const Matrix<const O>& w, int64_t) {
                 backend_.gemm(sum, d, w, adds, /*is_of_input=*/true);
                 adds = true;
               });
    };
    if constexpr (Space::kTensorIsResult) {
      if (rebuilt.dx == nullptr) add_up(dx);
    }
    if (rebuilt.dx != nullptr) {
      const auto wide = Matrix<A>::contiguous(rebuilt.dx, dx.rows, dx.columns);
      if (gradients.adds_to_input) backend_.copy(wide, dx);
      add_up(wide);
      if constexpr (!kTensorIsOperand) {
        if (drops) drop(wide.data, chunk);
      }
      backend_.copy(dx, wide);
    }
    if constexpr (kTensorIsOperand) {
      if (drops) drop(dx.data, chunk);
    }
    if (layer_.is_packed()) pack(packed, dx.data, chunk);
  }

  void weight_gradient(A* gradient, const Matrix<const O>& d, const Matrix<const O>& source,
                       bool adds) {
    if (gradient == nullptr) return;
    backend_.gemm(Matrix<A>::contiguous(gradient, d.columns, source.columns), d.transposed(),
                  source, adds);
  }

  // Zeros in the gradients of weights where no chunk has left anything: in rows that no stage
  // reads, and everywhere if all sequences of the batch are empty.
  void clear_rest(const Gradients<T>& gradients) {
    int64_t written[kMaxProjections] = {};  // rows
    if (has_weight_gradients_) {
      written[0] = layer_.side_columns();
      for (int s = 0; s <= layer_.last(); ++s) written[layer_.projection(s)] = layer_.columns(s);
    }
    for (int p = 0; p < layer_.cell.num_projections; ++p) {
      const int64_t columns = layer_.weight[p].columns, rest = layer_.weight[p].rows - written[p];
      const auto clear = [&](A* gradient, int64_t width) {
        if (gradient == nullptr || rest == 0) return;
        backend_.zero(Matrix<A>::contiguous(gradient + written[p] * width, rest, width));
      };
      clear(gradients.weight[p], columns);
      clear(gradients.bias[p], 1);
    }
  }

  // The biases of both projections of the core have one gradient where these share columns: it is
  // summed up once, and copied in the end.
  bool shares_bias_gradient(const Gradients<T>& gradients) const {
    return gradients.bias[0] != nullptr && shared_bias(gradients) != nullptr;
  }
  A* shared_bias(const Gradients<T>& gradients) const {
    return gradients.bias[layer_.projection(layer_.core())];
  }

  Backend backend_;
  Layer<T> layer_;
  Matrix<const O> weight_[kMaxProjections];
  const A* bias_[kMaxProjections];
  const A* carry_ = nullptr;           // forward: where the state is by now
  int64_t launches_ = 0;               // forward: of persistent kernels
  bool has_weight_gradients_ = false;  // backward: of some chunk
};

}  // namespace fusedrnn
