// The functions that Python calls without tensors: the layout of the flat weight buffer, plans, and
// the interruption of operators by signals.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cell/sized_program.h"
#include "cpu/memory.h"
#include "cuda/memory.h"
#include "driver/parts.h"
#include "driver/planner.h"
#include "driver/tuning.h"
#include "module_guard.h"
#include "program/numbers.h"

namespace py = pybind11;

static const fusedrnn::Cell& cell_named(const std::string& name) {
  const fusedrnn::Cell* cell = fusedrnn::find_cell(name.c_str());
  if (cell == nullptr) throw py::value_error("fusedrnn: there is no cell " + name);
  return *cell;
}

// Calls f with a number of the C++ type for `dtype`.
template <class F>
static auto dispatch_dtype(const std::string& dtype, const F& f) {
  if (dtype == "float32") return f(float{});
  if (dtype == "float64") return f(double{});
  if (dtype == "bfloat16") return f(fusedrnn::BFloat16{});
  if (dtype == "float16") return f(fusedrnn::Half{});
  throw py::value_error("fusedrnn: there is no " + dtype);
}

// Name, compute capability, multiprocessors, bytes of shared memory of a block; and for a GPU in
// this machine its index and the address of its MostBlocks, otherwise 0.
using GpuFacts = std::tuple<std::string, int, int, int64_t, int, uintptr_t>;
using Strides = std::vector<std::vector<int64_t>>;

// The plan of one layer and direction.  gpu_facts: none for the CPU.  strides: of all weights of
// all directions; none if the weights are contiguous.
static py::dict plan(const std::string& name, bool noise, int64_t input_size, int64_t hidden_size,
                     int64_t latent_size, int64_t output_size, bool bias, int64_t seq_len,
                     int64_t batch, const std::string& dtype, int64_t chunk_size,
                     int64_t workspace_bytes, const std::string& backend, int64_t tuning_number,
                     const std::optional<GpuFacts>& gpu_facts, const Strides& strides) {
  using namespace fusedrnn;
  Gpu gpu{"", 0, 0, 0};
  if (gpu_facts) {
    const auto& [gpu_name, capability, multiprocessors, shared_bytes, device, ask] = *gpu_facts;
    gpu = {gpu_name.c_str(),
           capability,
           multiprocessors,
           shared_bytes,
           {},
           device,
           reinterpret_cast<cuda::MostBlocks>(ask)};
  }
  Problem problem;
  problem.cell = noise ? cell_named(name) : without_noise(cell_named(name));
  problem.sizes = {input_size, hidden_size, latent_size, output_size};
  problem.bias = bias;
  problem.seq_len = seq_len;
  problem.batch = batch;
  problem.chunk_size = chunk_size;
  problem.workspace_bytes = workspace_bytes;
  problem.backend = backend;
  const Tuning tuning = Tuning::of(tuning_number);
  problem.exchange = tuning.by_flags ? cuda::Exchange::Flags : cuda::Exchange::Packets;
  problem.overlap = tuning.overlap;
  problem.free_multiprocessors = tuning.free_multiprocessors;
  problem.gpu = gpu_facts ? &gpu : nullptr;
  problem.tf32 = tuning.tf32;
  const auto layout = layer_layout(problem.cell, problem.sizes, bias);
  for (size_t i = 0; i < strides.size(); ++i) {
    const Parameter& p = layout[i % layout.size()];
    if (strides[i].size() == 2) problem.see_weight(p, strides[i][0], strides[i][1]);
  }

  return dispatch_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const auto fill = [&](auto types) {
      using Memory = decltype(types);
      const Plan made = plan_layer<Memory>(problem);
      const WorkspaceBytes workspace = WorkspaceCount<Memory>(problem, false)(made);
      const auto pass_plan = [&](Pass pass, const PassPlan& plan, int64_t workspace_bytes) {
        const cuda::PersistentPlan& kernel = plan.persistent;
        const bool is_persistent = plan.is_persistent;
        py::dict result;
        result["backend"] = is_persistent ? "persistent" : "stepwise";
        result["reason"] = reason(problem, made, plan);
        result["grid"] = is_persistent ? kernel.grid() : 0;
        result["threads"] = is_persistent ? cuda::kPersistentThreads : 0;
        result["weight_registers"] = is_persistent ? kernel.weight_registers() : 0;
        result["shared_memory_bytes"] = is_persistent ? kernel.shared_bytes : 0;
        result["workspace_bytes"] = workspace_bytes;
        result["modelled_step_us"] = step_us(pass, problem, plan);
        result["modelled_us"] = pass_us(pass, problem, made, sizeof(T), /*recompute=*/true);
        result["modelled_us_without_recompute"] =
            pass_us(pass, problem, made, sizeof(T), /*recompute=*/false);
        return result;
      };
      const auto saved = [&](bool recompute) {
        return saved_bytes(problem, made.steps, sizeof(Acc<T>), recompute);
      };
      py::dict memory;
      memory["training_bytes"] = training_bytes<T>(problem, made.steps, workspace);
      memory["nn_lstm_training_bytes"] = lstm_training_bytes<T>(problem);
      memory["saved_bytes"] = saved(/*recompute=*/true);
      memory["saved_bytes_without_recompute"] = saved(/*recompute=*/false);
      memory["most_workspace_bytes"] = WorkspaceCount<Memory>(problem, true)(made).most();
      py::dict result;
      result["forward"] = pass_plan(Pass::Forward, made.forward, workspace.forward);
      result["backward"] = pass_plan(Pass::Backward, made.backward, workspace.backward);
      result["reason"] = reason(problem, made);
      result["chunk_steps"] = made.steps;
      result["chunk_reason"] = made.why_steps;
      result["memory"] = memory;
      return result;
    };
    return gpu_facts ? fill(cuda::Memory<T>{}) : fill(cpu::Memory<T>{});
  });
}

