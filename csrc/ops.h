// What the operators do on every device: the one set of checks, allocation, dispatch on dtype.
//
// Platform is what a device adds, made anew for each call:
//   Platform(input, replay)
//   gpu()                        its facts for plans, or null
//   allows_tf32()                whether products of float32 may be rounded to TF32
//   backend<T>()                 the driver's backend
//   computing(multiply_adds)     an object that lives while the driver works
#pragma once
#include <array>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "driver.h"
#include "planner.h"
#include "torch_stable.h"

namespace fusedrnn {

using Weights = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;

inline std::string shape_text(torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < sizes.size(); ++i) text << (i == 0 ? "" : ", ") << sizes[i];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

// What the operators are called with, apart from gradients and results: one layer, all directions.
struct Call {
  std::string cell;
  Tensor input;  // (T, B, I)
  Tensor hx;     // (D, B, H)
  MaybeTensor cx;
  Weights weights;
  MaybeTensor lengths, host_lengths, reset;  // (B), the same on the CPU; (T, B)
  MaybeTensor eps, seed;                     // (D, T, B, Z); one element
  double dropout;                            // of the input
  double zoneout, state_zoneout;             // of h and of c
  MaybeTensor mask_seed;                     // of dropout and zoneout, like seed
  int64_t layer;
  int64_t first_step;  // where the sequence is a part of a longer one
  bool reverse;        // with one direction: that time runs backwards
  int64_t chunk_size, workspace_bytes;
  std::string backend;  // for these see planner.h
  bool by_flags, overlap;
};

// A call whose arguments are checked.  Everything that a kernel will read is known to be there
// before anything is allocated.
class Arguments {
 public:
  explicit Arguments(const Call& call)
      : call_(call), hx_(torch::stable::contiguous(call.hx)), input_(call.input) {
    const Cell* cell = find_cell(call.cell.c_str());
    STD_TORCH_CHECK(cell != nullptr, "fusedrnn: there is no cell ", call.cell);
    cell_ = *cell;
    STD_TORCH_CHECK(input_.dim() == 3, "fusedrnn: input must have 3 dimensions, got ",
                    shape_text(input_.sizes()));
    STD_TORCH_CHECK(hx_.dim() == 3 && (hx_.size(0) == 1 || hx_.size(0) == 2),
                    "fusedrnn: hx must have shape (directions, batch, hidden_size), got ",
                    shape_text(hx_.sizes()));
    const size_t of_direction = call.weights.size() / directions();
    const size_t with_bias = layer_layout(cell_, {}, true).size();
    const size_t without = layer_layout(cell_, {}, false).size();
    STD_TORCH_CHECK(call.weights.size() % directions() == 0 &&
                        (of_direction == with_bias || of_direction == without),
                    "fusedrnn: ", call.cell, " takes ", without, " weights, or ", with_bias,
                    " with biases, for each direction, got ", call.weights.size());
    has_bias_ = of_direction == with_bias;
    STD_TORCH_CHECK(call.cx.has_value() == has_state(), "fusedrnn: ", call.cell,
                    has_state() ? " needs cx" : " takes no cx");
    STD_TORCH_CHECK(!call.cx || call.cx->dim() == 3, "fusedrnn: cx must have 3 dimensions");
    STD_TORCH_CHECK(call.first_step >= 0, "fusedrnn: first_step must be 0 or more, got ",
                    call.first_step);
    STD_TORCH_CHECK(!call.reverse || (directions() == 1 && call.layer > 0),
                    "fusedrnn: reverse is for the second of two directions, alone");
    STD_TORCH_CHECK(call.chunk_size >= 0,
                    "fusedrnn: chunk_size must be 0 (automatic) or more, got ", call.chunk_size);
    STD_TORCH_CHECK(call.workspace_bytes >= 0,
                    "fusedrnn: workspace_bytes must be 0 (automatic) or more, got ",
                    call.workspace_bytes);
    STD_TORCH_CHECK(call.chunk_size == 0 || call.workspace_bytes == 0,
                    "fusedrnn: chunk_size and workspace_bytes exclude each other");
    STD_TORCH_CHECK(
        call.backend == "auto" || call.backend == "stepwise" || call.backend == "persistent",
        "fusedrnn: backend must be auto, stepwise or persistent, got ", call.backend);
    STD_TORCH_CHECK(call.layer >= 0 && call.layer < (1 << 29) - 1,
                    "fusedrnn: layer must be in [0, 2^29 - 1), got ", call.layer);
    sizes_ = {input_.size(2), hx_.size(2), 0, hx_.size(2)};
    if (is_projected(cell_)) sizes_.hidden = call.cx->size(2);
    for (int p = 0; p < cell_.num_projections; ++p) {
      if (cell_.projections[p].from != Width::Latent) continue;
      STD_TORCH_CHECK(call.weights[p].dim() == 2, "fusedrnn: weights[", p,
                      "] must have 2 dimensions, got ", shape_text(call.weights[p].sizes()));
      sizes_.latent = call.weights[p].size(1);
    }
    check("hx", hx_, {directions(), batch(), sizes_.output});
    if (call.cx) {
      check("cx", *call.cx, {directions(), batch(), sizes_.hidden});
      cx_ = torch::stable::contiguous(*call.cx);
    }
    layout_ = layer_layout(cell_, sizes_, has_bias_);
    for (size_t i = 0; i < call.weights.size(); ++i) {
      const Parameter& p = layout_[i % layout_.size()];
      if (p.columns == 0) {
        check(p.name.c_str(), call.weights[i], {p.rows});
      } else {
        check(p.name.c_str(), call.weights[i], {p.rows, p.columns});
      }
    }
    if (call.eps) check("eps", *call.eps, {directions(), seq_len(), batch(), sizes_.latent});
    if (call.seed) check_seed("seed", *call.seed);
    if (call.mask_seed) check_seed("mask_seed", *call.mask_seed);
    for (const double p : {call.dropout, call.zoneout, call.state_zoneout}) {
      STD_TORCH_CHECK(p >= 0 && p <= 1,
                      "fusedrnn: dropout and zoneout must be probabilities in [0, 1], got ", p);
    }
    STD_TORCH_CHECK(call.dropout == 0 || call.mask_seed, "fusedrnn: dropout needs a mask_seed");
    STD_TORCH_CHECK(!(call.eps && call.seed), "fusedrnn: eps and seed exclude each other");
    STD_TORCH_CHECK(seq_len() > 0, "fusedrnn: expected a sequence of at least one step, got ",
                    shape_text(input_.sizes()));
    STD_TORCH_CHECK(seq_len() * batch() <= UINT32_MAX,
                    "fusedrnn: seq_len * batch must be below 2^32, got ",
                    shape_text(input_.sizes()));
    if (!call.eps && !call.seed) cell_ = without_noise(cell_);
    check_mask();
  }

