// The arguments of a persistent kernel that runs the backward_data of a chunk.  No CUDA header is
// included here, because the driver includes this file under any C++ compiler.
#pragma once
#include "arguments.h"

namespace fusedrnn::cuda {

constexpr int kBackwardSumFloats = kWarps * kTileThreads;  // partial sums of a tile

// The number of packets that a lane loads at once, given the registers that weights take: a packet
// takes 4 registers.
constexpr int packets_ahead(int weight_registers) { return weight_registers > 128 ? 4 : 8; }

template <class T>
struct PersistentBackward : ExchangeArguments {
  // The stages at the chunk's first step, in the order of forward.  dout of the last stage is dh,
  // and dcarry of a stage with a cell state is dc, both [batch, width]: after the chunk when the
  // kernel starts, before it when the kernel has ended.  dout and dcarry of other stages, and
  // step.cell_state, are not read. dhidden_gates starts at a multiple of 16 bytes; if a stage sends
  // through it, its memory holds nothing that is read.
  BackwardStep<T, T> step[kMostStages];
  Matrix<const T> weight[kMostStages];  // (blocks * width, k), any strides
  RowView<const T> first_carry;  // before the first step; null if step.carry has that step too
  // Only for a cell with a cell state.  first_cell_state: before the first step, [batch, width].
  // cell_states: computed here, the state before each step; it points to the rows of the chunk's
  // first step, and row_step leads to other steps.  operand: computed here, the LSTM's result if
  // another stage projects it, else null.
  const Acc<T>* first_cell_state;
  Acc<T>* cell_states;
  T* operand;
  bool wants_dh;  // whether dh before the chunk is read, and so must be complete
};

// Like prepare() of forward.  Gradients are sent from the last step to the first.  The gradients of
// a stage that is in place go through dhidden_gates, [rows, blocks * width]: the chunk's rows of it
// are preset, and sending is the only thing that writes them.  If there are such stages, their
// memory and the workspace are contiguous and preset by one call.
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

// Like launch_persistent_forward(), with a plan from plan_persistent_backward().
template <class T>
Launch launch_persistent_backward(const PersistentPlan& plan, PersistentBackward<T> args,
                                  void* workspace, Stream stream);

}  // namespace fusedrnn::cuda
