#include "cache.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <limits>

#include "mla/pages.hpp"
#include "mla/sharding.hpp"
#include "stream.hpp"

namespace mla::python {
namespace {

constexpr int64_t kMostSlots = int64_t{std::numeric_limits<int32_t>::max()} + 1;

// Pages of fresh memory, or the caller's [pages, page bytes] as it is.
template <class PyAnyCache, class Spec>
void make_cache(PyAnyCache& cache, const Spec& spec, std::optional<int64_t> pages, std::optional<nb::object> memory,
                std::string_view device) {
  spec.validate();
  if (pages.has_value() == memory.has_value())
    throw InputError("Cache: give either pages, for memory of its own, or memory");
  const size_t page_bytes = spec.page_bytes();
  auto require_pages = [&](int64_t n) { ops::require_range("Cache", "pages", n, 0, kMostSlots / spec.page_size + 1); };
  cache.view.spec = spec;
  if (pages) {
    require_pages(*pages);
    cache.device = parse_device(device);
    cache.own = Buffer(page_bytes * static_cast<size_t>(*pages), cache.device);
    cache.view.data = cache.own.data();
    cache.view.pages = *pages;
    cache.view.page_stride = page_bytes;
    return;
  }
  cache.memory.emplace(*memory, "memory", Access::write, Use::kept);
  const Tensor& t = *cache.memory;
  t.require_rank(2, "[pages, page bytes]");
  if (t.element() != Element::byte) throw ShapeError("memory: is " + t.element_text() + ", uint8 is needed");
  require_pages(t.extent(0));
  ops::require_equal("Cache", "memory's page bytes", t.extent(1), "the format's page",
                     static_cast<int64_t>(page_bytes));
  if (t.extent(1) > 1 && t.stride(1) != 1) throw ShapeError("memory: bytes of a page must follow one another");
  if (t.extent(0) > 1)
    ops::require_range("Cache", "memory's page stride", t.stride(0), static_cast<int64_t>(page_bytes),
                       std::numeric_limits<int64_t>::max());
  cache.device = t.device();
  cache.view.data = t.data();
  cache.view.pages = t.extent(0);
  cache.view.page_stride = t.extent(0) > 1 ? static_cast<size_t>(t.stride(0)) : page_bytes;
}

// [pages, page bytes] uint8 over the cache's memory, which it keeps alive.
template <class PyAnyCache>
nb::object memory_of(nb::handle self) {
  PyAnyCache& c = nb::cast<PyAnyCache&>(self);
  const size_t shape[] = {static_cast<size_t>(c.view.pages), c.view.spec.page_bytes()};
  const int64_t strides[] = {static_cast<int64_t>(c.view.page_stride), 1};
  const bool cpu = c.device.kind == DeviceKind::cpu;
  const int type = cpu ? nb::device::cpu::value : nb::device::cuda::value;
  if (cpu)
    return nb::cast(
        nb::ndarray<nb::numpy, uint8_t>(c.view.data, 2, shape, self, strides, nb::dtype<uint8_t>(), type, 0));
  return nb::cast(
      nb::ndarray<uint8_t>(c.view.data, 2, shape, self, strides, nb::dtype<uint8_t>(), type, c.device.index));
}

constexpr const char* kPlace =
    "Spreads the CPU's pages over the nodes of a pinned stream's threads, with what they hold; nothing where these "
    "are\n"
    "on one node. Nobody uses the cache meanwhile. Not of the caller's memory.";

template <class C>
void place(const C& cache, PyStream& stream) {
  const Turn turn(stream);
  if (cache.memory) throw UnsupportedError("cache lies in the caller's memory, which only the caller can place");
  cache.own.place(stream.stream.pool(), Placement::in_turn);
}

void bind_caches(nb::module_& m) {
  nb::class_<CacheSpec>(
      m, "CacheSpec",
      "What a latent cache holds: [pages, page_size, row], one KV head; slot = page * page_size + offset.")
      .def(
          "__init__",
          [](CacheSpec* self, std::string_view format, int64_t latent, int64_t rope, int64_t page_size, float k_scale) {
            CacheSpec spec{.format = parse_cache_format(format),
                           .latent = latent,
                           .rope = rope,
                           .page_size = page_size,
                           .k_scale = k_scale};
            spec.validate();
            new (self) CacheSpec(spec);
          },
          nb::arg("format") = "bf16", nb::arg("latent") = 512, nb::arg("rope") = 64, nb::arg("page_size") = 64,
          nb::arg("k_scale") = 1.0f, "format: one of cache_formats(). k_scale: of fp8, stored = x / k_scale.")
      .def_prop_ro("format", [](const CacheSpec& s) { return std::string(to_string(s.format)); })
      .def_ro("latent", &CacheSpec::latent)
      .def_ro("rope", &CacheSpec::rope)
      .def_ro("page_size", &CacheSpec::page_size)
      .def_ro("k_scale", &CacheSpec::k_scale)
      .def_prop_ro("page_bytes", &CacheSpec::page_bytes)
      .def_prop_ro("value_width", &CacheSpec::value_width)
      .def("__repr__", [](const CacheSpec& s) {
        return "mla.CacheSpec('" + std::string(to_string(s.format)) + "', latent=" + std::to_string(s.latent) +
               ", rope=" + std::to_string(s.rope) + ", page_size=" + std::to_string(s.page_size) + ")";
      });
  m.def(
      "cache_formats",
      [] {
        std::vector<std::string> names;
        for (CacheFormat f : cache_formats()) names.emplace_back(to_string(f));
        return names;
      },
      "Names of the latent cache's formats.");
  m.def(
      "cache_spec",
      [](const ModelConfig& model, std::string_view format, int64_t page_size) {
        const CacheSpec spec = cache_spec(model, parse_cache_format(format), page_size);
        spec.validate();
        return spec;
      },
      nb::arg("model"), nb::arg("format") = "bf16", nb::arg("page_size") = 64, "For a model's dimensions.");
  nb::class_<PyCache>(m, "Cache", "A paged latent cache.")
      .def(
          "__init__",
          [](PyCache* self, const CacheSpec& spec, std::optional<int64_t> pages, std::optional<nb::object> memory,
             std::string_view device) {
            PyCache cache;
            make_cache(cache, spec, pages, std::move(memory), device);
            new (self) PyCache(std::move(cache));
          },
          nb::arg("spec"), nb::arg("pages") = nb::none(), nb::kw_only(), nb::arg("memory") = nb::none(),
          nb::arg("device") = "cpu",
          "Either `pages` of zeroed memory on `device`, or `memory`: the caller's uint8 [pages, page bytes], on any\n"
          "device, used in place.")
      .def_prop_ro("spec", [](const PyCache& c) { return c.view.spec; })
      .def_prop_ro("pages", [](const PyCache& c) { return c.view.pages; })
      .def("place", &place<PyCache>, nb::arg("stream"), kPlace)
      .def_prop_ro("device", [](const PyCache& c) { return to_string(c.device); })
      .def_prop_ro(
          "memory", [](nb::handle self) { return memory_of<PyCache>(self); },
          "uint8 [pages, page bytes] over the cache's memory.")
      .def("__repr__", [](const PyCache& c) {
        return "mla.Cache('" + std::string(to_string(c.view.spec.format)) + "', pages=" + std::to_string(c.view.pages) +
               ", page_size=" + std::to_string(c.view.spec.page_size) + ", device='" + to_string(c.device) + "')";
      });
  nb::class_<PyIndexCache>(m, "IndexCache", "The indexer's keys, page for page beside a latent cache.")
      .def(
          "__init__",
          [](PyIndexCache* self, const ModelConfig& model, const PyCache& beside, std::string_view format,
             std::optional<nb::object> memory) {
            PyIndexCache cache;
            const IndexCacheSpec spec = index_cache_spec(model, beside.view.spec, parse_index_cache_format(format));
            std::optional<int64_t> pages;
            if (!memory) pages = beside.view.pages;
            make_cache(cache, spec, pages, std::move(memory), to_string(beside.device));
            new (self) PyIndexCache(std::move(cache));
          },
          nb::arg("model"), nb::arg("beside"), nb::arg("format") = "fp8", nb::kw_only(), nb::arg("memory") = nb::none(),
          "For a model with an indexer, beside its latent cache. format: f32, bf16 or fp8.")
      .def_prop_ro("pages", [](const PyIndexCache& c) { return c.view.pages; })
      .def("place", &place<PyIndexCache>, nb::arg("stream"), kPlace)
      .def_prop_ro("memory", [](nb::handle self) { return memory_of<PyIndexCache>(self); })
      .def("__repr__", [](const PyIndexCache& c) {
        return "mla.IndexCache('" + std::string(to_string(c.view.spec.format)) +
               "', pages=" + std::to_string(c.view.pages) + ", page_size=" + std::to_string(c.view.spec.page_size) +
               ", device='" + to_string(c.device) + "')";
      });
}

void bind_pages(nb::module_& m) {
  m.def("chain_hash", &chain_hash, nb::arg("previous"), nb::arg("content"),
        "Hash of a page after the pages before it: equal hashes mean equal prefixes.");
  nb::class_<PageAllocator>(m, "PageAllocator",
                            "Which page holds what: references, prefix reuse, eviction, copy on write. One owner.")
      .def(
          "__init__",
          [](PageAllocator* self, int64_t pages, bool reserve_null_page, bool prefix_reuse) {
            new (self) PageAllocator(pages, {.reserve_null_page = reserve_null_page, .prefix_reuse = prefix_reuse});
          },
          nb::arg("pages"), nb::kw_only(), nb::arg("reserve_null_page") = false, nb::arg("prefix_reuse") = true)
      .def("allocate", &PageAllocator::allocate, nb::arg("count"),
           "Fresh pages; OutOfPages, and nothing changed, when there are fewer.")
      .def(
          "acquire_prefix",
          [](PageAllocator& a, const std::vector<PageHash>& hashes) { return a.acquire_prefix(hashes); },
          nb::arg("hashes"), "The longest run of cached pages that matches the front; each gains a reference.")
      .def(
          "match_prefix",
          [](const PageAllocator& a, const std::vector<PageHash>& hashes) { return a.match_prefix(hashes); },
          nb::arg("hashes"), "How many pages acquire_prefix would return.")
      .def("publish", &PageAllocator::publish, nb::arg("page"), nb::arg("hash"))
      .def("retain", &PageAllocator::retain, nb::arg("page"))
      .def("release", &PageAllocator::release, nb::arg("page"))
      .def(
          "release_all", [](PageAllocator& a, const std::vector<PageId>& pages) { a.release_all(pages); },
          nb::arg("pages"))
      .def(
          "make_writable",
          [](PageAllocator& a, PageId page) {
            const PageAllocator::WritablePage w = a.make_writable(page);
            return nb::make_tuple(w.page, w.copy);
          },
          nb::sig("def make_writable(self, page: int) -> tuple[int, bool]"), nb::arg("page"),
          "(page, copy): a page that its caller may write; copy: the old page's bytes must be copied into it.")
      .def("references", &PageAllocator::references, nb::arg("page"))
      .def_prop_ro("available", &PageAllocator::available)
      .def_prop_ro("counts", [](const PageAllocator& a) {
        const PageCounts c = a.counts();
        nb::typed<nb::dict, nb::str, int64_t> d;
        d["total"] = c.total;
        d["referenced"] = c.referenced;
        d["cached"] = c.cached;
        d["free"] = c.free;
        d["hits"] = c.hits;
        d["lookups"] = c.lookups;
        d["evictions"] = c.evictions;
        d["copies"] = c.copies;
        return d;
      });
}

void bind_sharding(nb::module_& m) {
  // slot and slot_position, whose page tables come as lists.
  using OfTable = int64_t (CacheSharding::*)(int64_t, int64_t, std::span<const int32_t>, int64_t) const;
  const auto of_table = [](OfTable method) {
    return [method](const CacheSharding& s, int64_t rank, int64_t at, const std::vector<int32_t>& page_table,
                    int64_t page_size) { return (s.*method)(rank, at, page_table, page_size); };
  };
  nb::class_<CacheSharding>(m, "CacheSharding",
                            "Which of a group's ranks holds a token of a cache split over them: positions go round the "
                            "ranks in blocks of interleave tokens. A rank's page table lists its own tokens' pages.")
      .def(nb::init<int64_t, int64_t>(), nb::arg("ranks"), nb::arg("interleave") = 1)
      .def_prop_ro("ranks", &CacheSharding::ranks)
      .def_prop_ro("interleave", &CacheSharding::interleave)
      .def("owner", &CacheSharding::owner, nb::arg("position"), "The rank that holds a position.")
      .def("index", &CacheSharding::index, nb::arg("position"), "Which of its owner's tokens a position is.")
      .def("position", &CacheSharding::position, nb::arg("rank"), nb::arg("index"), "The position of a rank's token.")
      .def("length", &CacheSharding::length, nb::arg("rank"), nb::arg("tokens"),
           "How many of the first tokens positions a rank holds.")
      .def("pages", &CacheSharding::pages, nb::arg("rank"), nb::arg("tokens"), nb::arg("page_size"),
           "Length of a rank's page table.")
      .def("slot", of_table(&CacheSharding::slot), nb::arg("rank"), nb::arg("position"), nb::arg("page_table"),
           nb::arg("page_size"), "page * page_size + offset in a rank's cache; -1 where another rank is the owner.")
      .def("slot_position", of_table(&CacheSharding::slot_position), nb::arg("rank"), nb::arg("slot"),
           nb::arg("page_table"), nb::arg("page_size"),
           "The position that a rank's slot holds; -1 where its page is not in the table.")
      .def("__repr__", [](const CacheSharding& s) {
        return "mla.CacheSharding(ranks=" + std::to_string(s.ranks()) +
               ", interleave=" + std::to_string(s.interleave()) + ")";
      });
}

}  // namespace

void bind_cache(nb::module_& m) {
  bind_caches(m);
  bind_pages(m);
  bind_sharding(m);
}

}  // namespace mla::python
