#include "mla/index_cache.hpp"

#include <array>
#include <limits>
#include <string>

#include "cache/index/codec.hpp"
#include "core/counted.hpp"
#include "core/named_buffer.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

constexpr std::array kFormats{IndexCacheFormat::f32, IndexCacheFormat::bf16, IndexCacheFormat::fp8};

}  // namespace

std::span<const IndexCacheFormat> index_cache_formats() { return kFormats; }

std::string_view to_string(IndexCacheFormat f) {
  switch (f) {
    case IndexCacheFormat::f32: return "f32";
    case IndexCacheFormat::bf16: return "bf16";
    case IndexCacheFormat::fp8: return "fp8";
  }
  throw InputError("no index cache format has the number " + std::to_string(static_cast<int>(f)));
}

IndexCacheFormat parse_index_cache_format(std::string_view name) {
  std::string known;
  for (IndexCacheFormat f : kFormats) {
    if (to_string(f) == name) return f;
    known += ' ';
    known += to_string(f);
  }
  throw InputError("unknown index cache format '" + std::string(name) + "'; known:" + known);
}

std::string_view to_string(IndexArithmetic a) {
  switch (a) {
    case IndexArithmetic::exact: return "exact";
    case IndexArithmetic::fp8: return "fp8";
  }
  throw InputError("no index arithmetic has the number " + std::to_string(static_cast<int>(a)));
}

IndexArithmetic parse_index_arithmetic(std::string_view name) {
  for (IndexArithmetic a : {IndexArithmetic::exact, IndexArithmetic::fp8})
    if (to_string(a) == name) return a;
  throw InputError("unknown index arithmetic '" + std::string(name) + "'; known: exact fp8");
}

IndexCacheSpec index_cache_spec(const ModelConfig& model, const CacheSpec& cache, IndexCacheFormat format) {
  if (!model.indexer) throw UnsupportedError("model " + model.name + " has no indexer, so no index cache");
  return {.format = format, .dim = model.indexer->dim, .page_size = cache.page_size};
}

size_t IndexCacheSpec::page_bytes() const {
  const int64_t scales = format == IndexCacheFormat::fp8 ? 4 * page_size : 0;
  return static_cast<size_t>(cache::index::row_at(*this, page_size) + scales);
}

void IndexCacheSpec::validate() const {
  auto require = [](const char* what, int64_t found) {
    constexpr int64_t kMost = int64_t{1} << 20;
    if (found < 1 || found > kMost)
      throw ShapeError(std::string("index cache ") + what + " is " + std::to_string(found) + ", allowed 1 to " +
                       std::to_string(kMost));
  };
  require("dim", dim);
  require("page size", page_size);
  to_string(format);  // refuses a number that is no format
}

IndexCache::IndexCache(const IndexCacheSpec& spec, int64_t pages, Device device) : spec_(spec), pages_(pages) {
  spec.validate();
  if (pages < 0 || pages > std::numeric_limits<int32_t>::max() / spec.page_size)
    throw ShapeError("index cache pages is " + std::to_string(pages) + ", allowed 0 to " +
                     std::to_string(std::numeric_limits<int32_t>::max() / spec.page_size) + " at page size " +
                     std::to_string(spec.page_size));
  buffer_ = named_buffer("index cache of " + counted(pages, "page") + " of " + counted(spec.page_size, "token"),
                         static_cast<size_t>(pages) * spec.page_bytes(), device);
}

namespace cache::index {

void encode(const IndexCacheSpec& spec, std::byte* page, int64_t offset, const float* key) {
  std::byte* row = page + row_at(spec, offset);
  if (spec.format == IndexCacheFormat::fp8) {
    const float scale = writer_scale(largest_magnitude(key, spec.dim), spec.power_of_two_scales);
    encode_e4m3(key, row, spec.dim, scale);
    put(page + scale_at(spec, offset), 0, scale);
  } else if (spec.format == IndexCacheFormat::bf16) {
    for (int64_t i = 0; i < spec.dim; ++i) put(row, i, to_bf16(key[i]));
  } else {
    for (int64_t i = 0; i < spec.dim; ++i) put(row, i, key[i]);
  }
}

void decode(const IndexCacheSpec& spec, const std::byte* page, int64_t offset, float* key) {
  const std::byte* row = page + row_at(spec, offset);
  if (spec.format == IndexCacheFormat::fp8) {
    decode_e4m3(row, key, spec.dim, get<float>(page + scale_at(spec, offset), 0));
  } else if (spec.format == IndexCacheFormat::bf16) {
    for (int64_t i = 0; i < spec.dim; ++i) key[i] = to_float(get<bf16>(row, i));
  } else {
    for (int64_t i = 0; i < spec.dim; ++i) key[i] = get<float>(row, i);
  }
}

}  // namespace cache::index
}  // namespace mla
