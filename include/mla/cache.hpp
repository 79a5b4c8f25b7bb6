// The paged latent KV cache: one row per token, shared by all heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "mla/device.hpp"
#include "mla/dtype.hpp"
#include "mla/model.hpp"
#include "mla/view.hpp"

namespace mla {

enum class CacheFormat : uint8_t { f32, bf16, f16, fp8, fp8_ds_mla, fp8_ds_v4 };

std::span<const CacheFormat> cache_formats();
std::string_view to_string(CacheFormat f);
/// InputError listing the names when there is no such format.
CacheFormat parse_cache_format(std::string_view name);

/// What a cache holds. Shape [pages, page_size, row], one KV head; slot = page * page_size + offset.
struct CacheSpec {
  CacheFormat format = CacheFormat::bf16;
  int64_t latent = 512;
  int64_t rope = 64;
  int64_t page_size = 64;  ///< tokens a page, >= 1
  float k_scale = 1.0f;    ///< fp8 only: stored = x / k_scale
  /// fp8_ds_mla writer: scales are powers of two (true), or max(amax / 448, FLT_MIN) (false). Readers take any.
  bool power_of_two_scales = true;

  int64_t entry() const { return latent + rope; }
  /// Elements of a dequantised row that are the value: the latent, or the whole row for fp8_ds_v4.
  int64_t value_width() const;
  size_t page_bytes() const;
  double token_bytes() const { return static_cast<double>(page_bytes()) / static_cast<double>(page_size); }
  /// UnsupportedError when the format cannot hold these dimensions; ShapeError for an impossible number.
  void validate() const;
};
CacheSpec cache_spec(const ModelConfig& model, CacheFormat format, int64_t page_size = 64);

/// A cache's memory, not owned. Pages follow one another at page_stride bytes.
struct CacheView {
  CacheSpec spec;
  std::byte* data = nullptr;
  int64_t pages = 0;
  size_t page_stride = 0;
  std::byte* page(int64_t index) const { return data + static_cast<size_t>(index) * page_stride; }
};

/// A cache that owns its memory.
class Cache {
 public:
  Cache() = default;
  Cache(const CacheSpec& spec, int64_t pages, Device device = {});
  CacheView view() const { return {spec_, buffer_.data(), pages_, spec_.page_bytes()}; }
  const CacheSpec& spec() const { return spec_; }
  int64_t pages() const { return pages_; }
  /// Buffer::place() in turn: a request's pages may be any, and any worker may read them.
  void place(ThreadPool& pool) const { buffer_.place(pool, Placement::in_turn); }

 private:
  CacheSpec spec_;
  int64_t pages_ = 0;
  Buffer buffer_;
};

}  // namespace mla
