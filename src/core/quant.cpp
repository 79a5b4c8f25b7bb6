#include "mla/quant.hpp"

#include <cmath>
#include <vector>

#include "mla/error.hpp"

namespace mla {
namespace {

int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }

// Rows from one column of column-major scales to the next.
int64_t column_rows(ScaleLayout layout, int64_t tokens) {
  return layout == ScaleLayout::tma_aligned ? ceil_div(tokens, 4) * 4 : tokens;
}

}  // namespace

int64_t OutputSpec::group_size() const {
  switch (kind) {
    case OutputKind::none:
    case OutputKind::fp8: break;
    case OutputKind::fp8_groups: return group;
    case OutputKind::nvfp4: return 16;
    case OutputKind::mxfp4: return 32;
  }
  return 0;
}

int64_t OutputSpec::groups(int64_t width) const { return group_size() == 0 ? 0 : ceil_div(width, group_size()); }

int64_t OutputSpec::row_bytes(int64_t width) const {
  switch (kind) {
    case OutputKind::none: return width * 4;
    case OutputKind::nvfp4:
    case OutputKind::mxfp4: return ceil_div(width, 2);
    case OutputKind::fp8:
    case OutputKind::fp8_groups: break;
  }
  return width;
}

int64_t OutputSpec::scale_bytes(int64_t tokens, int64_t width) const {
  if (is_e2m1()) return ceil_div(tokens, 128) * ceil_div(groups(width), 4) * 512;
  if (kind != OutputKind::fp8_groups) return 0;
  const int64_t columns = form == ScaleForm::packed_ue8m0 ? ceil_div(groups(width), 4) : groups(width);
  return column_rows(layout, tokens) * columns * 4;
}

int64_t OutputSpec::scale_offset(int64_t tokens, int64_t width, int64_t row, int64_t at) const {
  if (is_e2m1())
    return ((row / 128) * ceil_div(groups(width), 4) + at / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + at % 4;
  if (form == ScaleForm::packed_ue8m0) return (at / 4 * column_rows(layout, tokens) + row) * 4 + at % 4;
  if (layout == ScaleLayout::row_major) return (row * groups(width) + at) * 4;
  return (at * column_rows(layout, tokens) + row) * 4;
}

bool OutputSpec::same_format(const OutputSpec& o) const {
  return kind == o.kind &&
         (kind != OutputKind::fp8_groups || (group == o.group && form == o.form && layout == o.layout));
}

void OutputSpec::validate() const {
  auto positive = [](const char* what, float x) {
    if (!(x > 0) || !std::isfinite(x))
      throw ShapeError(std::string("output: ") + what + " is " + std::to_string(x) + ", must be finite and above 0");
  };
  if (kind == OutputKind::fp8) positive("scale", scale);
  if (kind == OutputKind::nvfp4) positive("global_scale", global_scale);
  if (kind != OutputKind::fp8_groups) return;
  if (group != 64 && group != 128)
    throw UnsupportedError("output: group is " + std::to_string(group) + "; 64 and 128 are supported");
  if (form == ScaleForm::packed_ue8m0 && layout != ScaleLayout::tma_aligned)
    throw UnsupportedError(std::string("output: packed ue8m0 scales are ") +
                           (layout == ScaleLayout::row_major ? "row-major" : "column-major") +
                           "; tma_aligned is supported");
}

std::string to_string(const OutputSpec& spec) {
  switch (spec.kind) {
    case OutputKind::none: return "none";
    case OutputKind::fp8: return "fp8";
    case OutputKind::nvfp4: return "nvfp4";
    case OutputKind::mxfp4: return "mxfp4";
    case OutputKind::fp8_groups: break;
  }
  std::string name = "fp8_" + std::to_string(spec.group);
  if (spec.form == ScaleForm::packed_ue8m0) return name + "_packed";
  if (spec.form == ScaleForm::power_of_two) name += "_ue8m0";
  if (spec.layout == ScaleLayout::column_major) name += "_column";
  if (spec.layout == ScaleLayout::tma_aligned) name += "_tma";
  return name;
}

std::span<const OutputSpec> output_specs() {
  static const std::vector<OutputSpec> all = [] {
    std::vector<OutputSpec> specs{{.kind = OutputKind::none}, {.kind = OutputKind::fp8}};
    for (int64_t group : {128, 64}) {
      for (ScaleForm form : {ScaleForm::f32, ScaleForm::power_of_two})
        for (ScaleLayout layout : {ScaleLayout::row_major, ScaleLayout::column_major, ScaleLayout::tma_aligned})
          specs.push_back({.kind = OutputKind::fp8_groups, .group = group, .form = form, .layout = layout});
      specs.push_back({.kind = OutputKind::fp8_groups,
                       .group = group,
                       .form = ScaleForm::packed_ue8m0,
                       .layout = ScaleLayout::tma_aligned});
    }
    specs.push_back({.kind = OutputKind::nvfp4});
    specs.push_back({.kind = OutputKind::mxfp4});
    return specs;
  }();
  return all;
}

OutputSpec parse_output_spec(std::string_view name) {
  std::string known;
  for (const OutputSpec& spec : output_specs()) {
    if (to_string(spec) == name) return spec;
    known += " " + to_string(spec);
  }
  throw InputError("unknown output '" + std::string(name) + "'; known:" + known);
}

}  // namespace mla
