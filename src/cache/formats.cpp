#include "cache/formats.hpp"

#include <array>
#include <string>

#include "cache/format.hpp"
#include "mla/error.hpp"

namespace mla {
namespace cache {

#define MLA_DECLARED(id, object, c) extern const Format object;
MLA_CACHE_FORMATS(MLA_DECLARED)
#undef MLA_DECLARED

namespace {
#define MLA_ADDRESS(id, object, c) &object,
constexpr std::array kFormats{MLA_CACHE_FORMATS(MLA_ADDRESS)};
#undef MLA_ADDRESS
}  // namespace

const Format& format(CacheFormat id) {
  for (const Format* f : kFormats)
    if (f->id == id) return *f;
  throw InputError("no cache format has the number " + std::to_string(static_cast<int>(id)));
}

}  // namespace cache

std::span<const CacheFormat> cache_formats() {
  static const auto ids = [] {
    std::array<CacheFormat, cache::kFormats.size()> a{};
    for (size_t i = 0; i < a.size(); ++i) a[i] = cache::kFormats[i]->id;
    return a;
  }();
  return ids;
}

std::string_view to_string(CacheFormat f) { return cache::format(f).name; }

CacheFormat parse_cache_format(std::string_view name) {
  std::string known;
  for (const cache::Format* f : cache::kFormats) {
    if (f->name == name) return f->id;
    known += ' ';
    known += f->name;
  }
  throw InputError("unknown cache format '" + std::string(name) + "'; known:" + known);
}

}  // namespace mla