  void check(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape) const {
    check_shape(name, tensor, shape);
    check_dtype(name, tensor, input_.scalar_type());
    check_device(name, tensor);
  }

  // Of either direction.
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
    p.backend = call_.backend;
    p.exchange = call_.by_flags ? cuda::Exchange::Flags : cuda::Exchange::Packets;
    p.overlap = call_.overlap;
    p.gpu = platform.gpu();
    p.tf32 = platform.allows_tf32();
    for (size_t i = 0; i < call_.weights.size(); ++i) {
      const Tensor& w = call_.weights[i];
      if (w.dim() == 2) p.see_weight(layout_[i % layout_.size()], w.stride(0), w.stride(1));
    }
    return p;
  }

  // One direction, in chunks of so many steps; plan: of this pass.
  template <class T>
  Layer<T> layer(int64_t steps, const Plan& plan, int64_t direction) const {
    Layer<T> l{};
    l.cell = cell_;
    l.sizes = sizes_;
    l.seq_len = seq_len();
    l.batch = batch();
    l.chunk = steps;
    l.is_persistent = plan.is_persistent;
    l.persistent = plan.persistent;
    l.overlaps = plan.overlaps && l.chunks() > 1;
    l.input = sequence<T>(input_);
    if (call_.eps) {
      const Tensor& e = *call_.eps;
      l.eps = {data<T>(e) + direction * e.stride(0), e.size(3), e.stride(1), e.stride(2),
               e.stride(3)};
    }
    l.hx = data<T>(hx_) + direction * h_numel();
    if (call_.cx) l.cx = data<T>(*cx_) + direction * state_numel();
    l.seed = call_.seed ? data<int64_t>(*call_.seed) : nullptr;
    l.layer = call_.layer + direction;
    l.first_step = call_.first_step;
    const Tensor* weights = call_.weights.data() + direction * int64_t(layout_.size());
    for (size_t i = 0; i < layout_.size(); ++i) {
      const Tensor& w = weights[i];
      const int p = layout_[i].projection;
      if (layout_[i].columns == 0) {
        l.bias[p] = {data<T>(w), 1, w.size(0), w.size(0), w.stride(0)};
      } else {
        l.weight[p] = {data<T>(w), w.size(0), w.size(1), w.stride(0), w.stride(1)};
      }
    }
    l.mask = {call_.lengths ? data<int64_t>(*call_.lengths) : nullptr,
              call_.reset ? data<bool>(*call_.reset) : nullptr, seq_len(), batch(),
              direction == 1 || call_.reverse ? -1 : 1};
    if (!rows_at_.empty()) l.rows_at = rows_at_.data();
    l.dropout = call_.dropout;
    l.dropout_layer = call_.layer - (call_.reverse ? 1 : 0);
    l.zoneout = {call_.mask_seed ? data<int64_t>(*call_.mask_seed) : nullptr,
                 l.layer,
                 batch(),
                 l.first_step,
                 call_.zoneout,
                 has_state() ? call_.state_zoneout : 0};
    return l;
  }

