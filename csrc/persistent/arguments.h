// A chunk of forward steps as the backend launches it.  No CUDA header here: see step.h.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "../base/hd.h"
#if defined(__CUDACC__)  // Matrix<const T> is never converted to itself
#pragma nv_diag_suppress 554
#endif
#include "../base/launch.h"
#include "../base/matrix.h"
#include "../step/step.h"
#include "cells.h"

namespace fusedrnn::cuda {

struct Packet;  // of the exchange

// How blocks hand on results, see exchange.h.
enum class Exchange { Packets, Flags };

constexpr int kTileRows = 8, kTileUnits = 16;  // of mma
constexpr int kWarps = 8, kWarpLanes = 32, kPersistentThreads = kWarps * kWarpLanes;
constexpr int kSenders = 4;    // warps that compute units, and send them
constexpr int kMostDepth = 4;  // more does not fit into the registers
constexpr int kMostStages = 2, kMostGates = 4;
constexpr int kTileThreads = kSenders * kWarpLanes;
constexpr int kKeptArrays = 2;    // a state, and h beside it
constexpr int kNoiseStride = 20;  // of 16 units, so that lanes sync no bank twice
constexpr int kSumFloats = kWarps * kMostGates * kTileThreads;
constexpr uint32_t kGivenUp = 1;  // none of the presets
constexpr int64_t kPacketBytes = 16, kGivenUpBytes = kPacketBytes;
constexpr uint32_t kSpinLimit = 1u << 24;  // looks at memory, some ten seconds
constexpr int kBiasFloats = 2 * kMostStages * kMostGates * kTileUnits;  // of input and hidden gates
constexpr int kTurnFloats = kSumFloats + kTileRows * kNoiseStride;

// Blocks of columns that each warp multiplies.
FUSEDRNN_HD constexpr int warp_depth(int columns, int depth_columns) {
  const int all = (columns + depth_columns - 1) / depth_columns;
  return (all + kWarps - 1) / kWarps;
}
// In a row of so many numbers.
FUSEDRNN_HD constexpr int packets_of(int width, int packet_numbers) {
  return (width + packet_numbers - 1) / packet_numbers;
}

struct PersistentPlan {
  std::string why_not;  // a sentence, or empty
  Exchange exchange{};
  int num_stages = 0;
  StageKind stages[kMostStages] = {};
  int blocks = 0;                         // that hold the weights once: a group
  int groups = 0, tiles = 0;              // tiles of 8 rows of each group
  int depth = 0;                          // of the kernel: 1, 2 or 4
  int64_t shared_bytes = 0;               // of a block
  int64_t shared_limit = 0;               // of the device
  int64_t sent_bytes[kMostStages] = {};   // of the exchange, a stage each; or 0: it is in place
  int64_t count_bytes[kMostStages] = {};  // of its flags

