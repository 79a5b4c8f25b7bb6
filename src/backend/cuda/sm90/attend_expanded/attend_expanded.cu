// Multi-head attention with k_nope and k_pe as two operands: its contract, and calls without masks.
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "backend/cuda/sm90/attend_expanded/attend_expanded.hpp"
#include "backend/cuda/sm90/attend_expanded/launch.cuh"

namespace mla::cuda::sm90 {
namespace {

using expanded::op;

template <class D, class V>
void require(const char* name, const V& view, int64_t expected, const char* as) {
  const int64_t got = view.template extent<D>();
  if (got != expected)
    throw ShapeError(std::string(op) + ": " + name + " " + std::string(D::name) + " is " + std::to_string(got) + ", " +
                     as + " has " + std::to_string(expected));
}

template <class D, class V>
void require_dense(const char* name, const V& view) {
  if (view.template stride<D>() != 1)
    throw ShapeError(std::string(op) + ": " + name + " " + std::string(D::name) + " has stride " +
                     std::to_string(view.template stride<D>()) + ", it must be dense");
}

void check_args(const AttendExpandedArgs& a) {
  const int64_t heads = a.q.extent<Head>(), keys = a.k_nope.extent<Key>(), tokens = a.q.extent<Token>();
  require<Head>("k_nope", a.k_nope, heads, "q");
  require<Head>("v", a.v, heads, "q");
  require<Head>("out", a.out, heads, "q");
  require<Token>("out", a.out, tokens, "q");
  if (a.lse) {
    require<Head>("lse", a.lse, heads, "q");
    require<Token>("lse", a.lse, tokens, "q");
  }
  require<Key>("k_pe", a.k_pe, keys, "k_nope");
  require<Key>("v", a.v, keys, "k_nope");
  require<Value>("out", a.out, a.v.extent<Value>(), "v");
  require<QueryKey>("q", a.q, a.k_nope.extent<Nope>() + a.k_pe.extent<Rope>(), "[k_nope | k_pe]");
  require_dense<QueryKey>("q", a.q);
  require_dense<Nope>("k_nope", a.k_nope);
  require_dense<Rope>("k_pe", a.k_pe);
  require_dense<Value>("v", a.v);
  require_dense<Value>("out", a.out);
  const Dtype dtype = a.q.dtype(), out_dtype = a.out.dtype();
  if (dtype != Dtype::bf16 && dtype != Dtype::f16)
    throw UnsupportedError(std::string(op) + ": q is " + std::string(to_string(dtype)) +
                           "; this kernel takes bf16 and f16");
  for (const auto& [name, got] : {std::pair{"k_nope", a.k_nope.dtype()}, {"k_pe", a.k_pe.dtype()}, {"v", a.v.dtype()}})
    if (got != dtype)
      throw ShapeError(std::string(op) + ": " + name + " is " + std::string(to_string(got)) + ", q is " +
                       std::string(to_string(dtype)));
  if (out_dtype != Dtype::bf16 && out_dtype != Dtype::f16 && out_dtype != Dtype::f32)
    throw UnsupportedError(std::string(op) + ": out is " + std::string(to_string(out_dtype)) +
                           "; this kernel writes bf16, f16 and f32");
  const int64_t size = static_cast<int64_t>(size_of(out_dtype));
  if (reinterpret_cast<uintptr_t>(a.out.data()) % 16 != 0 || a.out.stride<Token>() * size % 16 != 0 ||
      a.out.stride<Head>() * size % 16 != 0)
    throw ShapeError(std::string(op) + ": out rows are not aligned to 16 bytes");
  if (a.accumulate && !a.lse)
    throw ShapeError(std::string(op) + ": accumulate without lse, which says what part the rows already hold");
  if (a.mask) {
    if (dtype != Dtype::bf16 || out_dtype == Dtype::f16)
      throw UnsupportedError(std::string(op) + ": masks of q of " + std::string(to_string(dtype)) + " and out of " +
                             std::string(to_string(out_dtype)) + "; bf16, and bf16 or f32, are needed");
    if (a.mask.extent<Token>() < tokens)
      throw ShapeError(std::string(op) + ": mask has " + std::to_string(a.mask.extent<Token>()) + " rows, q has " +
                       std::to_string(tokens));
    require_dense<Word>("mask", a.mask);
    if (a.most_masked_keys < 0 || a.most_masked_keys > keys)
      throw ShapeError(std::string(op) + ": most_masked_keys is " + std::to_string(a.most_masked_keys) +
                       ", k_nope Key is " + std::to_string(keys));
    if (masked_columns_bytes(a) >= size_t{8} << 30)
      throw ShapeError(std::string(op) + ": masks of " + std::to_string(tokens) + " tokens and " +
                       std::to_string(a.most_masked_keys > 0 ? a.most_masked_keys : keys) +
                       " keys are more than one launch can number");
    if (!a.columns && a.item_count > 0 && tokens > 0 && heads > 0)
      throw ShapeError(std::string(op) + ": mask without columns");
  }
  if (a.quantized) check_codes(op, a.quantized, out_dtype, tokens, heads, a.v.extent<Value>());
  if (!(a.scale > 0.0f) || !std::isfinite(a.scale))
    throw ShapeError(std::string(op) + ": scale is " + std::to_string(a.scale) + ", it must be finite and above 0");
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (a.item_count < 0 || a.item_count > most / 2)
    throw ShapeError(std::string(op) + ": item_count is " + std::to_string(a.item_count));
  if (a.most_queries < 0 || a.most_queries > tokens)
    throw ShapeError(std::string(op) + ": most_queries is " + std::to_string(a.most_queries) + ", q Token is " +
                     std::to_string(tokens));
  if (tokens > most / 4 || keys > most / 4 || (tokens / 64 + a.item_count) * heads > most / 2)
    throw ShapeError(std::string(op) + ": " + std::to_string(tokens) + " tokens, " + std::to_string(keys) + " keys, " +
                     std::to_string(heads) + " heads, " + std::to_string(a.item_count) +
                     " items are more than one launch can number");
  if (a.item_count > 0 && tokens > 0 && heads > 0 && (!a.items || !a.workspace))
    throw ShapeError(std::string(op) + ": " + (a.items ? "workspace" : "items") + " is null");
}

}  // namespace

size_t masked_columns_bytes(const AttendExpandedArgs& a) {
  constexpr int64_t least = 80,
                    most_rows = 256;  // keys of a block, of either dimensions; rows of a tile, the last one's too
  const int64_t keys = a.most_masked_keys > 0 ? a.most_masked_keys : a.k_nope.extent<Key>();
  return static_cast<size_t>((a.q.extent<Token>() + most_rows) * ((keys + least - 1) / least)) * 16;
}

ExpandedTile attend_expanded_tile(const AttendExpandedArgs& args) {
  if (args.tile != ExpandedTile::automatic || args.item_count <= 0) return args.tile;
  return suitable_tile(op, args.item_count, args.q.extent<Token>(), args.k_nope.extent<Key>(), args.q.extent<Head>());
}

void attend_expanded(cudaStream_t stream, const AttendExpandedArgs& args) {
  check_args(args);
  require_hopper(op);
  if (args.item_count == 0 || args.q.extent<Token>() == 0 || args.q.extent<Head>() == 0) return;
  if (args.mask) return expanded::attend_masked(stream, args);
  if (args.quantized) {
    if (args.q.dtype() != Dtype::bf16)
      throw UnsupportedError(std::string(op) + ": a quantised output of q of " +
                             std::string(to_string(args.q.dtype())) + "; bf16 is needed");
    return expanded::dispatch<__nv_bfloat16, Codes, false>(stream, args);
  }
  const auto to = [&]<class Out>(Out) {
    if (args.q.dtype() == Dtype::bf16) expanded::dispatch<__nv_bfloat16, Out, false>(stream, args);
    else expanded::dispatch<__half, Out, false>(stream, args);
  };
  if (args.out.dtype() == Dtype::f32) to(float());
  else if (args.out.dtype() == Dtype::bf16) to(__nv_bfloat16());
  else to(__half());
}

}  // namespace mla::cuda::sm90
