// Hidden states without a model: a pure function of (seed, block identity, position), so equal prefixes give equal
// cache rows.
#pragma once

#include <cstdint>
#include <span>

#include "serve/trace.hpp"

namespace mla::serve {

/// splitmix64's finaliser.
constexpr uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/// Identity of a sequence's token: of its prompt block, or, for generated tokens, of the request alone.
uint64_t token_key(const Trace& trace, int64_t request, int64_t position);

/// Fills a row with roughly normal numbers of unit variance, each exact in bf16.
void hidden_row(uint64_t seed, uint64_t key, int64_t position, std::span<float> row);

}  // namespace mla::serve
