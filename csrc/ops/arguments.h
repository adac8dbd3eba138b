// The checked arguments of an operator.  Before anything is allocated, it is certain that all
// memory that a kernel will read exists.
//
// Longer than 350 lines, because all checks belong to one call, and later checks rely on the
// results of earlier ones.
#pragma once
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "../driver/layer.h"
#include "../driver/planner.h"
#include "../driver/tuning.h"
#include "tensors.h"

namespace fusedrnn {

// The arguments that forward and backward have in common: one layer, in all directions.  Tensors
// are references to the operator's own arguments.
struct Call {
  int64_t cell;                    // index into kCells
  const Tensor& input;             // (T, B, I), or packed (N, I): the rows of each step in turn
  const Tensor& hx;                // (D, B, P)
  const MaybeTensor& cx;           // (D, B, H)
  const Weights& weights;          // all of the first direction, then of the second
  const MaybeTensor& lengths;      // (B) on the CPU, for a padded batch
  const MaybeTensor& batch_sizes;  // (T) on the CPU, for a packed batch: the rows of each step
  const MaybeTensor& reset;        // (T, B)
  const MaybeTensor& eps;          // (D, T, B, Z)
  const MaybeTensor& seed;         // one element, if eps is to be drawn
  double dropout;                  // probability for the input
  double zoneout, cell_zoneout;    // probabilities for h and for c
  const MaybeTensor& mask_seed;    // one element, if dropout and zoneout are to be drawn
  int64_t noise_stream;            // keeps the draws of layers and directions apart
  int64_t first_step;              // where the sequence starts, if it is a part of a longer one
  bool reverse;                    // a single direction that runs from the end of the sequence
  int64_t chunk_size, workspace_bytes;  // as the caller asks, or 0
  int64_t backend;                      // index into kBackends
  int64_t tuning;                       // see tuning.h
};

class Arguments {
 public:
  explicit Arguments(const Call& call)
      : call_(call), tuning_(Tuning::of(call.tuning)), dtype_(call.input.scalar_type()),
        device_(call.input.device()) {
    FUSEDRNN_CHECK(call.cell >= 0 && call.cell < int64_t(std::size(kCells)), "there is no cell ",
                   call.cell);
    cell_ = kCells[call.cell];
    check_options();
    check_steps();
    check_weights();
    check_states();
    if (call.eps) check("eps", *call.eps, {directions(), seq_len(), batch(), sizes_.latent});
    if (call.seed) check_seed("seed", *call.seed);
    if (call.mask_seed) check_seed("mask_seed", *call.mask_seed);
    FUSEDRNN_CHECK(call.dropout == 0 || call.mask_seed, "dropout needs a mask_seed");
    FUSEDRNN_CHECK(!(call.eps && call.seed), "eps and seed exclude each other");
    if (!call.eps && !call.seed) cell_ = without_noise(cell_);
    if (call.reset) {
      check_shape("reset", *call.reset, {seq_len(), batch()});
      check_dtype("reset", *call.reset, ScalarType::Bool);
      check_device("reset", *call.reset);
      check_contiguous("reset", *call.reset);
    }
  }

  // The tensor itself, or a copy of it that is contiguous.
  static Tensor dense(const Tensor& tensor) {
    return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
  }

  // Makes available to kernels what may lie elsewhere: states that are not contiguous, and the
  // lengths of rows, on the device of the input.
  template <class Platform>
  void place(Platform& platform) {
    hx_ = dense(call_.hx);
    if (call_.cx) cx_ = dense(*call_.cx);
    if (has_lengths()) lengths_ = on_device(platform, lengths(), batch());
  }
  // Numbers on the device of the input.  They live as long as this object, and as `numbers`.
  template <class Platform>
  const int64_t* on_device(Platform& platform, const int64_t* numbers, int64_t count) {
    if (input().is_cpu()) return numbers;
    const Tensor& like = is_packed() ? *call_.batch_sizes : *call_.lengths;
    Tensor host = allocate(like, {count}, ScalarType::Long, "lengths");
    std::copy_n(numbers, count, static_cast<int64_t*>(host.mutable_data_ptr()));
    platform.keep(host);
    device_lengths_ = allocate(input(), {count}, ScalarType::Long, "lengths");
    torch::stable::copy_(*device_lengths_, host, /*non_blocking=*/true);
    return data<int64_t>(*device_lengths_);
  }
  // The steps of each row of the batch, on the host; only if has_lengths().
  const int64_t* lengths() const {
    return is_packed() ? unpacked_lengths_.data() : data<int64_t>(*call_.lengths);
  }

