#include <limits>
#include <unordered_map>

#include "cache/formats.hpp"
#include "capi/objects.hpp"
#include "capi/tensor.hpp"
#include "mla/sharding.hpp"

using namespace mla;
using namespace mla::capi;

#define MLA_SAME(id, object, c) static_assert(static_cast<int>(CacheFormat::id) == MLA_CACHE_##c);
MLA_CACHE_FORMATS(MLA_SAME)
#undef MLA_SAME
static_assert(static_cast<int>(IndexCacheFormat::bf16) == MLA_INDEX_CACHE_BF16 &&
              static_cast<int>(IndexCacheFormat::fp8) == MLA_INDEX_CACHE_FP8);
static_assert(static_cast<int>(IndexArithmetic::exact) == MLA_INDEX_PRODUCTS_EXACT &&
              static_cast<int>(IndexArithmetic::fp8) == MLA_INDEX_PRODUCTS_FP8);

namespace {

mla_cache_spec write_spec(const CacheSpec& s) {
  mla_cache_spec out = mla_cache_spec_default();
  out.format = static_cast<int32_t>(s.format);
  out.k_scale = s.k_scale;
  out.latent = s.latent;
  out.rope = s.rope;
  out.page_size = s.page_size;
  out.power_of_two_scales = s.power_of_two_scales;
  return out;
}

mla_index_cache_spec write_spec(const IndexCacheSpec& s) {
  mla_index_cache_spec out = mla_index_cache_spec_default();
  out.format = static_cast<int32_t>(s.format);
  out.power_of_two_scales = s.power_of_two_scales;
  out.dim = s.dim;
  out.page_size = s.page_size;
  return out;
}

// Memory of its own.
template <class Handle, class Spec>
void create(Handle** cache, const Spec& spec, int64_t pages, DLDevice device) {
  auto made = std::make_shared<Handle>();
  made->device = read_device(device);
  made->own = decltype(made->own)(spec, pages, made->device);
  made->view = made->own.view();
  put(cache, std::move(made));
}

template <class Handle, class Spec>
void create_in(Handle** cache, const Spec& spec, int64_t pages, void* data, size_t page_stride, DLDevice device) {
  auto made = std::make_shared<Handle>();
  made->device = read_device(device);
  const size_t bytes = spec.page_bytes(), stride = page_stride == 0 ? bytes : page_stride;
  const int64_t most = std::numeric_limits<int32_t>::max() / spec.page_size;
  if (pages < 0 || pages > most)
    throw ShapeError("pages is " + std::to_string(pages) + ", allowed 0 to " + std::to_string(most) + " at page size " +
                     std::to_string(spec.page_size));
  if (stride < bytes || stride > (size_t{1} << 40))
    throw ShapeError("page_stride is " + std::to_string(stride) + ", allowed " + std::to_string(bytes) +
                     " (a page) to 2^40");
  if (pages > 0) required("data", static_cast<char*>(data));
  if (const uintptr_t past = reinterpret_cast<uintptr_t>(data) % 16; past != 0)
    throw ShapeError("data is at an address that is " + std::to_string(past) + " past a multiple of 16");
  if (stride != bytes && stride % 16 != 0)
    throw ShapeError("page_stride is " + std::to_string(stride) + ", must be a page's " + std::to_string(bytes) +
                     " bytes or a multiple of 16");
  made->view = {spec, static_cast<std::byte*>(data), pages, stride};
  put(cache, std::move(made));
}

template <class Handle, class Spec>
void describe(const Handle* cache, Spec* spec, int64_t* pages, void** data, size_t* page_stride) {
  const auto c = get("cache", cache);
  if (spec) write_struct("spec", spec, write_spec(c->view.spec));
  if (pages) *pages = c->view.pages;
  if (data) *data = c->view.data;
  if (page_stride) *page_stride = c->view.page_stride;
}

template <class Handle>
void place(Handle* cache, mla_stream* stream) {
  const auto c = get("cache", cache);
  const Turn turn(stream);
  if (c->view.data != c->own.view().data)
    throw UnsupportedError("cache lies in the caller's memory, which only the caller can place");
  c->own.place(turn.stream().pool());
}

template <class F>
mla_status with_pages(const char* function, const mla_pages* allocator, F&& f) noexcept {
  return guarded(function, [&] { f(*get("allocator", allocator)); });
}

}  // namespace

