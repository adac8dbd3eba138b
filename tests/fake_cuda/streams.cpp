// Streams, events, captures and graphs of the fake GPU.
//
// No work is done when it is enqueued.  Work waits for earlier work in its stream and for the
// events that the stream waits for, and is done later, in any order that this allows: if a wait is
// missing, the order may well be wrong.
#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "fake.h"

namespace fake {
namespace {

struct Work;
using Works = std::vector<std::shared_ptr<Work>>;
struct Work {
  std::function<void()> run;
  Works after;
  bool is_done = false;
};

}  // namespace
}  // namespace fake

struct CUgraph_st {
  fake::Works works;  // each after everything that it waits for
  bool is_recording = true;
};
struct CUgraphExec_st {
  fake::Works works;
};
struct CUevent_st {
  fake::Works works;                  // the work that the event marks
  std::shared_ptr<CUgraph_st> graph;  // the graph that the work is a part of
};
struct CUstream_st {
  bool is_blocking;  // whether it and the default stream wait for each other
  fake::Works last;  // the work that its next work waits for
  std::shared_ptr<CUgraph_st> recording;
  bool began_recording;
  fake::Works last_before;  // the same before it began to record
};

namespace fake {
namespace {

CUstream_st default_stream{.is_blocking = true};
std::set<cudaStream_t> streams{&default_stream};
std::set<cudaEvent_t> events;
Works pending;  // in the order of enqueueing
std::map<cudaGraph_t, std::shared_ptr<CUgraph_st>> graphs;
std::set<cudaGraphExec_t> executables;

cudaStream_t known(cudaStream_t stream) {
  if (stream == nullptr) return &default_stream;
  return streams.count(stream) == 1 ? stream : nullptr;
}

void add(Works& to, const Works& more) { to.insert(to.end(), more.begin(), more.end()); }

void finish(Work& work) {
  if (!is_faulty()) work.run();
  work.is_done = true;
  work.run = nullptr;
  work.after.clear();
}
bool may_run(const Work& work) {
  return std::all_of(work.after.begin(), work.after.end(), [](auto& w) { return w->is_done; });
}
void run_with_all_before(Work& work) {
  if (work.is_done) return;
  for (const auto& before : Works(work.after)) run_with_all_before(*before);
  finish(work);
}

void begin_recording(CUstream_st& stream, const std::shared_ptr<CUgraph_st>& graph, bool is_first) {
  stream.recording = graph;
  stream.began_recording = is_first;
  stream.last_before = std::exchange(stream.last, {});
}
void end_recording(CUstream_st& stream) {
  stream.recording = nullptr;
  stream.last = std::exchange(stream.last_before, {});
}

}  // namespace

cudaError_t enqueue(cudaStream_t handle, std::function<void()> run) {
  const cudaStream_t stream = known(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle, "there is no such stream");
  auto work = std::make_shared<Work>(Work{std::move(run), stream->last});
  for (const cudaStream_t other : streams) {
    const bool one_is_default = (stream == &default_stream) != (other == &default_stream);
    if (!one_is_default || !stream->is_blocking || !other->is_blocking) continue;
    if (stream->recording != nullptr || other->recording != nullptr) {
      return fail(cudaErrorStreamCaptureImplicit, "the default stream waits for a recording one");
    }
    add(work->after, other->last);
  }
  stream->last = {work};
  (stream->recording != nullptr ? stream->recording->works : pending).push_back(work);
  return cudaSuccess;
}

void run_all() {
  while (!pending.empty()) {
    std::vector<size_t> possible;
    for (size_t i = 0; i < pending.size(); ++i) {
      if (!pending[i]->is_done && may_run(*pending[i])) possible.push_back(i);
    }
    if (possible.empty()) break;  // everything is done
    size_t next = possible.front();
    if (options.order == 1) next = possible.back();
    if (options.order > 1) next = possible[random_below(possible.size())];
    const auto work = pending[next];
    pending.erase(pending.begin() + int64_t(next));
    finish(*work);
  }
  pending.clear();
}

void run_to_here(cudaStream_t stream) {
  for (const auto& work : Works(known(stream)->last)) run_with_all_before(*work);
}

bool is_idle() {
  return std::all_of(pending.begin(), pending.end(), [](auto& work) { return work->is_done; });
}
bool is_capturing(cudaStream_t stream) { return known(stream)->recording != nullptr; }
bool any_is_capturing() {
  return std::any_of(streams.begin(), streams.end(),
                     [](auto s) { return s->recording != nullptr; });
}

}  // namespace fake