  // Checks a sequence other than the input: (T, B, width), or packed (N, width).
  void check_sequence(const char* name, const Tensor& tensor, int64_t width) const {
    if (is_packed()) {
      check(name, tensor, {input().size(0), width});
    } else {
      check(name, tensor, {seq_len(), batch(), width});
    }
  }
  void check(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape) const {
    check_shape(name, tensor, shape);
    check_dtype(name, tensor, dtype_);
    check_device(name, tensor);
  }

  // The planning problem, the same for both directions.
  template <class Platform>
  Problem problem(Platform& platform) const {
    Problem p;
    p.cell = cell_;
    p.sizes = sizes_;
    p.bias = has_bias_;
    p.seq_len = seq_len();
    p.batch = batch();
    p.chunk_size = call_.chunk_size;
    p.workspace_bytes = call_.workspace_bytes;
    p.backend = backend();
    p.exchange = tuning_.by_flags ? cuda::Exchange::Flags : cuda::Exchange::Packets;
    p.overlap = tuning_.overlap;
    p.free_multiprocessors = tuning_.free_multiprocessors;
    p.gpu = platform.gpu();
    p.tf32 = tuning_.tf32;
    for (size_t i = 0; i < call_.weights.size(); ++i) {
      const Tensor& w = call_.weights[i];
      if (w.dim() == 2) p.see_weight(layout_[i % layout_.size()], w.stride(0), w.stride(1));
    }
    return p;
  }

  // One direction, in chunks of `steps` steps.  plan: the plan of the pass.  States and lengths are
  // null before place().
  template <class T>
  Layer<T> layer(int64_t steps, const PassPlan& plan, int64_t direction) const {
    Layer<T> l{};
    l.cell = cell_;
    l.sizes = sizes_;
    l.seq_len = seq_len();
    l.batch = batch();
    l.chunk = steps;
    l.is_persistent = plan.is_persistent;
    l.persistent = plan.persistent;
    l.overlaps = plan.overlaps && l.chunks() > 1;
    l.input = sequence<T>(input(), sizes_.input);
    if (call_.eps) {
      const Tensor& e = *call_.eps;
      l.eps = {data<T>(e) + direction * e.stride(0), e.size(3), e.stride(1), e.stride(2),
               e.stride(3)};
    }
    if (hx_) l.hx = data<T>(*hx_) + direction * h_numel();
    if (cx_) l.cx = data<T>(*cx_) + direction * cell_state_numel();
    l.seed = call_.seed ? data<int64_t>(*call_.seed) : nullptr;
    l.noise_stream = call_.noise_stream + direction;
    l.first_step = call_.first_step;
    const Tensor* weights = call_.weights.data() + direction * int64_t(layout_.size());
    for (size_t i = 0; i < layout_.size(); ++i) {
      const Tensor& w = weights[i];
      const int p = layout_[i].projection;
      if (layout_[i].columns == 0) {
        l.bias[p] = {data<T>(w), 1, w.size(0), w.size(0), w.stride(0)};
      } else {
        l.weight[p] =
            Matrix<const T>::strided(data<T>(w), w.size(0), w.size(1), w.stride(0), w.stride(1));
      }
    }
    l.mask = {lengths_, call_.reset ? data<bool>(*call_.reset) : nullptr, seq_len(), batch(),
              direction == 1 || call_.reverse ? -1 : 1};
    if (has_lengths()) l.rows_at = rows_at_.data();
    l.dropout = call_.dropout;
    l.dropout_stream = call_.noise_stream - (call_.reverse ? 1 : 0);
    l.zoneout = Zoneout<Acc<T>>::of(call_.mask_seed ? data<int64_t>(*call_.mask_seed) : nullptr,
                                    l.noise_stream, l.first_step, call_.zoneout,
                                    has_cell_state() ? call_.cell_zoneout : 0);
    return l;
  }

