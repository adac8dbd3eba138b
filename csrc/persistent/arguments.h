// The arguments of a persistent forward kernel, which runs all steps of a chunk.  No CUDA header is
// included here, because the driver includes this file under any C++ compiler.
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

struct Packet;  // see device.h

// How blocks hand on results; see exchange.h.
enum class Exchange { Packets, Flags };

constexpr int kTileRows = 8, kTileUnits = 16;  // the shape of mma
constexpr int kWarps = 8, kWarpLanes = 32, kPersistentThreads = kWarps * kWarpLanes;
constexpr int kSenders = 4;    // warps that compute units and send the results
constexpr int kMostDepth = 4;  // a greater depth does not fit into the registers
constexpr int kMostStages = 2, kMostGates = 4;
constexpr int kTileThreads = kSenders * kWarpLanes;
constexpr int kKeptArrays = 2;    // a cell state, and h
constexpr int kNoiseStride = 20;  // from row to row of 16 units, so that no two lanes use one bank
constexpr int kSumFloats = kWarps * kMostGates * kTileThreads;
constexpr uint32_t kGivenUp = 1;  // differs from every preset
constexpr int64_t kPacketBytes = 16, kGivenUpBytes = kPacketBytes;
constexpr uint32_t kSpinLimit = 1u << 24;  // reads of memory, about ten seconds
constexpr int kBiasFloats = 2 * kMostStages * kMostGates * kTileUnits;  // of input and hidden gates
constexpr int kTurnFloats = kSumFloats + kTileRows * kNoiseStride;
constexpr int kRingItems = 4;  // see ring.h
FUSEDRNN_HD constexpr int ring_floats(int words) { return kRingItems * words * kTileThreads; }

// The number of blocks of columns that each warp multiplies.
FUSEDRNN_HD constexpr int warp_depth(int columns, int depth_columns) {
  const int all = (columns + depth_columns - 1) / depth_columns;
  return (all + kWarps - 1) / kWarps;
}
// The number of packets in a row of `width` numbers.
FUSEDRNN_HD constexpr int packets_of(int width, int packet_numbers) {
  return (width + packet_numbers - 1) / packet_numbers;
}

struct PersistentPlan {
  std::string why_not;  // why there is no such kernel, a sentence; or empty
  Exchange exchange{};
  int num_stages = 0;
  StageKind stages[kMostStages] = {};
  int blocks = 0;             // of a group, which holds the weights once
  int groups = 0, tiles = 0;  // tiles: of 8 rows, in each group
  int depth = 0;  // blocks of columns for which a warp of the kernel has registers: 1, 2 or 4
  int64_t shared_bytes = 0;              // shared memory of a block
  int64_t shared_limit = 0;              // the most that the GPU gives to a block
  int64_t sent_bytes[kMostStages] = {};  // memory for what each stage sends; 0 if it sends in place
  int64_t count_bytes[kMostStages] = {};  // memory for its flags

  bool is_possible() const { return why_not.empty(); }
  // Whether stage s sends through an array that exists anyway, not through the workspace.
  bool is_in_place(int s) const { return s < num_stages && sent_bytes[s] == 0; }
  int preset() const {
    return exchange == Exchange::Packets ? 0xff : 0;
  }  // the byte that presets the exchange
  int grid() const { return groups * blocks; }
  // The number of registers of a thread that hold weights.
  int weight_registers() const {
    int gates = 0;
    for (int s = 0; s < num_stages; ++s) gates += traits(stages[s]).hidden_blocks;
    return 8 * depth * gates;
  }
  // Memory for everything that is exchanged in one launch.
  int64_t exchange_bytes() const {
    int64_t bytes = 0;
    for (int s = 0; s < kMostStages; ++s) bytes += sent_bytes[s] + count_bytes[s];
    return bytes;
  }
  // turns: the number of launches, 1 or 2, that have memory of their own for the exchange.
  int64_t workspace_bytes(int turns = 1) const { return kGivenUpBytes + turns * exchange_bytes(); }
};

// Identifies a persistent kernel on a GPU and what its blocks need.  It is passed between two
// shared libraries, so it consists of plain numbers.
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

// Where a stage leaves what it sends to other blocks: slots, each with all rows of the batch.
struct Slots {
  Packet* first;
  int rows;  // from one slot to the next; negative if later slots come first in memory
  int mask;  // step i uses slot i & mask
};
constexpr int kEachItsOwn = INT32_MAX, kTwoInTurns = 1;

// Successive launches may alternate between two places in memory for their exchange: then each
// launch presets the place of the next one.
struct Turn {
  int64_t launch = 0;     // the number of launches before this one
  bool has_next = false;  // whether another launch follows, and there is memory for two
};

// The chunk, and the exchange between blocks: arguments that forward and backward have in common.
struct ExchangeArguments {
  int steps, batch;
  int row_step;  // from the rows of one step to the rows of the next: batch, or -batch
  // prepare() fills in the rest.
  Exchange exchange;
  int blocks, tiles;  // of a group; tiles: of 8 rows
  Slots sent[kMostStages];
  uint32_t* counts[kMostStages];  // flags: how much has been sent, [groups, blocks, kSenders]
  int64_t next;  // packets from a slot to the slot of the next launch; 0 if there is no next launch
  uint32_t* given_up;                // kGivenUp once a thread has given up
  uint32_t spin_limit = kSpinLimit;  // reads of memory before a thread gives up
};

template <class T>
struct PersistentForward : ExchangeArguments {
  // The stages at the chunk's first step.  carry and carry_out are the arrays before and after the
  // whole chunk, and operand of the last stage is h after it; pre, hidden_gates, factors and
  // replay_offset are not used.
  ForwardStep<T, T> step[kMostStages];
  Matrix<const T> weight[kMostStages];  // (blocks * width, k), any strides
  RowView<const T> h;                   // before the chunk; must not be the memory of h after it
  Turn turn;
};

// Fills in the exchange arguments from a plan.  workspace: plan.workspace_bytes() bytes at a
// multiple of 16, with room for two turns if there is a next launch.  Returns how many bytes from
// its start must be preset before the launch.
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

// Does the same, and calls set(memory, byte, count) for memory that must be preset.
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

// Prepares and launches the kernel, both on the stream.  Never waits, and may be captured in a CUDA
// graph.  The launch is refused if the GPU cannot run all blocks at once, as when it is shared.
template <class T>
Launch launch_persistent_forward(const PersistentPlan& plan, PersistentForward<T> args,
                                 void* workspace, Stream stream);

// The number of blocks that the current GPU can run at once, or kUnknown if it cannot be asked now.
constexpr int64_t kUnknown = -2;
int64_t count_forward_blocks(const PersistentKernel& kernel);
int64_t count_backward_blocks(const PersistentKernel& kernel);

}  // namespace fusedrnn::cuda
