#include "cache/formats.hpp"

#include <algorithm>
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
#define MLA_ID(id, object, c) CacheFormat::id,
constexpr std::array kIds{MLA_CACHE_FORMATS(MLA_ID)};
#undef MLA_ID
static_assert(static_cast<size_t>(kIds.back()) == kIds.size() - 1 && std::ranges::is_sorted(kIds),
              "formats are listed in the order of their numbers");
}  // namespace

const Format& format(CacheFormat id) {
  for (const Format* f : kFormats)
    if (f->id == id) return *f;
  throw InputError("no cache format has the number " + std::to_string(static_cast<int>(id)));
}

}  // namespace cache

std::span<const CacheFormat> cache_formats() { return cache::kIds; }

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
