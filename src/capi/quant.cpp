#include "capi/objects.hpp"
#include "capi/tensor.hpp"

using namespace mla;
using namespace mla::capi;

static_assert(static_cast<int>(OutputKind::mxfp4) == MLA_OUTPUT_MXFP4 &&
              static_cast<int>(OutputKind::nvfp4) == MLA_OUTPUT_NVFP4 &&
              static_cast<int>(OutputKind::fp8) == MLA_OUTPUT_FP8 &&
              static_cast<int>(OutputKind::fp8_groups) == MLA_OUTPUT_FP8_GROUPS);
static_assert(static_cast<int>(ScaleForm::packed_ue8m0) == MLA_SCALES_PACKED_UE8M0 &&
              static_cast<int>(ScaleForm::power_of_two) == MLA_SCALES_POWER_OF_TWO);
static_assert(static_cast<int>(ScaleLayout::tma_aligned) == MLA_LAYOUT_TMA_ALIGNED &&
              static_cast<int>(ScaleLayout::column_major) == MLA_LAYOUT_COLUMN_MAJOR);

namespace {

constexpr int64_t kMostRows = int64_t{1} << 31, kMostWidth = int64_t{1} << 24;

OutputSpec quantised_spec(const mla_output_spec* spec) {
  const OutputSpec s = read_output_spec("spec", spec);
  if (s.kind == OutputKind::none) throw InputError("spec kind is 0: not quantised");
  return s;
}

}  // namespace

OutputSpec mla::capi::read_output_spec(const char* name, const mla_output_spec* spec) {
  const mla_output_spec s = read_struct(name, spec, mla_output_spec_default());
  const auto field = [&](const char* f) { return std::string(name) + " " + f; };
  const OutputSpec out{.kind = read_enum(field("kind").c_str(), s.kind, OutputKind::mxfp4),
                       .group = s.group,
                       .form = read_enum(field("form").c_str(), s.form, ScaleForm::packed_ue8m0),
                       .layout = read_enum(field("layout").c_str(), s.layout, ScaleLayout::tma_aligned),
                       .scale = s.scale,
                       .global_scale = s.global_scale};
  out.validate();
  return out;
}

QuantizedView mla::capi::read_quantized(const char* name, const mla_quantized* q, Device device) {
  const mla_quantized a = read_struct(name, q);
  const auto field = [&](const char* f) { return std::string(name) + " " + f; };
  const Tensors tensors(device);
  QuantizedView out{.spec = read_output_spec(field("spec").c_str(), a.spec),
                    .width = read_range(field("width").c_str(), a.width, 0, kMostWidth)};
  if (!out) throw InputError(field("spec kind") + " is 0: not quantised");
  const std::string codes_name = field("codes"), scales_name = field("scales");
  const Checked codes =
      tensors.check(codes_name.c_str(), a.codes, {Element::u8, Element::fp8_e4m3}, {"Token", "Byte"}, true);
  const int64_t row = out.spec.row_bytes(out.width);
  if (codes.extents[1] != row)
    throw ShapeError(codes_name + " Byte is " + std::to_string(codes.extents[1]) + ", a row of " + to_string(out.spec) +
                     " takes " + std::to_string(row));
  if (codes.extents[1] > 1 && codes.strides[1] != 1)
    throw ShapeError(codes_name + " Byte has stride " + std::to_string(codes.strides[1]) + ", 1 is needed");
  out.tokens = codes.extents[0];
  if (out.tokens > kMostRows)
    throw ShapeError(codes_name + " Token is " + std::to_string(out.tokens) + ", allowed up to 2^31");
  out.data = static_cast<std::byte*>(codes.data);
  out.row_stride = out.tokens > 1 ? codes.strides[0] : row;  // one row's stride means nothing
  const int64_t scale_bytes = out.spec.scale_bytes(out.tokens, out.width);
  if (scale_bytes == 0) return out;
  const std::span<uint8_t> scales = tensors.list<uint8_t, Group>(scales_name.c_str(), a.scales, true);
  if (static_cast<int64_t>(scales.size()) < scale_bytes)
    throw ShapeError(scales_name + " has " + std::to_string(scales.size()) + " bytes, " + std::to_string(scale_bytes) +
                     " are needed");
  out.scales = reinterpret_cast<std::byte*>(scales.data());
  return out;
}

mla_status mla_output_bytes(const mla_output_spec* spec, int64_t tokens, int64_t width, int64_t* row_bytes,
                            int64_t* scale_bytes) {
  return guarded("mla_output_bytes", [&] {
    const OutputSpec s = quantised_spec(spec);
    read_range("tokens", tokens, 0, kMostRows);
    read_range("width", width, 0, kMostWidth);
    required("row_bytes", row_bytes) = s.row_bytes(width);
    required("scale_bytes", scale_bytes) = s.scale_bytes(tokens, width);
  });
}

mla_status mla_output_scale_offset(const mla_output_spec* spec, int64_t tokens, int64_t width, int64_t row,
                                   int64_t group, int64_t* offset) {
  return guarded("mla_output_scale_offset", [&] {
    const OutputSpec s = quantised_spec(spec);
    if (s.kind == OutputKind::fp8) throw InputError("spec kind is 1: fp8 has one scale, which is not stored");
    read_range("tokens", tokens, 0, kMostRows);
    read_range("width", width, 0, kMostWidth);
    read_range("row", row, 0, tokens - 1);
    read_range("group", group, 0, s.groups(width) - 1);
    required("offset", offset) = s.scale_offset(tokens, width, row, group);
  });
}

mla_status mla_calc_kv_scales(const DLTensor* q, const DLTensor* kv_c, float q_divisor, float k_divisor,
                              float v_divisor, mla_kv_scales* scales) {
  return guarded("mla_calc_kv_scales", [&] {
    const Tensors host(Device{});
    const KvScaleConstants usual;
    const auto divisor = [](float given, float otherwise) { return given == 0.0f ? otherwise : given; };
    const KvScales s = calc_kv_scales(
        host.read_as<float, Token, Head, QueryKey>("q", q), host.read_as<float, Token, Latent>("kv_c", kv_c),
        {divisor(q_divisor, usual.q), divisor(k_divisor, usual.k), divisor(v_divisor, usual.v)});
    write_struct("scales", scales, mla_kv_scales{sizeof(mla_kv_scales), s.q_scale, s.k_scale, s.v_scale, 0.0f});
  });
}