  bool is_possible() const { return why_not.empty(); }
  // Whether stage s sends through memory that is there anyway, not through the workspace.
  bool is_in_place(int s) const { return s < num_stages && sent_bytes[s] == 0; }
  int preset() const { return exchange == Exchange::Packets ? 0xff : 0; }  // of the workspace
  int grid() const { return groups * blocks; }
  // Of a thread, that hold weights.
  int weight_registers() const {
    int gates = 0;
    for (int s = 0; s < num_stages; ++s) gates += traits(stages[s]).hidden_blocks;
    return 8 * depth * gates;
  }
  // Of all that it exchanges in a launch.
  int64_t exchange_bytes() const {
    int64_t bytes = 0;
    for (int s = 0; s < kMostStages; ++s) bytes += sent_bytes[s] + count_bytes[s];
    return bytes;
  }
  // turns: launches whose exchange has memory of its own, 1 or 2.
  int64_t workspace_bytes(int turns = 1) const { return kGivenUpBytes + turns * exchange_bytes(); }
};

// Names a persistent kernel on a GPU, and what a block of it takes.  Goes from library to library,
// so it is made of plain numbers.
struct PersistentKernel {
  enum Type { kBFloat16, kHalf, kFloat };
  int device;
  bool is_backward;
  Type type;
  int depth, num_stages;
  StageKind stages[kMostStages];
  int64_t shared_bytes, shared_limit;
};
template <class T>
constexpr PersistentKernel::Type kPersistentType = PersistentKernel::kFloat;
template <>
inline constexpr PersistentKernel::Type kPersistentType<BFloat16> = PersistentKernel::kBFloat16;
template <>
inline constexpr PersistentKernel::Type kPersistentType<Half> = PersistentKernel::kHalf;

template <class T>
PersistentKernel kernel_of(const PersistentPlan& plan, bool is_backward, int device) {
  PersistentKernel kernel{device,          is_backward, kPersistentType<T>, plan.depth,
                          plan.num_stages, {},          plan.shared_bytes,  plan.shared_limit};
  std::copy_n(plan.stages, plan.num_stages, kernel.stages);
  return kernel;
}

// Where a stage leaves for other blocks what it sends: slots, each with the rows of the batch.
struct Slots {
  Packet* first;
  int rows;  // from one slot to the next; below 0 where they lie in reverse
  int mask;  // slot i & mask is that of step i
};
constexpr int kEachItsOwn = INT32_MAX, kTwoInTurns = 1;

// Launches one after the other, which may take turns with two places for their exchange: then each
// presets that of the next one.
struct Turn {
  int64_t launch = 0;     // how many have been before
  bool has_next = false;  // whether there is room for two, and is going to be another one
};

// What kernels are told of a chunk, its place in memory and their exchange, whatever they compute.
struct ExchangeArguments {
  int steps, batch;
  int row_step;  // from a step's rows to those of the next: batch, or -batch
  // The rest is by prepare().
  Exchange exchange;
  int blocks, tiles;  // of a group; tiles of 8 rows
  Slots sent[kMostStages];
  uint32_t* counts[kMostStages];     // flags: of what has been sent [groups, blocks, kSenders]
  int64_t next;                      // packets from a slot to that of the next launch; 0: none
  uint32_t* given_up;                // kGivenUp once a thread has
  uint32_t spin_limit = kSpinLimit;  // looks at memory before that
};

template <class T>
struct PersistentForward : ExchangeArguments {
  // Of the chunk's first step.  Of arrays of one step, carry and carry_out are those before and
  // after the chunk, and operand of the last stage is h after it; pre, hidden_gates, factors
  // and replay_offset are not used.
  ForwardStep<T, T> step[kMostStages];
  Matrix<const T> weight[kMostStages];  // (blocks * width, k), any strides
  RowView<const T> h;                   // before the chunk; not the memory of h after it
  Turn turn;
};

// What a plan says of a launch.  workspace: plan.workspace_bytes() at a multiple of 16, for two
// turns if there is a next one.  Returns the bytes from its start on that have to be preset before
// the launch.
inline int64_t place(const PersistentPlan& plan, void* workspace, ExchangeArguments& args,
                     const Turn& turn = {}) {
  args.exchange = plan.exchange;
  args.blocks = plan.blocks;
  args.tiles = plan.tiles;
  args.given_up = static_cast<uint32_t*>(workspace);
  auto* at = static_cast<char*>(workspace) + kGivenUpBytes;
  const int64_t bytes = plan.exchange_bytes();
  const bool takes_turns = plan.exchange == Exchange::Packets;
  const bool is_second = takes_turns && turn.launch % 2 == 1;
  if (is_second) at += bytes;
  args.next = takes_turns && turn.has_next ? (is_second ? -bytes : bytes) / kPacketBytes : 0;
  for (int s = 0; s < kMostStages; ++s) {
    args.sent[s] = {reinterpret_cast<Packet*>(at), args.batch,
                    takes_turns ? kEachItsOwn : kTwoInTurns};
    at += plan.sent_bytes[s];
  }
  for (int s = 0; s < kMostStages; ++s) {
    args.counts[s] = reinterpret_cast<uint32_t*>(at);
    at += plan.count_bytes[s];
  }
  return takes_turns && turn.launch > 0 ? 0 : plan.workspace_bytes();
}

// The same, and calls set(memory, byte, count) for what has to be preset.
template <class T, class Set>
void prepare(const PersistentPlan& plan, void* workspace, PersistentForward<T>& args,
             const Set& set) {
  const int64_t bytes = place(plan, workspace, args, args.turn);
  if (bytes > 0) set(workspace, plan.preset(), size_t(bytes));
}

template <class F>
bool dispatch_stages(const PersistentPlan& plan, const F& f) {
  return dispatch_stages(plan.stages, plan.num_stages, f);
}

// Prepares and launches the kernel, both on the stream.  Never waits, and may be captured.  A GPU
// that cannot run all blocks at once, because it is shared, refuses it.
template <class T>
Launch launch_persistent_forward(const PersistentPlan& plan, PersistentForward<T> args,
                                 void* workspace, Stream stream);

// How many blocks the GPU, which is the current one, runs at once; or that it cannot be asked now.
constexpr int64_t kUnknown = -2;
int64_t count_forward_blocks(const PersistentKernel& kernel);
int64_t count_backward_blocks(const PersistentKernel& kernel);

}  // namespace fusedrnn::cuda