  template <class T>
  static const T* data(const Tensor& tensor) {
    return static_cast<const T*>(tensor.const_data_ptr());
  }
  template <class T>
  static Sequence<const T> sequence(const Tensor& t) {
    return {data<T>(t), t.size(2), t.stride(0), t.stride(1), t.stride(2)};
  }

  const Tensor& input() const { return input_; }
  int64_t directions() const { return hx_.size(0); }
  int64_t seq_len() const { return input_.size(0); }
  int64_t batch() const { return input_.size(1); }
  const Sizes& sizes() const { return sizes_; }
  // Of a direction.
  int64_t h_numel() const { return batch() * sizes_.output; }
  int64_t state_numel() const { return batch() * sizes_.hidden; }
  bool has_state() const { return fusedrnn::has_state(cell_); }
  bool has_lengths() const { return call_.lengths.has_value(); }
  bool has_eps() const { return call_.eps.has_value(); }
  int64_t kept_numel() const {  // of a direction
    return seq_len() * batch() * kept_columns(cell_, sizes_);
  }
  int64_t states_numel(int64_t steps) const {  // of a direction, in chunks of so many steps
    return has_state() ? (seq_len() + steps - 1) / steps * state_numel() : 0;
  }
  // Of one direction; its numbers lie back to back, and so do those of the directions.
  const std::vector<Parameter>& layout() const { return layout_; }
  int64_t weights_numel() const { return layout_.back().offset + layout_.back().numel(); }

 private:
  void check_shape(const char* name, const Tensor& tensor,
                   std::initializer_list<int64_t> shape) const {
    const torch::headeronly::IntHeaderOnlyArrayRef expected(shape.begin(), shape.size());
    const auto sizes = tensor.sizes();
    STD_TORCH_CHECK(
        sizes.size() == expected.size() && std::equal(sizes.begin(), sizes.end(), expected.begin()),
        "fusedrnn: ", name, " must have shape ", shape_text(expected), ", got ", shape_text(sizes));
  }
  void check_dtype(const char* name, const Tensor& tensor, ScalarType dtype) const {
    STD_TORCH_CHECK(tensor.scalar_type() == dtype, "fusedrnn: ", name, " must be ",
                    torch::headeronly::toString(dtype), ", got ",
                    torch::headeronly::toString(tensor.scalar_type()));
  }
  void check_device(const char* name, const Tensor& tensor) const {
    STD_TORCH_CHECK(tensor.device() == input_.device(), "fusedrnn: ", name,
                    " must be on the device of input");
  }

