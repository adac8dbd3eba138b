// What Python asks of C++ without tensors: the layout of the flat weight buffer, and how the
// package was built.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>
#include <vector>

#include "cpu/memory.h"
#include "cuda/memory.h"
#include "planner.h"

namespace py = pybind11;

static const fusedrnn::Cell& cell_named(const std::string& name) {
  const fusedrnn::Cell* cell = fusedrnn::find_cell(name.c_str());
  if (cell == nullptr) throw py::value_error("fusedrnn: there is no cell " + name);
  return *cell;
}

template <template <class> class Memory>
static fusedrnn::WorkspaceBytes workspace_bytes_of(const std::string& dtype,
                                                   const fusedrnn::Cell& cell,
                                                   const fusedrnn::Sizes& sizes, bool bias,
                                                   int64_t seq_len, int64_t batch, int64_t chunk,
                                                   const fusedrnn::Plan& forward,
                                                   const fusedrnn::Plan& backward) {
  const auto of = [&](auto element) {
    using T = decltype(element);
    return fusedrnn::workspace_bytes<Memory<T>>(cell, sizes, bias, seq_len, batch, chunk, forward,
                                                backward);
  };
  if (dtype == "float32") return of(float{});
  if (dtype == "float64") return of(double{});
  if (dtype == "bfloat16") return of(fusedrnn::BFloat16{});
  if (dtype == "float16") return of(fusedrnn::Half{});
  throw py::value_error("fusedrnn: there is no " + dtype);
}

// The plan of one layer and direction.  gpu: compute capability, multiprocessors, bytes of shared
// memory of a block; none for the CPU.  tf32: whether products of float32 may be rounded.
static py::dict plan(const std::string& backend, const std::string& name, bool noise,
                     int64_t input_size, int64_t hidden_size, int64_t latent_size,
                     int64_t output_size, bool bias, int64_t seq_len, int64_t batch,
                     const std::string& dtype, int64_t chunk_size,
                     const std::optional<std::tuple<int, int, int64_t>>& gpu_facts, bool tf32) {
  using namespace fusedrnn;
  const Cell cell = noise ? cell_named(name) : without_noise(cell_named(name));
  const Sizes sizes{input_size, hidden_size, latent_size, output_size};
  Gpu gpu{"", 0, 0, 0};
  if (gpu_facts) {
    gpu = {"", std::get<0>(*gpu_facts), std::get<1>(*gpu_facts), std::get<2>(*gpu_facts)};
  }
  const ChunkPlan& chunks = gpu_facts ? kGpuChunks : kCpuChunks;
  const int64_t steps = chunks.length(chunk_size, seq_len, batch);
  const int64_t element_bytes = dtype == "float64" ? 8 : dtype == "float32" ? 4 : 2;
  const auto make = [&](Pass pass) {
    return make_plan(pass, backend, cell, sizes, batch, steps, element_bytes,
                     cuda::Exchange::Packets, gpu_facts ? &gpu : nullptr, tf32);
  };
  const Plan made = make(Pass::Forward), backward = make(Pass::Backward);
  const auto workspace_bytes =
      gpu_facts ? &workspace_bytes_of<cuda::Memory> : &workspace_bytes_of<cpu::Memory>;
  const WorkspaceBytes workspace =
      workspace_bytes(dtype, cell, sizes, bias, seq_len, batch, steps, made, backward);
  py::dict result;
  result["backend"] = made.is_persistent ? "persistent" : "stepwise";
  result["backward"] = backward.is_persistent ? "persistent" : "stepwise";
  result["reason"] = made.reason;
  result["modelled_step_us"] = made.step_us;
  result["chunk_steps"] = steps;
  result["forward_workspace_bytes"] = workspace.forward;
  result["backward_workspace_bytes"] = workspace.backward;
  const cuda::PersistentPlan& kernel = made.persistent;
  result["grid"] = made.is_persistent ? kernel.grid() : 0;
  result["threads"] = made.is_persistent ? cuda::kPersistentThreads : 0;
  result["weight_registers"] = made.is_persistent ? kernel.weight_registers() : 0;
  result["shared_memory_bytes"] = made.is_persistent ? kernel.shared_bytes : 0;
  return result;
}