  template <class T>
  static const T* data(const Tensor& tensor) {
    return static_cast<const T*>(tensor.const_data_ptr());
  }
  // Columns [first, first + width) of a tensor whose rows lie like the input's.
  template <class T>
  Sequence<const T> sequence(const Tensor& t, int64_t width, int64_t first = 0) const {
    const int64_t last = t.dim() - 1;
    const T* begin = data<T>(t) + first * t.stride(last);
    if (is_packed()) return {begin, width, 0, t.stride(0), t.stride(1), starts_.data()};
    return {begin, width, t.stride(0), t.stride(1), t.stride(2)};
  }
  // The shape of a tensor whose rows lie like the input's.
  std::vector<int64_t> shape(int64_t width) const {
    if (is_packed()) return {input().size(0), width};
    return {seq_len(), batch(), width};
  }

  const Tensor& input() const { return call_.input; }
  const Tuning& tuning() const { return tuning_; }
  std::string backend() const { return kBackends[call_.backend]; }
  int64_t directions() const { return call_.hx.size(0); }
  int64_t seq_len() const { return is_packed() ? call_.batch_sizes->numel() : input().size(0); }
  int64_t batch() const { return is_packed() ? call_.hx.size(1) : input().size(1); }
  const Sizes& sizes() const { return sizes_; }
  // Sizes of one direction.
  int64_t h_numel() const { return batch() * sizes_.output; }
  int64_t cell_state_numel() const { return batch() * sizes_.hidden; }
  bool has_cell_state() const { return fusedrnn::has_cell_state(cell_); }
  bool is_packed() const { return call_.batch_sizes.has_value(); }
  bool has_lengths() const { return is_packed() || call_.lengths.has_value(); }
  // Whether the sequence has padding: rows that belong to no step of their sequence.
  bool has_padding() const { return call_.lengths.has_value(); }
  bool is_reversed() const { return call_.reverse; }  // a single direction
  // The first row of each step, followed by the number of all rows; only if is_packed().
  const std::vector<int64_t>& starts() const { return starts_; }
  // The number of rows before step t in a tensor whose rows lie like the input's, if it is dense.
  int64_t first_row(int64_t t) const { return is_packed() ? starts_[size_t(t)] : t * batch(); }
  bool has_eps() const { return call_.eps.has_value(); }
  int64_t saved_numel() const {  // of one direction
    return seq_len() * batch() * saved_columns(cell_, sizes_);
  }
  // The shape of the cell states before each chunk of `steps` steps.
  std::vector<int64_t> chunk_cell_states_shape(int64_t steps) const {
    if (!has_cell_state()) return {0};
    return {directions(), (seq_len() + steps - 1) / steps, batch(), sizes_.hidden};
  }
  // The weights of one direction.  Its gradients lie back to back, and the directions do too.
  const std::vector<Parameter>& layout() const { return layout_; }
  int64_t weights_numel() const { return layout_.back().offset + layout_.back().numel(); }

 private:
  void check_shape(const char* name, const Tensor& tensor,
                   std::initializer_list<int64_t> shape) const {
    const torch::headeronly::IntHeaderOnlyArrayRef expected(shape.begin(), shape.size());
    const auto sizes = tensor.sizes();
    FUSEDRNN_CHECK(
        sizes.size() == expected.size() && std::equal(sizes.begin(), sizes.end(), expected.begin()),
        name, " must have shape ", shape_text(expected), ", got ", shape_text(sizes));
  }
  void check_dtype(const char* name, const Tensor& tensor, ScalarType dtype) const {
    const ScalarType own = tensor.scalar_type();
    FUSEDRNN_CHECK(own == dtype, name, " must be ", torch::headeronly::toString(dtype), ", got ",
                   torch::headeronly::toString(own));
  }
  void check_device(const char* name, const Tensor& tensor) const {
    FUSEDRNN_CHECK(tensor.device() == device_, name, " must be on the device of input");
  }
  void check_contiguous(const char* name, const Tensor& tensor) const {
    FUSEDRNN_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  }
  void check_seed(const char* name, const Tensor& seed) const {
    check_dtype(name, seed, ScalarType::Long);
    FUSEDRNN_CHECK(seed.numel() == 1, name, " must have one element, got ",
                   shape_text(seed.sizes()));
    check_device(name, seed);
  }

