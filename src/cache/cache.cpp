#include "mla/cache.hpp"

#include <cmath>
#include <limits>

#include "cache/format.hpp"
#include "core/counted.hpp"
#include "core/named_buffer.hpp"
#include "mla/error.hpp"

namespace mla {

int64_t CacheSpec::value_width() const { return cache::format(format).value_width(*this); }

size_t CacheSpec::page_bytes() const { return cache::format(format).page_bytes(*this); }

void CacheSpec::validate() const {
  auto require = [](const char* what, int64_t found, int64_t lo) {
    constexpr int64_t kMost = int64_t{1} << 20;
    if (found < lo || found > kMost)
      throw ShapeError(std::string("cache ") + what + " is " + std::to_string(found) + ", allowed " +
                       std::to_string(lo) + " to " + std::to_string(kMost));
  };
  require("latent", latent, 1);
  require("rope", rope, 0);
  require("page size", page_size, 1);
  if (!(k_scale > 0) || !std::isfinite(k_scale))
    throw ShapeError("cache k_scale is " + std::to_string(k_scale) + ", must be finite and above 0");
  cache::format(format).validate(*this);
}

CacheSpec cache_spec(const ModelConfig& model, CacheFormat format, int64_t page_size) {
  return {.format = format, .latent = model.latent, .rope = model.rope, .page_size = page_size};
}

Cache::Cache(const CacheSpec& spec, int64_t pages, Device device) : spec_(spec), pages_(pages) {
  spec.validate();
  if (pages < 0 || pages > std::numeric_limits<int32_t>::max() / spec.page_size)
    throw ShapeError("cache pages is " + std::to_string(pages) + ", allowed 0 to " +
                     std::to_string(std::numeric_limits<int32_t>::max() / spec.page_size) + " at page size " +
                     std::to_string(spec.page_size));
  buffer_ = named_buffer("cache of " + counted(pages, "page") + " of " + counted(spec.page_size, "token"),
                         static_cast<size_t>(pages) * spec.page_bytes(), device);
}

}  // namespace mla