  void check_seed(const char* name, const Tensor& seed) const {
    check_dtype(name, seed, ScalarType::Long);
    STD_TORCH_CHECK(seed.numel() == 1, "fusedrnn: ", name, " must have one element, got ",
                    shape_text(seed.sizes()));
    check_device(name, seed);
  }

  void check_mask() {
    STD_TORCH_CHECK(call_.lengths.has_value() == call_.host_lengths.has_value(),
                    "fusedrnn: lengths are needed on the input's device and on the CPU");
    if (call_.lengths) {
      for (const Tensor* lengths : {&*call_.lengths, &*call_.host_lengths}) {
        check_shape("lengths", *lengths, {batch()});
        check_dtype("lengths", *lengths, ScalarType::Long);
        STD_TORCH_CHECK(lengths->is_contiguous(), "fusedrnn: lengths must be contiguous");
      }
      check_device("lengths", *call_.lengths);
      STD_TORCH_CHECK(call_.host_lengths->is_cpu(), "fusedrnn: host_lengths must be on the CPU");
      count_rows(data<int64_t>(*call_.host_lengths));
    }
    if (call_.reset) {
      check_shape("reset", *call_.reset, {seq_len(), batch()});
      check_dtype("reset", *call_.reset, ScalarType::Bool);
      check_device("reset", *call_.reset);
      STD_TORCH_CHECK(call_.reset->is_contiguous(), "fusedrnn: reset must be contiguous");
    }
  }

  // rows_at_[t]: one more than the last row that takes step t.
  void count_rows(const int64_t* lengths) {
    rows_at_.assign(size_t(seq_len()), 0);
    for (int64_t b = 0; b < batch(); ++b) {
      STD_TORCH_CHECK(lengths[b] >= 0 && lengths[b] <= seq_len(),
                      "fusedrnn: lengths must be in [0, ", seq_len(), "], got ", lengths[b]);
      if (lengths[b] > 0) rows_at_[size_t(lengths[b] - 1)] = b + 1;
    }
    for (int64_t t = seq_len() - 2; t >= 0; --t) {
      rows_at_[size_t(t)] = std::max(rows_at_[size_t(t)], rows_at_[size_t(t + 1)]);
    }
  }

  Call call_;
  Tensor hx_, input_;
  MaybeTensor cx_;
  Cell cell_;
  Sizes sizes_;
  bool has_bias_;
  std::vector<Parameter> layout_;
  std::vector<int64_t> rows_at_;
};

// A tensor of zeros or of anything.  torch's own error does not get through its stable ABI, and in
// torch 2.11 and 2.12 not even its text.
inline Tensor allocate(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype,
                       const char* what, bool zeros = false) {
  try {
    return zeros ? torch::stable::new_zeros(like, shape, dtype)
                 : torch::stable::new_empty(like, shape, dtype);
  } catch (const std::exception& error) {
    STD_TORCH_CHECK(false, "fusedrnn: out of memory: there is no room for ", what, ", ",
                    torch::headeronly::toString(dtype), " of shape ", shape_text(shape), ": ",
                    error.what());
  }
}

template <class T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

template <class F>
auto dispatch_dtype(const Tensor& input, const F& f) {
  switch (input.scalar_type()) {
    case ScalarType::Float: return f(float{});
    case ScalarType::Double: return f(double{});
    case ScalarType::BFloat16: return f(BFloat16{});
    case ScalarType::Half: return f(Half{});
    default:
      STD_TORCH_CHECK(false, "fusedrnn: input must be float32, float64, bfloat16 or float16, got ",
                      torch::headeronly::toString(input.scalar_type()));
  }
}

template <class Platform, class T>
using BackendOf = decltype(std::declval<Platform&>().template backend<T>());

