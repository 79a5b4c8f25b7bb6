#include <nanobind/nanobind.h>

#include "mla/error.hpp"
#include "ranks.hpp"
#include "stream.hpp"

namespace {

namespace nb = nanobind;

// Later translators are asked first, so the base comes first.
void bind_errors(nb::module_& m) {
  const nb::exception<mla::Error> base(m, "Error", PyExc_RuntimeError);
  nb::exception<mla::ShapeError>(m, "ShapeError", base);
  nb::exception<mla::UnsupportedError>(m, "UnsupportedError", base);
  nb::exception<mla::BatchError>(m, "BatchError", base);
  nb::exception<mla::CheckpointError>(m, "CheckpointError", base);
  nb::exception<mla::InputError>(m, "InputError", base);
  nb::exception<mla::OutOfPages>(m, "OutOfPages", base);
  const nb::exception<mla::DeviceError> device(m, "DeviceError", base);
  mla::python::bind_rank_error(m, device);
}

}  // namespace

NB_MODULE(_mla, m) {
  m.doc() = "libmla's C++ interface; the package mla is its public form.";
  m.attr("VERSION") = MLA_VERSION;
  bind_errors(m);
  mla::python::bind_stream(m);
  mla::python::bind_model(m);
  mla::python::bind_cache(m);
  mla::python::bind_ranks(m);
  mla::python::bind_step(m);
  mla::python::bind_flash_mla(m);
  mla::python::bind_flash_attn(m);
}
