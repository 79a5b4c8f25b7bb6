#include "capi/op.hpp"

using namespace mla;
using namespace mla::capi;

mla_status mla_scratch_bytes(const mla_stream* stream, const mla_scratch_shape* shape, size_t* bytes) {
  return guarded("mla_scratch_bytes", [&] {
    const auto s = get("stream", stream);
    const mla_scratch_shape d = read_struct("shape", shape);
    for (int64_t n :
         {d.heads, d.latent, d.rope, d.nope, d.value, d.hidden, d.query_latent, d.index_heads, d.index_dim, d.topk})
      if (n < 0 || n > (1 << 20))
        throw ShapeError("shape has a dimension of " + std::to_string(n) + ", allowed 0 to 2^20");
    required("bytes", bytes) =
        static_cast<size_t>(s->stream->workers()) * backend::backend(s->stream->device())
                                                        .scratch_per_worker({.heads = d.heads,
                                                                             .latent = d.latent,
                                                                             .rope = d.rope,
                                                                             .nope = d.nope,
                                                                             .value = d.value,
                                                                             .hidden = d.hidden,
                                                                             .query_latent = d.query_latent,
                                                                             .index_heads = d.index_heads,
                                                                             .index_dim = d.index_dim,
                                                                             .topk = d.topk});
  });
}

mla_status mla_norm(mla_stream* stream, const mla_norm_args* args) {
  return op("mla_norm", stream, args, [](const OpCall& c, const mla_norm_args& a) {
    c.run(ops::NormArgs{.x = c.tensors.read<Token, In>("x", a.x, c.rows()),
                        .weight = c.tensors.list<const float, In>("weight", a.weight),
                        .eps = a.eps,
                        .y = c.tensors.write<Token, In>("y", a.y, c.rows())});
  });
}

mla_status mla_layer_norm(mla_stream* stream, const mla_layer_norm_args* args) {
  return op("mla_layer_norm", stream, args, [](const OpCall& c, const mla_layer_norm_args& a) {
    c.run(ops::LayerNormArgs{.x = c.tensors.read_as<float, Token, In>("x", a.x),
                             .weight = c.tensors.list<const float, In>("weight", a.weight),
                             .bias = c.tensors.list<const float, In>("bias", a.bias),
                             .eps = a.eps,
                             .y = c.tensors.write_as<float, Token, In>("y", a.y)});
  });
}

mla_status mla_rope(mla_stream* stream, const mla_rope_args* args) {
  return op("mla_rope", stream, args, [](const OpCall& c, const mla_rope_args& a) {
    const auto table = c.table(a.table);
    c.run(ops::RopeArgs{.q = c.tensors.write_optional<Token, Head, Rope>("q", a.q, c.rows()),
                        .k = c.tensors.write_optional<Token, Rope>("k", a.k, c.rows()),
                        .positions = read_list("positions", a.positions, a.positions_count),
                        .table = &table->table});
  });
}

mla_status mla_cast(mla_stream* stream, const mla_cast_args* args) {
  return op("mla_cast", stream, args, [](const OpCall& c, const mla_cast_args& a) {
    c.run(ops::CastArgs{
        .x = c.tensors.read<Token, Head, In>("x", a.x, c.rows()),
        .x_rows = read_list("x_rows", a.x_rows, a.x_rows_count),
        .y = c.tensors.write<Token, Head, In>("y", a.y, {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3}),
        .scale = a.scale});
  });
}

mla_status mla_project(mla_stream* stream, const mla_project_args* args) {
  return op("mla_project", stream, args, [](const OpCall& c, const mla_project_args& a) {
    const auto weights = c.linear(a.weights);
    ops::ProjectArgs p{.x = c.tensors.read<Token, Head, In>("x", a.x, {Dtype::f32, Dtype::bf16}),
                       .x_rows = read_list("x_rows", a.x_rows, a.x_rows_count),
                       .weights = weights->linear.get(),
                       .y_rows = read_list("y_rows", a.y_rows, a.y_rows_count),
                       .rows = a.rows,
                       .batch_invariant = read_flag("batch_invariant", a.batch_invariant),
                       .activations = read_enum("activations", a.activations, Activations::fp8_128),
                       .scratch = c.scratch(a.scratch, a.scratch_bytes)};
    if (a.quantized) p.quantized = read_quantized("quantized", a.quantized, c.device());
    else p.y = c.tensors.write<Token, Head, Out>("y", a.y, {Dtype::f32, Dtype::bf16});
    c.run(p);
  });
}

mla_status mla_quantize(mla_stream* stream, const mla_quantize_args* args) {
  return op("mla_quantize", stream, args, [](const OpCall& c, const mla_quantize_args& a) {
    c.run(ops::QuantizeArgs{.x = c.tensors.read<Token, HeadValue>("x", a.x, {Dtype::f32, Dtype::bf16}),
                            .y = read_quantized("y", a.y, c.device())});
  });
}

mla_status mla_quantize_padding(mla_stream* stream, const mla_quantize_padding_args* args) {
  return op("mla_quantize_padding", stream, args, [](const OpCall& c, const mla_quantize_padding_args& a) {
    c.run(ops::QuantizePaddingArgs{.y = read_quantized("y", a.y, c.device()), .rows = a.rows});
  });
}

mla_status mla_hadamard(mla_stream* stream, const mla_hadamard_args* args) {
  return op("mla_hadamard", stream, args, [](const OpCall& c, const mla_hadamard_args& a) {
    c.run(ops::HadamardArgs{.q = c.tensors.write_optional_as<float, Token, IndexHead, IndexDim>("q", a.q),
                            .k = c.tensors.write_optional_as<float, Token, IndexDim>("k", a.k)});
  });
}