CacheSpec mla::capi::read_cache_spec(const char* name, const mla_cache_spec* spec) {
  const mla_cache_spec s = read_struct(name, spec, mla_cache_spec_default());
  const CacheSpec out{
      .format = read_enum((std::string(name) + " format").c_str(), s.format, cache_formats().back()),
      .latent = s.latent,
      .rope = s.rope,
      .page_size = s.page_size,
      .k_scale = s.k_scale,
      .power_of_two_scales = read_flag((std::string(name) + " power_of_two_scales").c_str(), s.power_of_two_scales)};
  out.validate();
  return out;
}

IndexCacheSpec mla::capi::read_index_cache_spec(const char* name, const mla_index_cache_spec* spec) {
  const mla_index_cache_spec s = read_struct(name, spec, mla_index_cache_spec_default());
  const IndexCacheSpec out{
      .format = read_enum((std::string(name) + " format").c_str(), s.format, IndexCacheFormat::fp8),
      .dim = s.dim,
      .page_size = s.page_size,
      .power_of_two_scales = read_flag((std::string(name) + " power_of_two_scales").c_str(), s.power_of_two_scales)};
  out.validate();
  return out;
}

mla_status mla_cache_spec_of(const mla_model* model, int32_t format, int64_t page_size, mla_cache_spec* spec) {
  return guarded("mla_cache_spec_of", [&] {
    const CacheSpec s =
        cache_spec(get("model", model)->config, read_enum("format", format, cache_formats().back()), page_size);
    s.validate();
    write_struct("spec", spec, write_spec(s));
  });
}

mla_status mla_index_cache_spec_of(const mla_model* model, const mla_cache_spec* cache, int32_t format,
                                   mla_index_cache_spec* spec) {
  return guarded("mla_index_cache_spec_of", [&] {
    write_struct("spec", spec,
                 write_spec(index_cache_spec(get("model", model)->config, read_cache_spec("cache", cache),
                                             read_enum("format", format, IndexCacheFormat::fp8))));
  });
}

mla_status mla_cache_page_bytes(const mla_cache_spec* spec, size_t* bytes) {
  return guarded("mla_cache_page_bytes",
                 [&] { required("bytes", bytes) = read_cache_spec("spec", spec).page_bytes(); });
}

mla_status mla_index_cache_page_bytes(const mla_index_cache_spec* spec, size_t* bytes) {
  return guarded("mla_index_cache_page_bytes",
                 [&] { required("bytes", bytes) = read_index_cache_spec("spec", spec).page_bytes(); });
}

mla_status mla_cache_create(const mla_cache_spec* spec, int64_t pages, DLDevice device, mla_cache** cache) {
  return guarded("mla_cache_create", [&] {
    expect_handle("cache", cache);
    create(cache, read_cache_spec("spec", spec), pages, device);
  });
}

mla_status mla_cache_create_in(const mla_cache_spec* spec, int64_t pages, void* data, size_t page_stride,
                               DLDevice device, mla_cache** cache) {
  return guarded("mla_cache_create_in", [&] {
    expect_handle("cache", cache);
    create_in(cache, read_cache_spec("spec", spec), pages, data, page_stride, device);
  });
}

mla_status mla_cache_place(mla_cache* cache, mla_stream* stream) {
  return guarded("mla_cache_place", [&] { place(cache, stream); });
}

mla_status mla_index_cache_place(mla_index_cache* cache, mla_stream* stream) {
  return guarded("mla_index_cache_place", [&] { place(cache, stream); });
}

mla_status mla_cache_destroy(mla_cache* cache) { return destroy("mla_cache_destroy", "cache", cache); }

mla_status mla_cache_get(const mla_cache* cache, mla_cache_spec* spec, int64_t* pages, void** data,
                         size_t* page_stride) {
  return guarded("mla_cache_get", [&] { ::describe(cache, spec, pages, data, page_stride); });
}

