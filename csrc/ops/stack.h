// Layers of one direction, each on the output of the layer below, with their checked arguments.
#pragma once
#include <deque>
#include <vector>

#include "../driver/parts.h"
#include "arguments.h"

namespace fusedrnn {

class Stack {
 public:
  // call: of all layers L, and of the first one where layers differ.  hx (L, B, P), cx (L, B, H),
  // eps (L, T, B, Z), and the weights of all layers one after the other.  inner_dropout: of the
  // inputs of the other layers.
  Stack(const Call& call, double inner_dropout) {
    const Tensor& hx = call.hx;
    FUSEDRNN_CHECK(hx.dim() == 3 && hx.size(0) > 0,
                   "hx must have shape (layers, batch, hidden_size), got ", shape_text(hx.sizes()));
    const int64_t layers = hx.size(0);
    const auto check_layers = [&](const char* name, const MaybeTensor& tensor, int64_t dim) {
      FUSEDRNN_CHECK(!tensor || (tensor->dim() == dim && tensor->size(0) == layers), name,
                     " must have ", dim, " dimensions, the first one of the ", layers,
                     " layers of hx, got ", shape_text(tensor->sizes()));
    };
    check_layers("cx", call.cx, 3);
    check_layers("eps", call.eps, 4);
    FUSEDRNN_CHECK(call.weights.size() % size_t(layers) == 0,
                   "weights must be as many in each layer, got ", call.weights.size(), " for ",
                   layers, " layers");
    FUSEDRNN_CHECK(!call.reverse || layers == 1, "reverse is for one layer, got ", layers);
    FUSEDRNN_CHECK(inner_dropout >= 0 && inner_dropout <= 1,
                   "inner_dropout must be a probability in [0, 1], got ", inner_dropout);
    FUSEDRNN_CHECK(inner_dropout == 0 || call.mask_seed, "inner_dropout needs a mask_seed");
    for (int64_t l = 0; l < layers; ++l) layers_.emplace_back(call, inner_dropout, l);
  }

  // Makes the lengths of rows in each part, and where packed ones begin, available.
  template <class Platform>
  void place(Platform& platform) {
    if (!bottom().has_lengths()) return;
    const Parts parts = this->parts();
    const int64_t* lengths = bottom().lengths();
    for (int64_t index = 0; index < parts.count(); ++index) {
      const Part part = parts.at(index);
      if (bottom().is_packed()) {
        const auto first = bottom().starts().begin() + part.begin;
        std::vector<int64_t>& starts = part_starts_.emplace_back(first, first + part.steps + 1);
        for (int64_t& start : starts) start -= *first;
      }
      for (int64_t b = 0; b < bottom().batch(); ++b) {
        part_lengths_.push_back(std::clamp<int64_t>(lengths[b] - part.begin, 0, part.steps));
      }
    }
    lengths_ =
        layers_[0].args.on_device(platform, part_lengths_.data(), int64_t(part_lengths_.size()));
  }

  // A layer within a part of the sequence, without states and output.  Above the first layer, the
  // caller sets the input.  chunk_steps, plan: as in Arguments::layer.
  template <class T>
  Layer<T> layer(int64_t index, int64_t part_index, int64_t chunk_steps,
                 const PassPlan& plan) const {
    const Part part = parts().at(part_index);
    Layer<T> l = layers_[size_t(index)].args.template layer<T>(chunk_steps, plan, 0);
    l.seq_len = l.mask.seq_len = part.steps;
    l.overlaps = plan.overlaps && l.chunks() > 1;
    l.input.data = l.input.at(part.begin);
    if (l.is_packed()) l.input.starts = part_starts_[size_t(part_index)].data();
    if (l.eps.data != nullptr) l.eps.data = l.eps.at(part.begin);
    l.first_step += part.begin;
    l.zoneout.first_step += part.begin;
    if (lengths_ != nullptr) l.mask.lengths = lengths_ + part_index * l.batch;
    if (l.mask.reset != nullptr) l.mask.reset += part.begin * l.batch;
    if (l.rows_at != nullptr) l.rows_at += part.begin;
    return l;
  }

  // Where the layer's weights begin among the numbers of all weights, one layer after the other.
  int64_t first_weight_number(int64_t index) const {
    if (index == 0) return 0;
    const int64_t above = size() > 1 ? layers_[1].args.weights_numel() : 0;
    return plus(bottom().weights_numel(), times(index - 1, above));
  }
  int64_t size() const { return int64_t(layers_.size()); }
  const Arguments& operator[](int64_t index) const { return layers_[size_t(index)].args; }
  const Arguments& bottom() const { return layers_[0].args; }
  Parts parts() const { return {bottom().seq_len(), bottom().is_reversed()}; }

 private:
  // The arguments of one layer, and the tensors that they refer to.
  struct One {
    const Tensor input, hx;
    const MaybeTensor cx, eps;
    const Weights weights;
    Arguments args;

    One(const Call& call, double inner_dropout, int64_t index)
        : input(index == 0 ? call.input : like_output(call)), hx(at(call.hx, index)),
          cx(at(call.cx, index)), eps(at(call.eps, index)), weights(at(call.weights, index, call)),
          args({.cell = call.cell,
                .input = input,
                .hx = hx,
                .cx = cx,
                .weights = weights,
                .lengths = call.lengths,
                .batch_sizes = call.batch_sizes,
                .reset = call.reset,
                .eps = eps,
                .seed = call.seed,
                .dropout = index == 0 ? call.dropout : inner_dropout,
                .zoneout = call.zoneout,
                .cell_zoneout = call.cell_zoneout,
                .mask_seed = call.mask_seed,
                .noise_stream = call.noise_stream + index,
                .first_step = call.first_step,
                .reverse = call.reverse,
                .chunk_size = call.chunk_size,
                .workspace_bytes = call.workspace_bytes,
                .backend = call.backend,
                .tuning = call.tuning}) {}
    One(const One&) = delete;
    One& operator=(const One&) = delete;

    static Tensor at(const Tensor& tensor, int64_t index) {
      std::vector<int64_t> sizes{1}, strides{tensor.stride(0)};
      for (int64_t i = 1; i < tensor.dim(); ++i) {
        sizes.push_back(tensor.size(i));
        strides.push_back(tensor.stride(i));
      }
      return view(tensor, sizes, strides, index * tensor.stride(0));
    }
    static MaybeTensor at(const MaybeTensor& tensor, int64_t index) {
      return tensor ? MaybeTensor(at(*tensor, index)) : MaybeTensor();
    }
    static Weights at(const Weights& weights, int64_t index, const Call& call) {
      const int64_t count = int64_t(weights.size()) / call.hx.size(0);
      return {weights.begin() + index * count, weights.begin() + (index + 1) * count};
    }
    // Has the shape of the output that the layers above the first read, and one number of memory.
    static Tensor like_output(const Call& call) {
      std::vector<int64_t> sizes;
      for (int64_t i = 0; i + 1 < call.input.dim(); ++i) sizes.push_back(call.input.size(i));
      sizes.push_back(call.hx.size(2));
      return view(call.hx, sizes, std::vector<int64_t>(sizes.size(), 0), 0);
    }
  };

  std::deque<One> layers_;  // never move, since arguments refer to tensors
  // Of each part, in the order of work: the steps of each row; and as Arguments::starts.
  std::vector<int64_t> part_lengths_;
  std::vector<std::vector<int64_t>> part_starts_;
  const int64_t* lengths_ = nullptr;  // part_lengths_ for kernels
};

}  // namespace fusedrnn