// -> output (T, B, D P), h_n (D, B, P), c_n (D, B, H) or empty, kept: the pre-activations for
// backward, empty unless `keep`, states: those before each chunk, or empty.  P features of h, which
// are the H of the cell unless it projects them.
template <class Platform>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    std::string cell, Tensor input, Tensor hx, MaybeTensor cx, Weights weights, MaybeTensor lengths,
    MaybeTensor host_lengths, MaybeTensor reset, MaybeTensor eps, MaybeTensor seed, double dropout,
    double zoneout, double state_zoneout, MaybeTensor mask_seed, int64_t layer, int64_t first_step,
    bool reverse, int64_t chunk_size, int64_t workspace_bytes, std::string backend, bool keep,
    bool replay, bool by_flags, bool overlap) {
  const Arguments args(
      {cell,   input,      hx,      cx,         weights,         lengths,       host_lengths,
       reset,  eps,        seed,    dropout,    zoneout,         state_zoneout, mask_seed,
       layer,  first_step, reverse, chunk_size, workspace_bytes, backend,       by_flags,
       overlap});
  Platform platform(input, replay);
  return dispatch_dtype(input, [&](auto element) {
    using T = decltype(element);
    using A = Acc<T>;
    const ScalarType dtype = input.scalar_type();
    const int64_t directions = args.directions(), batch = args.batch();
    const int64_t width = args.sizes().output, hidden = args.sizes().hidden;
    const Problem asked = args.problem(platform);
    const LayerPlan plan = plan_layer<BackendOf<Platform, T>>(asked);
    STD_TORCH_CHECK(backend != "persistent" || plan.forward.is_persistent,
                    "fusedrnn: backend='persistent' is not possible here: ", reason(asked, plan));
    const int64_t kept_numel = keep ? args.kept_numel() : 0;
    const int64_t states_numel = args.states_numel(plan.steps);
    // Of finished rows nothing is written.
    Tensor output = allocate(input, {args.seq_len(), batch, directions * width}, dtype,
                             "the output", args.has_lengths());
    Tensor h_n = allocate(input, {directions, batch, width}, dtype, "h_n");
    Tensor c_n = allocate(input, {args.has_state() ? directions : 0, batch, hidden}, dtype, "c_n");
    Tensor kept = allocate(input, {directions * kept_numel}, kScalarType<A>,
                           "what recompute=False keeps", args.has_lengths());
    Tensor states = allocate(input, {directions * states_numel}, kScalarType<A>,
                             "the states before each chunk");
    for (int64_t d = 0; d < directions && batch > 0; ++d) {
      Layer<T> problem = args.layer<T>(plan.steps, plan.forward, d);
      problem.output = pointer<T>(output) + d * width;
      problem.output_stride = directions * width;
      if (args.has_state()) problem.states = pointer<A>(states) + d * states_numel;
      Driver driver(platform.template backend<T>(), problem);
      const Tensor workspace =
          allocate(input, {driver.forward_workspace_bytes()}, ScalarType::Byte, "the workspace");
      [[maybe_unused]] const auto computing =
          platform.computing(args.seq_len() * driver.step_work());
      driver.forward(pointer<T>(h_n) + d * args.h_numel(),
                     args.has_state() ? pointer<T>(c_n) + d * args.state_numel() : nullptr,
                     keep ? pointer<A>(kept) + d * kept_numel : nullptr,
                     workspace.mutable_data_ptr());
    }
    return std::make_tuple(output, h_n, c_n, kept, states);
  });
}

// Bits of `needs`, in the order of the results; then one for each of `weights`.
enum Needs : int64_t { kInput = 1, kHx = 2, kCx = 4, kEps = 8, kFirstWeight = 16 };

