// Whether modules of torch.nn are as they were, as far as the guards of torch.compile do not look:
// hooks, and what classes hold.  Each call of a user's cell asks.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace fusedrnn {

namespace py = pybind11;

class ModuleGuard {
 public:
  enum Found { kChanged = 1, kHook = 2 };

  // Notes what the classes of a module and of those inside of it are.
  explicit ModuleGuard(const py::object& module) { walk(module.ptr(), versions_); }

  // The sum of what is found.
  int look(const py::object& module) const {
    Versions now;
    now.reserve(versions_.size());
    const bool has_hook = walk(module.ptr(), now);
    const bool is_known =
        std::none_of(now.begin(), now.end(), [](auto& v) { return v.second == 0; });
    return (is_known && now == versions_ ? 0 : kChanged) + (has_hook ? kHook : 0);
  }

 private:
  // Of each class its place, and a number that is another one after each change of it or of a base.
  // No two classes ever have the same, and 0 stands for an unknown one.
  using Versions = std::vector<std::pair<const PyTypeObject*, unsigned>>;

  // Whether a module has a hook.
  static bool walk(PyObject* root, Versions& versions) {
    bool has_hook = false;
    std::vector<PyObject*> seen{root};
    for (size_t i = 0; i < seen.size(); ++i) {
      PyTypeObject* type = Py_TYPE(seen[i]);
      if (versions.empty() || versions.back().first != type) {
        versions.emplace_back(type, version_of(type));
      }
      const py::object own = py::reinterpret_steal<py::object>(attributes_of(seen[i]));
      if (!own) throw py::error_already_set();
      for (PyObject* kind : names().hooks) {
        PyObject* hooks = PyDict_GetItem(own.ptr(), kind);
        has_hook |= hooks != nullptr && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) > 0;
      }
      PyObject* modules = PyDict_GetItem(own.ptr(), names().modules);
      if (modules == nullptr || !PyDict_Check(modules)) continue;
      Py_ssize_t place = 0;
      PyObject *name, *inner;
      while (PyDict_Next(modules, &place, &name, &inner)) {
        if (inner == Py_None) continue;
        if (std::find(seen.begin(), seen.end(), inner) == seen.end()) seen.push_back(inner);
      }
    }
    return has_hook;
  }

  // What attributes are called, as texts of Python that are made once.
  struct Names {
    PyObject* hooks[4];
    PyObject* modules;
  };
  static const Names& names() {
    const auto text = [](const char* name) { return PyUnicode_InternFromString(name); };
    static const Names made{{text("_forward_hooks"), text("_forward_pre_hooks"),
                             text("_backward_hooks"), text("_backward_pre_hooks")},
                            text("_modules")};
    return made;
  }

  static PyObject* attributes_of(PyObject* object) {
    return PyObject_GenericGetDict(object, nullptr);
  }

  static unsigned version_of(PyTypeObject* type) {
    if (!PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG)) {
      // A look into the class gives it a number again.
      PyObject* found = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__call__");
      if (found == nullptr) PyErr_Clear();
      Py_XDECREF(found);
    }
    return PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0;
  }

  Versions versions_;
};

}  // namespace fusedrnn
