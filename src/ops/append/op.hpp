// append: writes new tokens' rows into the cache. slots[t] = page * page_size + offset; a negative slot writes nothing.
// The number of tokens is slots.size(); kv_c and k_pe may have more rows (padding), which are not read.
#pragma once

#include <span>
#include <utility>

#include "mla/cache.hpp"
#include "mla/index_cache.hpp"
#include "mla/rotary.hpp"
#include "mla/view.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"
#include "ops/norm/op.hpp"

namespace mla::ops {

struct AppendArgs {
  AnyView<Token, Latent> kv_c;  ///< f32 or bf16, on the CPU f16 too
  AnyView<Token, Rope> k_pe;    ///< dtype of kv_c, already rotated
  List<int32_t> slots;
  CacheView cache;
};

/// Where rotated queries go: row r of `q` is token tokens[r]'s, or token r's where none are named. Empty (null): they
/// stay in their place. As many rows as are named, or as there are slots.
struct PlacedQueries {
  AnyMutableView<Token, Head, Rope> q;  ///< dtype of the queries, apart from them
  List<int32_t> tokens;
};

/// rope and append in one pass: rotates q_pe and k_pe in place and writes [kv_c | k_pe]. Rows with a negative slot are
/// rotated all the same.
struct RopeAppendArgs {
  AnyMutableView<Token, Head, Rope> q_pe;  ///< f32 or bf16
  AnyView<Token, Latent> kv_c;             ///< dtype of q_pe
  AnyMutableView<Token, Rope> k_pe;        ///< dtype of q_pe
  List<int32_t> positions;
  const RotaryTable* table = nullptr;
  List<int32_t> slots;
  CacheView cache;
  PlacedQueries placed = {};  ///< q_pe is then only read

  int64_t query_rows() const {
    return static_cast<int64_t>(placed.q && !placed.tokens.empty() ? placed.tokens.size() : slots.size());
  }
};

/// norm of kv_c in place, then rope_append, in one pass: the bits of the two. Rows with a negative slot are normed and
/// rotated all the same.
struct NormRopeAppendArgs {
  AnyMutableView<Token, Head, Rope> q_pe;  ///< f32 or bf16
  AnyMutableView<Token, Latent> kv_c;      ///< dtype of q_pe
  AnyMutableView<Token, Rope> k_pe;        ///< dtype of q_pe
  std::span<const float> weight;           ///< [Latent]
  double eps = 1e-6;
  List<int32_t> positions;
  const RotaryTable* table = nullptr;
  List<int32_t> slots;
  CacheView cache;
  PlacedQueries placed = {};

  /// The two, one after the other.
  NormArgs norm() const {
    const AnyMutableView<Token, In> rows(kv_c.dtype(), kv_c.data(),
                                         {static_cast<int64_t>(slots.size()), kv_c.extent<Latent>()}, kv_c.strides());
    return {.x = rows, .weight = weight, .eps = eps, .y = rows};
  }
  RopeAppendArgs rope_append() const { return {q_pe, kv_c, k_pe, positions, table, slots, cache, placed}; }
};

struct PageCopy {
  int32_t from = 0, to = 0;
};
/// Any cache's pages as bytes.
struct PageBytes {
  std::byte* data = nullptr;
  int64_t pages = 0;
  size_t page_stride = 0, page_bytes = 0;

  PageBytes() = default;
  PageBytes(const CacheView& c) : PageBytes{c.data, c.pages, c.page_stride, c.spec.page_bytes()} {}
  PageBytes(const IndexCacheView& c) : PageBytes{c.data, c.pages, c.page_stride, c.spec.page_bytes()} {}
  std::byte* page(int64_t index) const { return data + static_cast<size_t>(index) * page_stride; }

 private:
  PageBytes(std::byte* d, int64_t n, size_t stride, size_t bytes)
      : data(d), pages(n), page_stride(stride), page_bytes(bytes) {}
};
/// Copies whole pages within a cache, of latent rows or of index keys (copy on write).
struct CopyPagesArgs {
  PageBytes cache;
  List<PageCopy> copies;
};

void check(const AppendArgs& a);
void check(const RopeAppendArgs& a);
void check(const NormRopeAppendArgs& a);
void check(const CopyPagesArgs& a);
Cost cost(const AppendArgs& a);
Cost cost(const RopeAppendArgs& a);
Cost cost(const NormRopeAppendArgs& a);
Cost cost(const CopyPagesArgs& a);
/// One token at a time through the format's portable codec, straight from the definition.
void reference(const AppendArgs& a);

}  // namespace mla::ops
