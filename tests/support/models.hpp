// Small models with every feature of the large ones, for tests.
#pragma once

#include "mla/model.hpp"

namespace mla::test {

/// DeepSeek-shaped at the tuned 512/64/128 dims, few heads.
inline ModelConfig small_deepseek() {
  ModelConfig m;
  m.name = "small-deepseek";
  m.hidden = 96;
  m.layers = 2;
  m.heads = 3;
  m.query_latent = 48;
  m.latent = 512;
  m.nope = 128;
  m.rope = 64;
  m.value = 128;
  m.rotary.scaling = RopeConfig::Scaling::yarn;
  m.rotary.factor = 40;
  m.rotary.mscale_all_dim = 1.0;
  return m;
}

/// The same with an indexer in its first layer, whose choice the second shares.
inline ModelConfig small_sparse() {
  ModelConfig m = small_deepseek();
  m.name = "small-sparse";
  m.indexer = IndexerConfig{.heads = 4, .dim = 128, .topk = 24, .full = {1, 0}};
  return m;
}

/// No rope at all, no query latent, odd dims.
inline ModelConfig odd_nope() {
  ModelConfig m;
  m.name = "odd-nope";
  m.hidden = 33;
  m.layers = 1;
  m.heads = 5;
  m.latent = 36;
  m.nope = 17;
  m.rope = 0;
  m.value = 11;
  m.rotary.rotate = false;
  return m;
}

}  // namespace mla::test
