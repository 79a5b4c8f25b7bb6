#include "call.hpp"

namespace capi {

Bytes scratch(mla_stream* stream) {
  mla_scratch_shape shape = make<mla_scratch_shape>();
  shape.heads = 8;
  shape.latent = 512;
  shape.rope = 64;
  shape.nope = 128;
  shape.value = 128;
  shape.hidden = 512;
  shape.index_heads = 8;
  shape.index_dim = 128;
  size_t bytes = 0;
  EXPECT_OK(mla_scratch_bytes(stream, &shape, &bytes));
  return Bytes(bytes);
}

void make_model(mla_model** model) {
  mla_model_fields f = mla_model_fields_default();
  f.name = "small";
  f.hidden = 96;
  f.layers = 2;
  f.heads = 4;
  f.query_latent = 48;
  f.latent = 128;
  f.nope = 32;
  f.rope = 16;
  f.value = 64;
  f.indexer_heads = 4;
  f.indexer_dim = 32;
  f.indexer_topk = 16;
  EXPECT_OK(mla_model_create(&f, model));
}

}  // namespace capi