PYBIND11_MODULE(_helpers, m) {
  m.def("plan", &plan, py::arg("backend"), py::arg("cell"), py::arg("noise"), py::arg("input_size"),
        py::arg("hidden_size"), py::arg("latent_size"), py::arg("output_size"), py::arg("bias"),
        py::arg("seq_len"), py::arg("batch"), py::arg("dtype"), py::arg("chunk_size"),
        py::arg("gpu"), py::arg("tf32"),
        "The plan of one layer and direction, by name of its fields.");
  m.def(
      "known_gpus",
      [] {
        py::dict gpus;
        for (const fusedrnn::Gpu& gpu : fusedrnn::kKnownGpus) {
          gpus[gpu.name] =
              py::make_tuple(gpu.compute_capability, gpu.multiprocessors, gpu.shared_bytes);
        }
        return gpus;
      },
      "Facts of GPUs by name: compute capability, multiprocessors, bytes of shared memory.");
  m.def(
      "layout",
      [](const std::string& cell, int64_t input_size, int64_t hidden_size, int64_t latent_size,
         int64_t output_size, int64_t num_layers, int64_t directions, bool bias) {
        py::list parameters;
        for (const fusedrnn::Parameter& p : fusedrnn::module_layout(
                 cell_named(cell), {input_size, hidden_size, latent_size, output_size}, num_layers,
                 directions, bias)) {
          std::vector<int64_t> shape{p.rows};
          if (p.columns != 0) shape.push_back(p.columns);
          parameters.append(py::make_tuple(p.name, p.offset, py::tuple(py::cast(shape))));
        }
        return parameters;
      },
      py::arg("cell"), py::arg("input_size"), py::arg("hidden_size"), py::arg("latent_size"),
      py::arg("output_size"), py::arg("num_layers"), py::arg("directions"), py::arg("bias"),
      "[(name, offset in elements, shape)] of a module's parameters in its flat buffer.");
  m.def(
      "kept_columns",
      [](const std::string& cell, int64_t hidden_size, int64_t latent_size, bool noise) {
        const fusedrnn::Cell& named = cell_named(cell);
        return fusedrnn::kept_columns(noise ? named : fusedrnn::without_noise(named),
                                      {0, hidden_size, latent_size, 0});
      },
      py::arg("cell"), py::arg("hidden_size"), py::arg("latent_size"), py::arg("noise"),
      "Numbers per step and batch entry that are kept for backward without recompute.");
  m.def(
      "states",
      [](const std::string& cell, int64_t seq_len, int64_t batch, int64_t chunk_size, bool cuda) {
        const auto& plan = cuda ? fusedrnn::kGpuChunks : fusedrnn::kCpuChunks;
        const int64_t chunk = plan.length(chunk_size, seq_len, batch);
        return fusedrnn::has_state(cell_named(cell)) ? (seq_len + chunk - 1) / chunk : 0;
      },
      py::arg("cell"), py::arg("seq_len"), py::arg("batch"), py::arg("chunk_size"), py::arg("cuda"),
      "How many states of a sequence are saved for backward beside the output.");
  m.def(
      "chunk_length",
      [](int64_t requested, int64_t seq_len, int64_t batch, bool cuda) {
        const auto& plan = cuda ? fusedrnn::kGpuChunks : fusedrnn::kCpuChunks;
        return plan.length(requested, seq_len, batch);
      },
      py::arg("requested"), py::arg("seq_len"), py::arg("batch"), py::arg("cuda") = false,
      "Steps per chunk of workspace; requested = 0 is automatic.");
}