mla_status mla_index_cache_create(const mla_index_cache_spec* spec, int64_t pages, DLDevice device,
                                  mla_index_cache** cache) {
  return guarded("mla_index_cache_create", [&] {
    expect_handle("cache", cache);
    create(cache, read_index_cache_spec("spec", spec), pages, device);
  });
}

mla_status mla_index_cache_create_in(const mla_index_cache_spec* spec, int64_t pages, void* data, size_t page_stride,
                                     DLDevice device, mla_index_cache** cache) {
  return guarded("mla_index_cache_create_in", [&] {
    expect_handle("cache", cache);
    create_in(cache, read_index_cache_spec("spec", spec), pages, data, page_stride, device);
  });
}

mla_status mla_index_cache_destroy(mla_index_cache* cache) {
  return destroy("mla_index_cache_destroy", "cache", cache);
}

mla_status mla_index_cache_get(const mla_index_cache* cache, mla_index_cache_spec* spec, int64_t* pages, void** data,
                               size_t* page_stride) {
  return guarded("mla_index_cache_get", [&] { ::describe(cache, spec, pages, data, page_stride); });
}

mla_status mla_pages_create(int64_t pages, const mla_page_options* options, mla_pages** allocator) {
  return guarded("mla_pages_create", [&] {
    expect_handle("allocator", allocator);
    mla_page_options o = mla_page_options_default();
    if (options) o = read_struct("options", options, o);
    read_range("pages", pages, 0, std::numeric_limits<int32_t>::max());
    put(allocator,
        std::make_shared<mla_pages>(
            pages, PageAllocator::Options{.reserve_null_page = read_flag("reserve_null_page", o.reserve_null_page),
                                          .prefix_reuse = read_flag("prefix_reuse", o.prefix_reuse)}));
  });
}

mla_status mla_pages_destroy(mla_pages* allocator) { return destroy("mla_pages_destroy", "allocator", allocator); }

mla_status mla_pages_allocate(mla_pages* allocator, int64_t count, int32_t* pages) {
  return with_pages("mla_pages_allocate", allocator, [&](mla_pages& p) {
    read_range("count", count, 0, std::numeric_limits<int32_t>::max());
    if (count > 0) required("pages", pages);
    const std::vector<PageId> got = p.allocator.allocate(count);
    std::copy(got.begin(), got.end(), pages);
  });
}

mla_status mla_pages_acquire_prefix(mla_pages* allocator, const uint64_t* hashes, int64_t count, int32_t* pages,
                                    int64_t* acquired) {
  return with_pages("mla_pages_acquire_prefix", allocator, [&](mla_pages& p) {
    required("acquired", acquired) = 0;
    const std::span<const uint64_t> list = read_list("hashes", hashes, count);
    if (count > 0) required("pages", pages);
    const std::vector<PageId> got = p.allocator.acquire_prefix(list);
    std::copy(got.begin(), got.end(), pages);
    *acquired = static_cast<int64_t>(got.size());
  });
}

mla_status mla_pages_match_prefix(const mla_pages* allocator, const uint64_t* hashes, int64_t count, int64_t* matched) {
  return with_pages("mla_pages_match_prefix", allocator, [&](mla_pages& p) {
    required("matched", matched) = p.allocator.match_prefix(read_list("hashes", hashes, count));
  });
}

mla_status mla_pages_publish(mla_pages* allocator, int32_t page, uint64_t hash) {
  return with_pages("mla_pages_publish", allocator, [&](mla_pages& p) { p.allocator.publish(page, hash); });
}

mla_status mla_pages_retain(mla_pages* allocator, int32_t page) {
  return with_pages("mla_pages_retain", allocator, [&](mla_pages& p) { p.allocator.retain(page); });
}

mla_status mla_pages_release(mla_pages* allocator, const int32_t* pages, int64_t count) {
  return with_pages("mla_pages_release", allocator, [&](mla_pages& p) {
    const std::span<const int32_t> list = read_list("pages", pages, count);
    // All or nothing: every page is looked at before the first one goes.
    std::unordered_map<int32_t, int64_t> times;
    for (int32_t page : list)
      if (const int64_t held = p.allocator.references(page); ++times[page] > held)
        throw InputError("page " + std::to_string(page) + " is released " + std::to_string(times[page]) +
                         " times, it has " + std::to_string(held) + " owners");
    p.allocator.release_all(list);
  });
}

