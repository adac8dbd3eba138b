// What the operators do on every device: the one set of checks, allocation, dispatch on dtype.
//
// Platform is what a device adds, made anew for each call: the types Backend<T>, chunk_rows (see
// plan.h), and
//   Platform(input, replay)
//   backend<T>()                 the driver's backend
//   computing(multiply_adds)     an object that lives while the driver works
#pragma once
#include <array>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "driver.h"
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

// The arguments that forward and backward share, checked.  Everything that a kernel will read is
// known to be there before anything is allocated.
class Arguments {
 public:
  Arguments(const std::string& cell_name, const Tensor& input, const Tensor& hx,
            const Weights& weights, const MaybeTensor& eps, const MaybeTensor& seed, int64_t layer,
            int64_t chunk_size)
      : input_(input), hx_(torch::stable::contiguous(hx)), weights_(weights), eps_(eps),
        seed_(seed), layer_(layer), chunk_size_(chunk_size) {
    const Cell* cell = find_cell(cell_name.c_str());
    STD_TORCH_CHECK(cell != nullptr, "fusedrnn: there is no cell ", cell_name);
    cell_ = *cell;
    STD_TORCH_CHECK(input.dim() == 3, "fusedrnn: input must have 3 dimensions, got ",
                    shape_text(input.sizes()));
    STD_TORCH_CHECK(hx.dim() == 2, "fusedrnn: hx must have 2 dimensions, got ",
                    shape_text(hx.sizes()));
    const size_t projections = cell_.num_projections;
    STD_TORCH_CHECK(weights.size() == projections || weights.size() == 2 * projections,
                    "fusedrnn: ", cell_name, " takes ", projections, " weights, or ",
                    2 * projections, " with biases, got ", weights.size());
    has_bias_ = weights.size() == 2 * projections;
    STD_TORCH_CHECK(chunk_size >= 0, "fusedrnn: chunk_size must be 0 (automatic) or more, got ",
                    chunk_size);
    STD_TORCH_CHECK(layer >= 0 && layer <= UINT32_MAX, "fusedrnn: layer must be in [0, 2^32), got ",
                    layer);
    sizes_ = {input.size(2), hx.size(1), 0};
    for (size_t p = 0; p < projections; ++p) {
      STD_TORCH_CHECK(weights[p].dim() == 2, "fusedrnn: weights[", p,
                      "] must have 2 dimensions, got ", shape_text(weights[p].sizes()));
      if (cell_.projections[p].from == Width::Latent) sizes_.latent = weights[p].size(1);
    }
    check("hx", hx, {batch(), sizes_.hidden});
    const std::vector<Parameter> layout = layer_layout(cell_, sizes_, has_bias_);
    for (size_t i = 0; i < weights.size(); ++i) {
      const Parameter& p = layout[i];
      if (p.columns == 0) {
        check(p.name.c_str(), weights[i], {p.rows});
      } else {
        check(p.name.c_str(), weights[i], {p.rows, p.columns});
      }
    }
    if (eps) check("eps", *eps, {seq_len(), batch(), sizes_.latent});
    if (seed) {
      STD_TORCH_CHECK(seed->scalar_type() == ScalarType::Long && seed->numel() == 1,
                      "fusedrnn: seed must be one int64, got ", shape_text(seed->sizes()));
      check_device("seed", *seed);
    }
    STD_TORCH_CHECK(!(eps && seed), "fusedrnn: eps and seed exclude each other");
    STD_TORCH_CHECK(seq_len() > 0, "fusedrnn: expected a sequence of at least one step, got ",
                    shape_text(input.sizes()));
    if (!eps && !seed) cell_ = without_noise(cell_);
  }

  void check(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape) const {
    const torch::headeronly::IntHeaderOnlyArrayRef expected(shape.begin(), shape.size());
    const auto sizes = tensor.sizes();
    STD_TORCH_CHECK(
        sizes.size() == expected.size() && std::equal(sizes.begin(), sizes.end(), expected.begin()),
        "fusedrnn: ", name, " must have shape ", shape_text(expected), ", got ", shape_text(sizes));
    STD_TORCH_CHECK(tensor.scalar_type() == input_.scalar_type(), "fusedrnn: ", name,
                    " must have the dtype of input");
    check_device(name, tensor);
  }

