// The paged cache of the sparse indexer's keys: one key per token, shared by all index heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "mla/cache.hpp"
#include "mla/device.hpp"

namespace mla {

enum class IndexCacheFormat : uint8_t { f32, bf16, fp8 };

std::span<const IndexCacheFormat> index_cache_formats();
std::string_view to_string(IndexCacheFormat f);
/// InputError listing the names when there is no such format.
IndexCacheFormat parse_index_cache_format(std::string_view name);

/// What index scores are sums of, where keys and queries are both fp8.
///   exact  products that lose nothing, summed in f32: a score's error is that of f32 sums.
///   fp8    the same operands; sums may lose what Hopper's e4m3 products lose: each 32 products and the sum before them
///          are cut off 13 bits below the largest, which moves scores by some 1e-4 of their root mean square
///          (docs/numerics.md). Hopper GPUs are up to twice as fast then. Where there is no such kernel, exact products
///          serve: f32 and bf16 keys or queries, CPUs, other GPUs, more than 128 heads, another key than of 128
///          numbers, pages that are no multiple of 16 tokens.
enum class IndexArithmetic : uint8_t { exact, fp8 };

std::string_view to_string(IndexArithmetic a);
/// InputError listing the names when there is no such arithmetic.
IndexArithmetic parse_index_arithmetic(std::string_view name);

/// What an index cache holds. slot = page * page_size + offset, as in the latent cache; a page of fp8 keeps its tokens'
/// codes together and their f32 scales behind them (132 bytes a token of 128).
struct IndexCacheSpec {
  IndexCacheFormat format = IndexCacheFormat::fp8;
  int64_t dim = 128;
  int64_t page_size = 64;  ///< tokens a page, >= 1
  /// fp8 writer: scale = max(amax, 1e-4) / 448, rounded up to a power of two (true) or not. Readers take any.
  bool power_of_two_scales = true;

  size_t page_bytes() const;
  double token_bytes() const { return static_cast<double>(page_bytes()) / static_cast<double>(page_size); }
  /// ShapeError for an impossible number.
  void validate() const;
};

/// For a model with an indexer, page for page beside a cache of this spec. UnsupportedError for a model without one.
IndexCacheSpec index_cache_spec(const ModelConfig& model, const CacheSpec& cache, IndexCacheFormat format);

/// An index cache's memory, not owned. Pages follow one another at page_stride bytes.
struct IndexCacheView {
  IndexCacheSpec spec;
  std::byte* data = nullptr;
  int64_t pages = 0;
  size_t page_stride = 0;
  std::byte* page(int64_t index) const { return data + static_cast<size_t>(index) * page_stride; }
};

/// An index cache that owns its memory.
class IndexCache {
 public:
  IndexCache() = default;
  IndexCache(const IndexCacheSpec& spec, int64_t pages, Device device = {});
  IndexCacheView view() const { return {spec_, buffer_.data(), pages_, spec_.page_bytes()}; }
  const IndexCacheSpec& spec() const { return spec_; }
  int64_t pages() const { return pages_; }
  /// As Cache::place().
  void place(ThreadPool& pool) const { buffer_.place(pool, Placement::in_turn); }

 private:
  IndexCacheSpec spec_;
  int64_t pages_ = 0;
  Buffer buffer_;
};

}  // namespace mla