  // Checks the arguments that are not tensors.
  void check_options() const {
    const Call& c = call_;
    FUSEDRNN_CHECK(c.noise_stream >= 0 && c.noise_stream < kMostLayers,
                   "noise_stream must be in [0, 2^29 - 1), got ", c.noise_stream);
    FUSEDRNN_CHECK(c.chunk_size >= 0, "chunk_size must be 0 (automatic) or more, got ",
                   c.chunk_size);
    FUSEDRNN_CHECK(c.workspace_bytes >= 0, "workspace_bytes must be 0 (automatic) or more, got ",
                   c.workspace_bytes);
    FUSEDRNN_CHECK(c.chunk_size == 0 || c.workspace_bytes == 0,
                   "chunk_size and workspace_bytes exclude each other");
    FUSEDRNN_CHECK(c.backend >= 0 && c.backend < int64_t(std::size(kBackends)),
                   "there is no backend ", c.backend);
    for (const double p : {c.dropout, c.zoneout, c.cell_zoneout}) {
      FUSEDRNN_CHECK(p >= 0 && p <= 1, "dropout and zoneout must be probabilities in [0, 1], got ",
                     p);
    }
  }

  // Checks the ranks of input and hx, which determine all other shapes, and reads which rows take
  // each step.
  void check_steps() {
    const Tensor& hx = call_.hx;
    FUSEDRNN_CHECK(hx.dim() == 3 && (hx.size(0) == 1 || hx.size(0) == 2),
                   "hx must have shape (directions, batch, hidden_size), got ",
                   shape_text(hx.sizes()));
    FUSEDRNN_CHECK(!call_.reverse || (directions() == 1 && call_.noise_stream > 0),
                   "reverse is for the second of two directions, alone");
    FUSEDRNN_CHECK(!(call_.lengths && call_.batch_sizes),
                   "lengths and batch_sizes exclude each other");
    FUSEDRNN_CHECK(input().dim() == (is_packed() ? 2 : 3), "input must have ", is_packed() ? 2 : 3,
                   " dimensions, got ", shape_text(input().sizes()));
    if (is_packed()) check_counts("batch_sizes", *call_.batch_sizes);
    FUSEDRNN_CHECK(seq_len() > 0, "expected a sequence of at least one step, got ",
                   shape_text(input().sizes()));
    check_rows(seq_len(), batch());
    FUSEDRNN_CHECK(call_.first_step >= 0 && call_.first_step <= kMostRows - seq_len(),
                   "first_step must be 0 or more, and below 2^32 with all steps, got ",
                   call_.first_step);
    if (is_packed()) read_batch_sizes(data<int64_t>(*call_.batch_sizes));
    if (!call_.lengths) return;
    check_counts("lengths", *call_.lengths);
    check_shape("lengths", *call_.lengths, {batch()});
    read_lengths(data<int64_t>(*call_.lengths));
  }
  void check_counts(const char* name, const Tensor& tensor) const {
    FUSEDRNN_CHECK(tensor.is_cpu(), name, " must be on the CPU");
    check_dtype(name, tensor, ScalarType::Long);
    FUSEDRNN_CHECK(tensor.dim() == 1, name, " must have 1 dimension, got ",
                   shape_text(tensor.sizes()));
    check_contiguous(name, tensor);
  }
  void read_lengths(const int64_t* lengths) {
    rows_at_.assign(size_t(seq_len()), 0);
    for (int64_t b = 0; b < batch(); ++b) {
      FUSEDRNN_CHECK(lengths[b] >= 1 && lengths[b] <= seq_len(), "lengths must be in [1, ",
                     seq_len(), "], got ", lengths[b]);
      rows_at_[size_t(lengths[b] - 1)] = b + 1;
    }
    for (int64_t t = seq_len() - 2; t >= 0; --t) {
      rows_at_[size_t(t)] = std::max(rows_at_[size_t(t)], rows_at_[size_t(t + 1)]);
    }
  }
  void read_batch_sizes(const int64_t* sizes) {
    int64_t most = batch(), rows = 0;
    starts_.push_back(0);
    for (int64_t t = 0; t < seq_len(); ++t) {
      FUSEDRNN_CHECK(sizes[t] > 0 && sizes[t] <= most,
                     "batch_sizes must be positive, at most the batch of hx, and never rise, got ",
                     sizes[t], " at step ", t, " after ", most);
      most = sizes[t];
      starts_.push_back(rows += sizes[t]);
    }
    unpacked_lengths_.assign(size_t(batch()), 0);
    for (int64_t t = seq_len() - 1, b = 0; t >= 0; --t) {
      while (b < sizes[t]) unpacked_lengths_[size_t(b++)] = t + 1;
    }
    rows_at_.assign(sizes, sizes + seq_len());
    FUSEDRNN_CHECK(rows == input().size(0), "batch_sizes must add up to the rows of input, got ",
                   rows, " for ", shape_text(input().sizes()));
  }