// Counts what a pass of a cell does once per chunk if all gradients are wanted: GEMMs, launches
// other than GEMMs and persistent kernels, and everything that the CPU enqueues.
static py::dict chunk_counts(const std::string& name, bool is_backward, bool is_persistent,
                             int64_t element_bytes, int64_t steps, bool recompute) {
  using namespace fusedrnn;
  Problem problem;
  problem.cell = cell_named(name);
  PassPlan plan;
  plan.is_persistent = is_persistent;
  const Pass pass = is_backward ? Pass::Backward : Pass::Forward;
  const ChunkWork work = chunk_work(pass, problem, plan, element_bytes, recompute);
  const double host_us = chunk_us(pass, problem, plan, element_bytes, steps, recompute).host;
  py::dict result;
  result["gemm"] = work.gemms;
  result["launch"] = work.launches;
  result["host"] = std::llround(host_us / kHostUs);
  return result;
}

// The exception that a signal's handler raised during an operator, until the operator has ended.
// Only Python's main thread handles signals, so the variable is of that thread alone.
static thread_local std::unique_ptr<py::error_already_set> interruption;
// The number of active calls that can raise it.  An operator in another call, as of a compiled
// graph, must not be ended: its error would be a different one.
static thread_local int interruptible_calls = 0;

static bool handle_signals() {
  const bool is_main_thread = syscall(SYS_gettid) == getpid();
  if (interruptible_calls == 0 || !is_main_thread) return false;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return false;
  interruption = std::make_unique<py::error_already_set>();
  return true;
}

static py::object call_interruptibly(const py::object& function, const py::args& arguments,
                                     const py::kwargs& keywords) {
  struct Count {
    Count() {
      if (interruptible_calls++ == 0) interruption.reset();
    }
    ~Count() { --interruptible_calls; }
  };
  const auto raise = [] { throw *std::exchange(interruption, nullptr); };
  const Count count;
  try {
    const py::object result = function(*arguments, **keywords);
    if (interruption != nullptr) raise();  // the error was caught on the way
    return result;
  } catch (const py::error_already_set&) {
    if (interruption != nullptr) raise();
    throw;
  }
}

