// A chunk of the backward_data as the backend launches it.  No CUDA header here: see step.h.
#pragma once
#include "arguments.h"

namespace fusedrnn::cuda {

constexpr int kBackwardSumFloats = kWarps * kTileThreads;  // partial sums of a tile

// Packets of a lane that are on their way at once: 4 registers each of those that the weights
// leave.
constexpr int packets_ahead(int weight_registers) { return weight_registers > 128 ? 4 : 8; }

template <class T>
struct PersistentBackward : ExchangeArguments {
  // Of the chunk's first step, in the order of forward.  dout of the last stage is dh, and dcarry
  // of a stage with a cell state dc, [batch, width] each: after the chunk when the kernel
  // starts, before it when it has ended.  Of the others, and step.cell_state, nothing is read.
  // dhidden_gates at a multiple of 16 bytes; the memory of nothing that is read if a stage sends
  // through it.
  BackwardStep<T, T> step[kMostStages];
  Matrix<const T> weight[kMostStages];  // (blocks * width, k), any strides
  RowView<const T> first_carry;  // before the first step, or null: stands where step.carry says
  // Of a cell with a cell state: before the first step, [batch, width]; and to be computed,
  // from the chunk's first step on, the rows of other steps where row_step says, the state before
  // each step, and if a stage is behind that one what it projects, or null.
  const Acc<T>* first_cell_state;
  Acc<T>* cell_states;
  T* operand;
  bool wants_dh;  // whether dh before the chunk is to be complete, or nobody reads it
};

// As of forward.  Gradients are sent from the last step to the first.  Those of a stage that is in
// place go through dhidden_gates, [rows, blocks * width]: the chunk's rows of it are preset, and to
// send them is all that writes them.  Where there are such stages, their memory and the workspace
// are one, and preset at once.
template <class T, class Set>
void prepare(const PersistentPlan& plan, void* workspace, PersistentBackward<T>& args,
             const Set& set) {
  auto* const end = static_cast<char*>(workspace) + place(plan, workspace, args);
  auto* begin = static_cast<char*>(workspace);
  for (int s = 0; s < plan.num_stages; ++s) {
    if (!plan.is_in_place(s)) continue;
    BackwardStep<T, T>& step = args.step[s];
    const int64_t columns = traits(plan.stages[s]).hidden_blocks * step.width;
    T* last = step.dhidden_gates + int64_t(args.steps - 1) * args.row_step * columns;
    args.sent[s] = {reinterpret_cast<Packet*>(last), -args.row_step, kEachItsOwn};
    if (plan.exchange == Exchange::Packets) {
      begin = std::min(begin, reinterpret_cast<char*>(std::min(step.dhidden_gates, last)));
    }
    step.dhidden_gates = nullptr;
  }
  set(begin, plan.preset(), size_t(end - begin));
}

// As launch_persistent_forward(), of a plan by plan_persistent_backward().
template <class T>
Launch launch_persistent_backward(const PersistentPlan& plan, PersistentBackward<T> args,
                                  void* workspace, Stream stream);

}  // namespace fusedrnn::cuda