  // plan: chooses the steps per chunk where the caller does not
  template <class T>
  Layer<T> layer(const ChunkPlan& plan) const {
    Layer<T> l{};
    l.cell = cell_;
    l.sizes = sizes_;
    l.seq_len = seq_len();
    l.batch = batch();
    l.chunk = plan.length(chunk_size_, seq_len(), batch());
    l.input = sequence<T>(input_);
    if (eps_) l.eps = sequence<T>(*eps_);
    l.hx = data<T>(hx_);
    l.seed = seed_ ? data<int64_t>(*seed_) : nullptr;
    l.layer = layer_;
    for (int p = 0; p < cell_.num_projections; ++p) {
      const Tensor& w = weights_[p];
      l.weight[p] = {data<T>(w), w.size(0), w.size(1), w.stride(0), w.stride(1)};
      if (!has_bias_) continue;
      const Tensor& b = weights_[cell_.num_projections + p];
      l.bias[p] = {data<T>(b), 1, b.size(0), b.size(0), b.stride(0)};
    }
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
  int64_t seq_len() const { return input_.size(0); }
  int64_t batch() const { return input_.size(1); }
  const Sizes& sizes() const { return sizes_; }
  int64_t kept_numel() const { return seq_len() * batch() * kept_columns(cell_, sizes_); }
  size_t num_weights() const { return weights_.size(); }
  std::vector<Parameter> layout() const { return layer_layout(cell_, sizes_, has_bias_); }
  int num_projections() const { return cell_.num_projections; }

 private:
  void check_device(const char* name, const Tensor& tensor) const {
    STD_TORCH_CHECK(tensor.device() == input_.device(), "fusedrnn: ", name,
                    " must be on the device of input");
  }

  Tensor input_, hx_;
  Weights weights_;
  MaybeTensor eps_, seed_;
  int64_t layer_, chunk_size_;
  Cell cell_;
  Sizes sizes_;
  bool has_bias_;
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

// -> output (T, B, H), h_n (B, H), kept: the pre-activations for backward, empty unless `keep`
template <class Platform>
std::tuple<Tensor, Tensor, Tensor> forward(std::string cell, Tensor input, Tensor hx,
                                           Weights weights, MaybeTensor eps, MaybeTensor seed,
                                           int64_t layer, int64_t chunk_size, bool keep,
                                           bool replay) {
  const Arguments args(cell, input, hx, weights, eps, seed, layer, chunk_size);
  Platform platform(input, replay);
  return dispatch_dtype(input, [&](auto element) {
    using T = decltype(element);
    using A = Acc<T>;
    Driver driver(platform.template backend<T>(), args.layer<T>(Platform::kChunkPlan));
    const int64_t batch = args.batch(), hidden = args.sizes().hidden;
    const ScalarType dtype = input.scalar_type();
    Tensor output = allocate(input, {args.seq_len(), batch, hidden}, dtype, "the output");
    Tensor h_n = allocate(input, {batch, hidden}, dtype, "h_n");
    Tensor kept = allocate(input, {keep ? args.kept_numel() : 0}, kScalarType<A>,
                           "what recompute=False keeps");
    if (batch > 0) {
      const Tensor workspace =
          allocate(input, {driver.forward_workspace_bytes()}, ScalarType::Byte, "the workspace");
      [[maybe_unused]] const auto computing =
          platform.computing(args.seq_len() * driver.step_work());
      driver.forward(
          static_cast<T*>(output.mutable_data_ptr()), static_cast<T*>(h_n.mutable_data_ptr()),
          keep ? static_cast<A*>(kept.mutable_data_ptr()) : nullptr, workspace.mutable_data_ptr());
    }
    return std::make_tuple(output, h_n, kept);
  });
}

// Bits of `needs`, in the order of the results; then one for each of `weights`.
enum Needs : int64_t { kInput = 1, kHx = 2, kEps = 4, kFirstWeight = 8 };

// -> gradients of input, hx, eps and of the weights in one flat buffer; empty where not needed
template <class Platform>
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    MaybeTensor grad_output, MaybeTensor grad_h_n, std::string cell, Tensor input, Tensor hx,
    Tensor output, MaybeTensor kept, Weights weights, MaybeTensor eps, MaybeTensor seed,
    int64_t layer, int64_t chunk_size, int64_t needs, bool replay) {
  const Arguments args(cell, input, hx, weights, eps, seed, layer, chunk_size);
  const int64_t seq_len = args.seq_len(), batch = args.batch(), hidden = args.sizes().hidden;
  args.check("output", output, {seq_len, batch, hidden});
  STD_TORCH_CHECK(output.is_contiguous(), "fusedrnn: output must be contiguous");
  if (grad_output) args.check("grad_output", *grad_output, {seq_len, batch, hidden});
  if (grad_h_n) args.check("grad_h_n", *grad_h_n, {batch, hidden});
  STD_TORCH_CHECK(eps || (needs & kEps) == 0, "fusedrnn: eps was drawn and has no gradient");
  STD_TORCH_CHECK(needs >= 0 && needs < (kFirstWeight << args.num_weights()),
                  "fusedrnn: needs must have a bit for input, hx, eps and each weight, got ",
                  needs);

  Platform platform(input, replay);
  return dispatch_dtype(input, [&](auto element) {
    using T = decltype(element);
    using A = Acc<T>;
    Layer<T> problem = args.layer<T>(Platform::kChunkPlan);
    problem.output = Arguments::data<T>(output);
    Driver driver(platform.template backend<T>(), problem);
    if (kept) {
      STD_TORCH_CHECK(kept->numel() == args.kept_numel() && kept->scalar_type() == kScalarType<A> &&
                          kept->is_contiguous() && kept->device() == input.device(),
                      "fusedrnn: kept must be what forward returned for these arguments");
    }

    const auto gradient = [&](bool needed, const std::vector<int64_t>& shape, const char* what) {
      return allocate(input, needed ? shape : std::vector<int64_t>{0}, input.scalar_type(), what);
    };
    Tensor grad_input =
        gradient(needs & kInput, {seq_len, batch, args.sizes().input}, "the gradient of the input");
    Tensor grad_hx = gradient(needs & kHx, {batch, hidden}, "the gradient of hx");
    Tensor grad_eps =
        gradient(needs & kEps, {seq_len, batch, args.sizes().latent}, "the gradient of eps");
    const std::vector<Parameter> layout = args.layout();
    const bool any_weight = needs >= kFirstWeight;
    const int64_t flat_size = any_weight ? layout.back().offset + layout.back().numel() : 0;
    Tensor grad_weights = allocate(input, {flat_size}, kScalarType<A>,
                                   "the gradients of the weights", /*zeros=*/true);

    Gradients<T> gradients{};
    const auto pointer = [](const Tensor& t) {
      return t.numel() > 0 ? static_cast<T*>(t.mutable_data_ptr()) : nullptr;
    };
    if (grad_output) gradients.output = Arguments::sequence<T>(*grad_output);
    Tensor dense_grad_h_n;
    if (grad_h_n) {
      dense_grad_h_n = torch::stable::contiguous(*grad_h_n);
      gradients.h_n = Arguments::data<T>(dense_grad_h_n);
    }
    gradients.input = pointer(grad_input);
    gradients.hx = pointer(grad_hx);
    gradients.eps = pointer(grad_eps);
    for (size_t i = 0; i < args.num_weights(); ++i) {
      if ((needs & (kFirstWeight << i)) == 0) continue;
      auto* at = static_cast<A*>(grad_weights.mutable_data_ptr()) + layout[i].offset;
      const int p = int(i) % args.num_projections();
      (layout[i].columns == 0 ? gradients.bias[p] : gradients.weight[p]) = at;
    }

    if (batch > 0) {
      const Tensor workspace = allocate(input, {driver.backward_workspace_bytes(gradients)},
                                        ScalarType::Byte, "the workspace");
      [[maybe_unused]] const auto computing =
          platform.computing(args.seq_len() * driver.step_work());
      driver.backward(gradients, kept ? Arguments::data<A>(*kept) : nullptr,
                      workspace.mutable_data_ptr());
    }
    if constexpr (!std::is_same_v<T, A>) {
      const Tensor wide = grad_weights;
      grad_weights = allocate(input, {flat_size}, kScalarType<T>, "the gradients of the weights");
      torch::stable::copy_(grad_weights, wide);
    }
    return std::make_tuple(grad_input, grad_hx, grad_eps, grad_weights);
  });
}

}  // namespace fusedrnn
