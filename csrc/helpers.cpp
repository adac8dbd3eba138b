// What Python asks of C++ without tensors: the layout of the flat weight buffer, and how the
// package was built.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "layout.h"
#include "plan.h"

namespace py = pybind11;

static const fusedrnn::Cell& cell_named(const std::string& name) {
  const fusedrnn::Cell* cell = fusedrnn::find_cell(name.c_str());
  if (cell == nullptr) throw py::value_error("fusedrnn: there is no cell " + name);
  return *cell;
}

PYBIND11_MODULE(_helpers, m) {
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