mla_status mla_pages_make_writable(mla_pages* allocator, int32_t page, int32_t* writable, int32_t* copy) {
  return with_pages("mla_pages_make_writable", allocator, [&](mla_pages& p) {
    required("writable", writable);
    required("copy", copy);
    const PageAllocator::WritablePage got = p.allocator.make_writable(page);
    *writable = got.page;
    *copy = got.copy;
  });
}

mla_status mla_pages_references(const mla_pages* allocator, int32_t page, int64_t* references) {
  return with_pages("mla_pages_references", allocator,
                    [&](mla_pages& p) { required("references", references) = p.allocator.references(page); });
}

mla_status mla_pages_available(const mla_pages* allocator, int64_t* available) {
  return with_pages("mla_pages_available", allocator,
                    [&](mla_pages& p) { required("available", available) = p.allocator.available(); });
}

mla_status mla_pages_counts(const mla_pages* allocator, mla_page_counts* counts) {
  return with_pages("mla_pages_counts", allocator, [&](mla_pages& p) {
    const PageCounts c = p.allocator.counts();
    write_struct("counts", counts,
                 mla_page_counts{sizeof(mla_page_counts), c.total, c.referenced, c.cached, c.free, c.hits, c.lookups,
                                 c.evictions, c.copies});
  });
}

uint64_t mla_chain_hash(uint64_t previous, uint64_t content) { return chain_hash(previous, content); }

namespace {

CacheSharding read_sharding(const mla_sharding* sharding) {
  const mla_sharding s = read_struct("sharding", sharding, mla_sharding_default());
  return {s.ranks, s.interleave};
}

std::span<const int32_t> read_page_table(const int32_t* page_table, int64_t pages) {
  read_range("pages", pages, 0, std::numeric_limits<int32_t>::max());
  if (pages > 0) required("page_table", page_table);
  return {page_table, static_cast<size_t>(pages)};
}

}  // namespace

mla_status mla_sharding_owner(const mla_sharding* sharding, int64_t position, int64_t* rank, int64_t* index) {
  return guarded("mla_sharding_owner", [&] {
    const CacheSharding s = read_sharding(sharding);
    const int64_t owner = s.owner(position);
    if (rank) *rank = owner;
    if (index) *index = s.index(position);
  });
}

mla_status mla_sharding_position(const mla_sharding* sharding, int64_t rank, int64_t index, int64_t* position) {
  return guarded("mla_sharding_position",
                 [&] { required("position", position) = read_sharding(sharding).position(rank, index); });
}

mla_status mla_sharding_length(const mla_sharding* sharding, int64_t rank, int64_t tokens, int64_t* length) {
  return guarded("mla_sharding_length",
                 [&] { required("length", length) = read_sharding(sharding).length(rank, tokens); });
}

mla_status mla_sharding_pages(const mla_sharding* sharding, int64_t rank, int64_t tokens, int64_t page_size,
                              int64_t* pages) {
  return guarded("mla_sharding_pages",
                 [&] { required("pages", pages) = read_sharding(sharding).pages(rank, tokens, page_size); });
}

mla_status mla_sharding_slot(const mla_sharding* sharding, int64_t rank, int64_t position, const int32_t* page_table,
                             int64_t pages, int64_t page_size, int64_t* slot) {
  return guarded("mla_sharding_slot", [&] {
    required("slot", slot) =
        read_sharding(sharding).slot(rank, position, read_page_table(page_table, pages), page_size);
  });
}

mla_status mla_sharding_slot_position(const mla_sharding* sharding, int64_t rank, int64_t slot,
                                      const int32_t* page_table, int64_t pages, int64_t page_size, int64_t* position) {
  return guarded("mla_sharding_slot_position", [&] {
    required("position", position) =
        read_sharding(sharding).slot_position(rank, slot, read_page_table(page_table, pages), page_size);
  });
}