  // Checks the weights, and takes the sizes from them.
  void check_weights() {
    const Weights& weights = call_.weights;
    const size_t of_direction = weights.size() / size_t(directions());
    const size_t with_bias = num_parameters(cell_, true);
    const size_t without = num_parameters(cell_, false);
    FUSEDRNN_CHECK(weights.size() % size_t(directions()) == 0 &&
                       (of_direction == with_bias || of_direction == without),
                   cell_.name, " takes ", without, " weights, or ", with_bias,
                   " with biases, for each direction, got ", weights.size());
    has_bias_ = of_direction == with_bias;
    FUSEDRNN_CHECK(call_.cx.has_value() == has_cell_state(), cell_.name,
                   has_cell_state() ? " needs cx" : " takes no cx");
    FUSEDRNN_CHECK(!call_.cx || call_.cx->dim() == 3, "cx must have 3 dimensions");
    const int64_t output = call_.hx.size(2);
    sizes_ = {input().size(input().dim() - 1), output, 0, output};
    if (is_projected(cell_)) sizes_.hidden = call_.cx->size(2);
    for (int p = 0; p < cell_.num_projections; ++p) {
      if (cell_.projections[p].from != Width::Latent) continue;
      FUSEDRNN_CHECK(weights[p].dim() == 2, "weights[", p, "] must have 2 dimensions, got ",
                     shape_text(weights[p].sizes()));
      sizes_.latent = weights[p].size(1);
    }
    check_sizes(cell_, sizes_, seq_len(), batch());
    layout_ = layer_layout(cell_, sizes_, has_bias_);
    for (size_t i = 0; i < weights.size(); ++i) {
      const Parameter& p = layout_[i % layout_.size()];
      if (p.columns == 0) {
        check(p.name.c_str(), weights[i], {p.rows});
      } else {
        check(p.name.c_str(), weights[i], {p.rows, p.columns});
      }
    }
  }

  void check_states() const {
    check("hx", call_.hx, {directions(), batch(), sizes_.output});
    if (call_.cx) check("cx", *call_.cx, {directions(), batch(), sizes_.hidden});
  }

  const Call call_;
  const Tuning tuning_;
  const ScalarType dtype_;  // of the input; so is device_
  const torch::stable::Device device_;
  Cell cell_;
  Sizes sizes_;
  bool has_bias_;
  MaybeTensor hx_, cx_, device_lengths_;
  const int64_t* lengths_ = nullptr;
  std::vector<Parameter> layout_;
  std::vector<int64_t> rows_at_;  // for each step, one more than the last row that takes it
  // If packed: the first row of each step, followed by the number of all rows; and the number of
  // steps of each row of the batch.
  std::vector<int64_t> starts_, unpacked_lengths_;
};

}  // namespace fusedrnn