using namespace fake;

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  if (flags > cudaStreamNonBlocking || priority > 0 || priority < -5) {
    return fail(cudaErrorInvalidValue, "a stream of unknown flags or priority");
  }
  *stream = new CUstream_st{.is_blocking = flags == 0};
  streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (streams.erase(stream) == 0) {
    return fail(cudaErrorInvalidResourceHandle, "no stream to destroy");
  }
  delete stream;  // its work is still done
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (flags > 7) return fail(cudaErrorInvalidValue, "an event of unknown flags");
  *event = new CUevent_st{};
  events.insert(*event);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (events.erase(event) == 0) return fail(cudaErrorInvalidResourceHandle, "no event to destroy");
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  const cudaStream_t stream = known(handle);
  if (stream == nullptr || events.count(event) == 0) {
    return fail(cudaErrorInvalidResourceHandle, "no event to record, or no stream");
  }
  event->works = stream->last;
  event->graph = stream->recording;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  const cudaStream_t stream = known(handle);
  if (stream == nullptr || events.count(event) == 0) {
    return fail(cudaErrorInvalidResourceHandle, "no event to wait for, or no stream");
  }
  if (flags != 0) return fail(cudaErrorInvalidValue, "a wait of unknown flags");
  if (event->graph == nullptr && event->works.empty()) return cudaSuccess;
  if (event->graph == nullptr && stream->recording != nullptr) {
    return fail(cudaErrorStreamCaptureIsolation, "a recording stream waits for one that is not");
  }
  if (event->graph != nullptr && stream->recording == nullptr) {
    if (!event->graph->is_recording) {
      return fail(cudaErrorCapturedEvent, "a wait for what only has been recorded");
    }
    begin_recording(*stream, event->graph, /*is_first=*/false);
  }
  ++counts.waits;
  const Bug lost = stream == known(torch_stream()) ? Bug::LostWait : Bug::LostOtherWait;
  if (options.bug != lost) add(stream->last, event->works);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (known(stream) == &default_stream) {
    return fail(cudaErrorStreamCaptureUnsupported, "the default stream cannot record");
  }
  if (known(stream) == nullptr || mode > cudaStreamCaptureModeRelaxed) {
    return fail(cudaErrorInvalidValue, "no stream to record, or no such mode");
  }
  if (stream->recording != nullptr) {
    return fail(cudaErrorIllegalState, "the stream is recording already");
  }
  begin_recording(*stream, std::make_shared<CUgraph_st>(), /*is_first=*/true);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  if (known(stream) == nullptr || stream->recording == nullptr || !stream->began_recording) {
    return fail(cudaErrorIllegalState, "no recording to end");
  }
  const auto recorded = stream->recording;
  std::set<Work*> joined;
  Works left = stream->last;
  while (!left.empty()) {
    const auto work = left.back();
    left.pop_back();
    if (joined.insert(work.get()).second) add(left, work->after);
  }
  end_recording(*stream);
  recorded->is_recording = false;
  bool all_joined = true;
  for (const cudaStream_t other : streams) {
    if (other->recording != recorded) continue;
    for (const auto& work : other->last) all_joined = all_joined && joined.count(work.get()) == 1;
    end_recording(*other);
  }
  if (!all_joined) {
    return fail(cudaErrorStreamCaptureUnjoined, "another stream was left recording");
  }
  *graph = recorded.get();
  graphs[*graph] = recorded;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (known(stream) == nullptr) return fail(cudaErrorInvalidResourceHandle, "no such stream");
  *status = is_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long flags) {
  if (graphs.count(graph) == 0 || flags != 0) {
    return fail(cudaErrorInvalidValue, "no graph to instantiate, or unknown flags");
  }
  *executable = new CUgraphExec_st{graph->works};
  executables.insert(*executable);
  return cudaSuccess;
}
// Copies each work; a copy waits for the copies of what the work waits for, and for the stream.
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  const cudaStream_t stream = known(handle);
  if (executables.count(executable) == 0 || stream == nullptr) {
    return fail(cudaErrorInvalidValue, "no graph to launch, or no stream");
  }
  const cudaError_t begun = enqueue(stream, [] {});
  if (begun != cudaSuccess) return begun;
  ++counts.replays;
  const Works first = stream->last;
  Works& target = stream->recording != nullptr ? stream->recording->works : pending;
  std::map<Work*, std::shared_ptr<Work>> copies;
  for (const auto& work : executable->works) {
    auto copy = std::make_shared<Work>(Work{work->run, first});
    for (const auto& before : work->after) copy->after.push_back(copies.at(before.get()));
    copies[work.get()] = copy;
    target.push_back(copy);
    stream->last.push_back(copy);
  }
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  if (graphs.erase(graph) == 0) return fail(cudaErrorInvalidValue, "no graph to destroy");
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  if (executables.erase(executable) == 0) return fail(cudaErrorInvalidValue, "no graph to destroy");
  delete executable;
  return cudaSuccess;
}