// -> gradients of input, hx, cx, eps and of the weights in one flat buffer; empty where not needed
template <class Platform>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    MaybeTensor grad_output, MaybeTensor grad_h_n, MaybeTensor grad_c_n, std::string cell,
    Tensor input, Tensor hx, MaybeTensor cx, Tensor output, MaybeTensor kept, MaybeTensor states,
    Weights weights, MaybeTensor lengths, MaybeTensor host_lengths, MaybeTensor reset,
    MaybeTensor eps, MaybeTensor seed, double dropout, double zoneout, double state_zoneout,
    MaybeTensor mask_seed, int64_t layer, int64_t first_step, bool reverse, int64_t chunk_size,
    int64_t workspace_bytes, std::string backend, int64_t needs, bool replay, bool by_flags,
    bool overlap) {
  const Arguments args(
      {cell,   input,      hx,      cx,         weights,         lengths,       host_lengths,
       reset,  eps,        seed,    dropout,    zoneout,         state_zoneout, mask_seed,
       layer,  first_step, reverse, chunk_size, workspace_bytes, backend,       by_flags,
       overlap});
  const int64_t directions = args.directions(), seq_len = args.seq_len(), batch = args.batch();
  const int64_t width = args.sizes().output, hidden = args.sizes().hidden;
  args.check("output", output, {seq_len, batch, directions * width});
  STD_TORCH_CHECK(output.is_contiguous(), "fusedrnn: output must be contiguous");
  if (grad_output) args.check("grad_output", *grad_output, {seq_len, batch, directions * width});
  if (grad_h_n) args.check("grad_h_n", *grad_h_n, {directions, batch, width});
  if (grad_c_n && args.has_state()) args.check("grad_c_n", *grad_c_n, {directions, batch, hidden});
  STD_TORCH_CHECK(args.has_eps() || (needs & kEps) == 0,
                  "fusedrnn: eps was drawn and has no gradient");
  STD_TORCH_CHECK(args.has_state() || (needs & kCx) == 0, "fusedrnn: there is no cx");
  STD_TORCH_CHECK(needs >= 0 && needs < (kFirstWeight << weights.size()),
                  "fusedrnn: needs must have a bit for input, hx, cx, eps and each weight, got ",
                  needs);

  Platform platform(input, replay);
  return dispatch_dtype(input, [&](auto element) {
    using T = decltype(element);
    using A = Acc<T>;
    Problem asked = args.problem(platform);
    const int64_t state_numel = directions * args.state_numel();
    if (states && state_numel > 0) asked.chunks = states->numel() / state_numel;
    const LayerPlan plan = plan_layer<BackendOf<Platform, T>>(asked);
    const int64_t states_numel = args.states_numel(plan.steps);
    const auto check_saved = [&](const char* name, const Tensor& t, int64_t numel) {
      STD_TORCH_CHECK(t.numel() == numel && t.scalar_type() == kScalarType<A> &&
                          t.is_contiguous() && t.device() == input.device(),
                      "fusedrnn: ", name, " must be what forward returned for these arguments");
    };
    STD_TORCH_CHECK(states.has_value() == args.has_state(), "fusedrnn: states must be given for a ",
                    "cell that has a state beside h, and for no other");
    if (states) check_saved("states", *states, directions * states_numel);
    if (kept) check_saved("kept", *kept, directions * args.kept_numel());

    const auto gradient = [&](bool needed, const std::vector<int64_t>& shape, const char* what,
                              bool zeros = false) {
      return allocate(input, needed ? shape : std::vector<int64_t>{0}, input.scalar_type(), what,
                      zeros);
    };
    const bool zeros = args.has_lengths();  // nothing is written where all rows are finished
    Tensor grad_input = gradient(needs & kInput, {seq_len, batch, args.sizes().input},
                                 "the gradient of the input", zeros);
    Tensor grad_hx = gradient(needs & kHx, {directions, batch, width}, "the gradient of hx");
    Tensor grad_cx = gradient(needs & kCx, {directions, batch, hidden}, "the gradient of cx");
    Tensor grad_eps = gradient(needs & kEps, {directions, seq_len, batch, args.sizes().latent},
                               "the gradient of eps", zeros);
    const int64_t flat_size = needs >= kFirstWeight ? directions * args.weights_numel() : 0;
    Tensor grad_weights = allocate(input, {flat_size}, kScalarType<A>,
                                   "the gradients of the weights", /*zeros=*/true);
    MaybeTensor dense_h_n, dense_c_n;
    if (grad_h_n) dense_h_n = torch::stable::contiguous(*grad_h_n);
    if (grad_c_n && args.has_state()) dense_c_n = torch::stable::contiguous(*grad_c_n);

    for (int64_t d = 0; d < directions && batch > 0; ++d) {
      Layer<T> problem = args.layer<T>(plan.steps, plan.backward, d);
      problem.output = const_cast<T*>(Arguments::data<T>(output)) + d * width;  // only read
      problem.output_stride = directions * width;
      if (states) problem.states = const_cast<A*>(Arguments::data<A>(*states)) + d * states_numel;
      Gradients<T> gradients{};
      if (grad_output) {
        gradients.output = Arguments::sequence<T>(*grad_output);
        gradients.output.data += d * width * grad_output->stride(2);
        gradients.output.width = width;
      }
      const int64_t h = d * args.h_numel(), state = d * args.state_numel();
      if (dense_h_n) gradients.h_n = Arguments::data<T>(*dense_h_n) + h;
      if (dense_c_n) gradients.c_n = Arguments::data<T>(*dense_c_n) + state;
      if (needs & kInput) gradients.input = pointer<T>(grad_input);
      gradients.adds_to_input = d > 0;
      gradients.completes_input = d + 1 == directions;
      if (needs & kHx) gradients.hx = pointer<T>(grad_hx) + h;
      if (needs & kCx) gradients.cx = pointer<T>(grad_cx) + state;
      if (needs & kEps) {
        gradients.eps = pointer<T>(grad_eps) + d * seq_len * batch * args.sizes().latent;
      }
      const std::vector<Parameter>& layout = args.layout();
      for (size_t i = 0; i < layout.size(); ++i) {
        if ((needs & (kFirstWeight << (size_t(d) * layout.size() + i))) == 0) continue;
        A* at = pointer<A>(grad_weights) + d * args.weights_numel() + layout[i].offset;
        const int p = layout[i].projection;
        (layout[i].columns == 0 ? gradients.bias[p] : gradients.weight[p]) = at;
      }
      Driver driver(platform.template backend<T>(), problem);
      const Tensor workspace = allocate(input, {driver.backward_workspace_bytes(gradients)},
                                        ScalarType::Byte, "the workspace");
      [[maybe_unused]] const auto computing = platform.computing(seq_len * driver.step_work());
      driver.backward(gradients, kept ? Arguments::data<A>(*kept) + d * args.kept_numel() : nullptr,
                      workspace.mutable_data_ptr());
    }
    if constexpr (!std::is_same_v<T, A>) {
      const Tensor wide = grad_weights;
      grad_weights = allocate(input, {flat_size}, kScalarType<T>, "the gradients of the weights");
      torch::stable::copy_(grad_weights, wide);
    }
    return std::make_tuple(grad_input, grad_hx, grad_cx, grad_eps, grad_weights);
  });
}

