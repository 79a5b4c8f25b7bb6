// A path as an argument: str or os.PathLike. nanobind's own conversion makes a std::filesystem::path where nothing may
// be thrown, and ends the process when there is no memory for it; this one holds Python's bytes until the function
// runs.
#pragma once

#include <nanobind/nanobind.h>

#include <filesystem>

namespace mla::python {

struct PyPath {
  nanobind::object bytes;  ///< in the file system's encoding, without NUL

  std::filesystem::path path() const { return PyBytes_AS_STRING(bytes.ptr()); }
};

}  // namespace mla::python

namespace nanobind::detail {

template <>
struct type_caster<mla::python::PyPath> {
  NB_TYPE_CASTER(mla::python::PyPath, const_name("str | os.PathLike"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    PyObject* bytes = nullptr;
    if (!PyUnicode_FSConverter(source.ptr(), &bytes)) {
      PyErr_Clear();
      return false;
    }
    value.bytes = steal(bytes);
    return true;
  }
};

}  // namespace nanobind::detail