// The facts of a cell for Python.  `weights`: in the order of a call's arguments, the name of each
// weight and which size gives its number of columns.
static py::dict facts_of(const fusedrnn::Cell& cell) {
  const auto name_of = [](fusedrnn::Width width) {
    switch (width) {
      case fusedrnn::Width::Input: return "input";
      case fusedrnn::Width::Hidden: return "hidden";
      case fusedrnn::Width::Latent: return "latent";
      case fusedrnn::Width::Output: return "output";
    }
    return "";
  };
  py::list weights;
  bool has_latent = false;
  for (const fusedrnn::Parameter& p : fusedrnn::layer_layout(cell, {1, 1, 1, 1}, false)) {
    const fusedrnn::Width width = cell.projections[p.projection].from;
    has_latent = has_latent || width == fusedrnn::Width::Latent;
    weights.append(py::make_tuple(p.name, name_of(width)));
  }
  py::dict facts;
  facts["index"] = &cell - fusedrnn::kCells.data();
  facts["has_cell_state"] = fusedrnn::has_cell_state(cell);
  facts["has_latent"] = has_latent;
  facts["is_projected"] = fusedrnn::is_projected(cell);
  facts["weights"] = py::tuple(weights);
  return facts;
}

PYBIND11_MODULE(_helpers, m) {
  m.def(
      "part_count", [](int64_t seq_len) { return fusedrnn::Parts{seq_len, false}.count(); },
      py::arg("seq_len"), "The number of parts of a sequence whose last states alone are wanted.");
  m.def("plan", &plan, py::kw_only(), py::arg("cell"), py::arg("noise"), py::arg("input_size"),
        py::arg("hidden_size"), py::arg("latent_size"), py::arg("output_size"), py::arg("bias"),
        py::arg("seq_len"), py::arg("batch"), py::arg("dtype"), py::arg("chunk_size"),
        py::arg("workspace_bytes"), py::arg("backend"), py::arg("tuning"), py::arg("gpu"),
        py::arg("strides") = Strides{},
        "The plan of one layer and direction, as a dict of its fields.");
  m.def("chunk_counts", &chunk_counts, py::kw_only(), py::arg("cell"), py::arg("backward"),
        py::arg("persistent"), py::arg("element_bytes"), py::arg("steps"), py::arg("recompute"),
        "How often a chunk takes each of the items 'gemm', 'launch' and 'host' of MODEL_US, apart "
        "from its steps.");
  m.def(
      "known_gpus",
      [] {
        py::dict gpus;
        for (const fusedrnn::Gpu& gpu : fusedrnn::kKnownGpus) {
          gpus[gpu.name] = GpuFacts{
              gpu.name, gpu.compute_capability, gpu.multiprocessors, gpu.shared_bytes, 0, 0};
        }
        return gpus;
      },
      "Properties of GPUs by name: name, compute capability, multiprocessors, bytes of shared "
      "memory of a block; and zeros for the device's index and the address that asks its driver.");
  m.def(
      "layer_layout",
      [](const std::string& cell, int64_t input_size, int64_t hidden_size, int64_t latent_size,
         int64_t output_size, bool bias) {
        py::list parameters;
        for (const fusedrnn::Parameter& p : fusedrnn::layer_layout(
                 cell_named(cell), {input_size, hidden_size, latent_size, output_size}, bias)) {
          std::vector<int64_t> shape{p.rows};
          if (p.columns != 0) shape.push_back(p.columns);
          parameters.append(py::make_tuple(p.name, py::tuple(py::cast(shape))));
        }
        return parameters;
      },
      py::arg("cell"), py::arg("input_size"), py::arg("hidden_size"), py::arg("latent_size"),
      py::arg("output_size"), py::arg("bias"),
      "[(name, shape)] of the parameters of one layer and direction, in their order.");
  m.def(
      "check_sizes",
      [](const std::string& cell, int64_t input_size, int64_t hidden_size, int64_t latent_size,
         int64_t output_size, int64_t seq_len, int64_t batch) {
        fusedrnn::check_sizes(cell_named(cell), {input_size, hidden_size, latent_size, output_size},
                              seq_len, batch);
      },
      py::kw_only(), py::arg("cell"), py::arg("input_size"), py::arg("hidden_size"),
      py::arg("latent_size"), py::arg("output_size"), py::arg("seq_len"), py::arg("batch"),
      "Raises a RuntimeError if a layer is too large.");
  m.def(
      "saved_columns",
      [](const std::string& cell, int64_t hidden_size, int64_t latent_size, bool noise) {
        const fusedrnn::Cell& named = cell_named(cell);
        return fusedrnn::saved_columns(noise ? named : fusedrnn::without_noise(named),
                                       {0, hidden_size, latent_size, 0});
      },
      py::arg("cell"), py::arg("hidden_size"), py::arg("latent_size"), py::arg("noise"),
      "Numbers per step and row of the batch that recompute=False saves for backward.");
  m.def(
      "cell_program",
      [](const std::string& name, int64_t input_size, int64_t hidden_size, int64_t latent_size,
         int64_t output_size, bool bias, bool noise) {
        const auto index = &cell_named(name) - fusedrnn::kCells.data();
        const fusedrnn::cells::Program& cell = fusedrnn::cells::kPrograms[index];
        py::list stages;
        for (const fusedrnn::cells::Stage& stage : cell.stages) {
          stages.append(
              fusedrnn::name_of(noise ? stage.kind : fusedrnn::without_noise(stage.kind)));
        }
        const fusedrnn::Sizes sizes{input_size, hidden_size, latent_size, output_size};
        return py::make_tuple(fusedrnn::program::write(fusedrnn::sized(cell, sizes, bias, noise)),
                              py::tuple(stages));
      },
      py::kw_only(), py::arg("cell"), py::arg("input_size"), py::arg("hidden_size"),
      py::arg("latent_size"), py::arg("output_size"), py::arg("bias"), py::arg("noise"),
      "The program of a cell as a list of numbers, and its stages: names of structs of "
      "csrc/cell/stages.h.");
  // Operators take indices into these two.
  py::dict cells;
  py::list backends;
  for (const fusedrnn::Cell& cell : fusedrnn::kCells) cells[cell.name] = facts_of(cell);
  for (const char* backend : fusedrnn::kBackends) backends.append(backend);
  m.attr("CELLS") = cells;
  m.attr("BACKENDS") = py::tuple(backends);
  py::dict model;
  model["exchange"] = fusedrnn::kExchangeUs;
  model["tile"] = fusedrnn::kTileUs;
  model["launched"] = fusedrnn::kLaunchedUs;
  model["state"] = fusedrnn::kStateUs;
  model["gemm"] = fusedrnn::kGemmUs;
  model["launch"] = fusedrnn::kLaunchUs;
  model["kernel"] = fusedrnn::kKernelUs;
  model["host"] = fusedrnn::kHostUs;
  m.attr("MODEL_US") = model;  // the model's microseconds (driver/time_model.h)
  py::dict tuning;
  tuning["replay"] = fusedrnn::Tuning::kReplay;
  tuning["by_flags"] = fusedrnn::Tuning::kByFlags;
  tuning["overlap"] = fusedrnn::Tuning::kOverlap;
  tuning["tf32"] = fusedrnn::Tuning::kTf32;
  tuning["free_multiprocessors"] = int64_t(1) << fusedrnn::Tuning::kFreeShift;
  m.attr("TUNING") = tuning;  // the value of each setting in the number that operators take
  m.attr("MOST_ROWS") = fusedrnn::kMostRows;
  m.attr("MOST_LAYERS") = fusedrnn::kMostLayers;
  m.def(
      "signal_check", [] { return reinterpret_cast<uintptr_t>(&handle_signals); },
      "Address of the function that an operator calls to have signals handled.");
  py::class_<fusedrnn::ModuleGuard>(m, "ModuleGuard")
      .def(py::init<py::object>(), py::arg("module"))
      .def(
          "look", &fusedrnn::ModuleGuard::look, py::arg("module"),
          "0, plus 1 if a class of a module or of those inside of it has changed, plus 2 if one of "
          "them has a hook.");
  m.def(
      "variable",
      [](const char* name) {
        const char* value = std::getenv(name);  // of any bytes
        return py::reinterpret_steal<py::str>(
            PyUnicode_DecodeFSDefault(value == nullptr ? "" : value));
      },
      py::arg("name"),
      "A variable of the environment, which os.environ takes longer to find; \"\" if there is "
      "none.");
  m.def("call_interruptibly", &call_interruptibly, py::arg("function"),
        "Calls function(*arguments, **keywords), and raises what a signal's handler has raised "
        "meanwhile.");
}