// The operators' schemas, without their names.
constexpr const char* kForwardSchema =
    "(str cell, Tensor input, Tensor hx, Tensor? cx, Tensor[] weights, Tensor? lengths, "
    "Tensor? host_lengths, Tensor? reset, Tensor? eps, Tensor? seed, float dropout, "
    "float zoneout, float state_zoneout, Tensor? mask_seed, int layer, int first_step, "
    "bool reverse, int chunk_size, int workspace_bytes, str backend, bool keep, bool replay, "
    "bool by_flags, bool overlap) "
    "-> (Tensor output, Tensor h_n, Tensor c_n, Tensor kept, Tensor states)";
constexpr const char* kBackwardSchema =
    "(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, str cell, Tensor input, Tensor hx, "
    "Tensor? cx, Tensor output, Tensor? kept, Tensor? states, Tensor[] weights, Tensor? lengths, "
    "Tensor? host_lengths, Tensor? reset, Tensor? eps, Tensor? seed, float dropout, "
    "float zoneout, float state_zoneout, Tensor? mask_seed, int layer, int first_step, "
    "bool reverse, int chunk_size, int workspace_bytes, str backend, int needs, bool replay, "
    "bool by_flags, bool overlap) "
    "-> (Tensor grad_input, Tensor grad_hx, Tensor grad_cx, Tensor grad_eps, Tensor grad_weights)";

}  // namespace fusedrnn
