// The paged latent KV cache, the indexer's key cache, the page allocator, and caches split over ranks.
#ifndef MLA_C_CACHE_H
#define MLA_C_CACHE_H

#include "mla/c/base.h"
#include "mla/c/device.h"
#include "mla/c/model.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  MLA_CACHE_F32 = 0,
  MLA_CACHE_BF16 = 1,
  MLA_CACHE_F16 = 2,
  MLA_CACHE_FP8 = 3,         ///< e4m3 with one scale
  MLA_CACHE_FP8_DS_MLA = 4,  ///< 656 bytes a token
  MLA_CACHE_FP8_DS_V4 = 5,   ///< 584 bytes a token
};
enum { MLA_INDEX_CACHE_F32 = 0, MLA_INDEX_CACHE_BF16 = 1, MLA_INDEX_CACHE_FP8 = 2 };
/// Index scores of fp8 queries and keys. exact: products that lose nothing, f32 sums. fp8: sums may lose what Hopper's
/// e4m3 products lose, some 1e-4 of the scores' root mean square, and are up to twice as fast there; elsewhere exact.
enum { MLA_INDEX_PRODUCTS_EXACT = 0, MLA_INDEX_PRODUCTS_FP8 = 1 };

/// What a cache holds. slot = page * page_size + offset.
typedef struct mla_cache_spec {
  size_t struct_size;
  int32_t format;               ///< MLA_CACHE_...; default bf16
  float k_scale;                ///< fp8 only: stored = x / k_scale; default 1
  int64_t latent;               ///< default 512
  int64_t rope;                 ///< default 64
  int64_t page_size;            ///< tokens a page; default 64
  int32_t power_of_two_scales;  ///< fp8_ds_mla's writer; default 1
  int32_t reserved;             ///< 0
} mla_cache_spec;

static inline mla_cache_spec mla_cache_spec_default(void) {
  mla_cache_spec s;
  memset(&s, 0, sizeof s);
  s.struct_size = sizeof s;
  s.format = MLA_CACHE_BF16;
  s.k_scale = 1.0f;
  s.latent = 512;
  s.rope = 64;
  s.page_size = 64;
  s.power_of_two_scales = 1;
  return s;
}

/// What an index cache holds, page for page beside a latent cache.
typedef struct mla_index_cache_spec {
  size_t struct_size;
  int32_t format;               ///< MLA_INDEX_CACHE_...; default fp8
  int32_t power_of_two_scales;  ///< fp8's writer; default 1
  int64_t dim;                  ///< default 128
  int64_t page_size;            ///< default 64
} mla_index_cache_spec;

static inline mla_index_cache_spec mla_index_cache_spec_default(void) {
  mla_index_cache_spec s;
  memset(&s, 0, sizeof s);
  s.struct_size = sizeof s;
  s.format = MLA_INDEX_CACHE_FP8;
  s.power_of_two_scales = 1;
  s.dim = 128;
  s.page_size = 64;
  return s;
}

/// Fills a spec for a model.
MLA_API mla_status mla_cache_spec_of(const mla_model* model, int32_t format, int64_t page_size, mla_cache_spec* spec);
/// MLA_ERROR_UNSUPPORTED for a model without an indexer.
MLA_API mla_status mla_index_cache_spec_of(const mla_model* model, const mla_cache_spec* cache, int32_t format,
                                           mla_index_cache_spec* spec);
/// Bytes of a page; MLA_ERROR_UNSUPPORTED when the format cannot hold these dimensions.
MLA_API mla_status mla_cache_page_bytes(const mla_cache_spec* spec, size_t* bytes);
MLA_API mla_status mla_index_cache_page_bytes(const mla_index_cache_spec* spec, size_t* bytes);

/// A cache's memory: its own, or the caller's.
typedef struct mla_cache mla_cache;
typedef struct mla_index_cache mla_index_cache;
MLA_API mla_status mla_cache_create(const mla_cache_spec* spec, int64_t pages, DLDevice device, mla_cache** cache);
/// In the caller's memory, which must outlive the handle: page i at data + i * page_stride bytes, of which it takes
/// mla_cache_page_bytes. data is 16-byte aligned; page_stride is 0 for pages without a gap, or a multiple of 16.
MLA_API mla_status mla_cache_create_in(const mla_cache_spec* spec, int64_t pages, void* data, size_t page_stride,
                                       DLDevice device, mla_cache** cache);
MLA_API mla_status mla_cache_destroy(mla_cache* cache);
/// Any of the last four may be NULL.
MLA_API mla_status mla_cache_get(const mla_cache* cache, mla_cache_spec* spec, int64_t* pages, void** data,
                                 size_t* page_stride);
/// Spreads the CPU's pages over the nodes of a pinned stream's threads, with what they hold; nothing where these are on
/// one node. Nobody uses the cache meanwhile. MLA_ERROR_UNSUPPORTED for a cache in the caller's memory, and for a cache
/// or a stream on a GPU; MLA_ERROR_DEVICE when the system keeps a page where it is.
MLA_API mla_status mla_cache_place(mla_cache* cache, mla_stream* stream);
MLA_API mla_status mla_index_cache_create(const mla_index_cache_spec* spec, int64_t pages, DLDevice device,
                                          mla_index_cache** cache);
MLA_API mla_status mla_index_cache_create_in(const mla_index_cache_spec* spec, int64_t pages, void* data,
                                             size_t page_stride, DLDevice device, mla_index_cache** cache);
MLA_API mla_status mla_index_cache_destroy(mla_index_cache* cache);
MLA_API mla_status mla_index_cache_place(mla_index_cache* cache, mla_stream* stream);
MLA_API mla_status mla_index_cache_get(const mla_index_cache* cache, mla_index_cache_spec* spec, int64_t* pages,
                                       void** data, size_t* page_stride);

/// Which page holds what: allocation, reference counts, prefix reuse, eviction, copy on write. Host bookkeeping only.
/// MLA_ERROR_INPUT naming the page for an id outside the pool, or for one that nobody holds where an owner acts.
typedef struct mla_pages mla_pages;

typedef struct mla_page_options {
  size_t struct_size;
  int32_t reserve_null_page;  ///< 1: page 0 is never handed out; default 0
  int32_t prefix_reuse;       ///< default 1
} mla_page_options;

static inline mla_page_options mla_page_options_default(void) {
  mla_page_options o;
  memset(&o, 0, sizeof o);
  o.struct_size = sizeof o;
  o.prefix_reuse = 1;
  return o;
}

typedef struct mla_page_counts {
  size_t struct_size;
  int64_t total;                             ///< pages under management
  int64_t referenced;                        ///< held by someone
  int64_t cached;                            ///< unreferenced, content kept for reuse
  int64_t free;                              ///< unreferenced, no content
  int64_t hits, lookups, evictions, copies;  ///< pages, since the beginning
} mla_page_counts;

/// options may be NULL.
MLA_API mla_status mla_pages_create(int64_t pages, const mla_page_options* options, mla_pages** allocator);
MLA_API mla_status mla_pages_destroy(mla_pages* allocator);
/// count fresh pages with one reference each into pages[count]. MLA_ERROR_OUT_OF_PAGES when fewer are unreferenced;
/// nothing has changed then.
MLA_API mla_status mla_pages_allocate(mla_pages* allocator, int64_t count, int32_t* pages);
/// The longest run of cached pages that matches the front of hashes[count] into pages[count]; each gains a reference.
MLA_API mla_status mla_pages_acquire_prefix(mla_pages* allocator, const uint64_t* hashes, int64_t count, int32_t* pages,
                                            int64_t* acquired);
/// How many pages mla_pages_acquire_prefix would give; changes nothing.
MLA_API mla_status mla_pages_match_prefix(const mla_pages* allocator, const uint64_t* hashes, int64_t count,
                                          int64_t* matched);
/// Publishes a full page's content for reuse under a hash that stands for it and all before it (mla_chain_hash).
MLA_API mla_status mla_pages_publish(mla_pages* allocator, int32_t page, uint64_t hash);
MLA_API mla_status mla_pages_retain(mla_pages* allocator, int32_t page);
/// One owner fewer of each, the last page first: at none, a published page stays cached, another one is free. Each page
/// must have as many owners as it is named times; nothing has changed otherwise.
MLA_API mla_status mla_pages_release(mla_pages* allocator, const int32_t* pages, int64_t count);
/// A page that its caller may write: *copy 0 for the same one, 1 for a fresh one, whose bytes the caller copies from
/// the old one (mla_copy_pages).
MLA_API mla_status mla_pages_make_writable(mla_pages* allocator, int32_t page, int32_t* writable, int32_t* copy);
MLA_API mla_status mla_pages_references(const mla_pages* allocator, int32_t page, int64_t* references);
/// Pages that mla_pages_allocate could hand out now.
MLA_API mla_status mla_pages_available(const mla_pages* allocator, int64_t* available);
/// Fills the fields that counts->struct_size has room for.
MLA_API mla_status mla_pages_counts(const mla_pages* allocator, mla_page_counts* counts);
/// The hash of a page from that of the page before it (0 for the first) and of its own content.
MLA_API uint64_t mla_chain_hash(uint64_t previous, uint64_t content);

/// A cache split over the ranks of a group (decode context parallelism): which rank holds which token of a sequence.
/// Position i is on rank (i / interleave) % ranks, where it is token i / (ranks interleave) * interleave + i %
/// interleave of the rank's own. Positions, lengths and indices count tokens of one sequence from 0; a rank's page
/// table lists the pages of its own tokens alone. MLA_ERROR_INPUT for what is negative, a rank outside the group, a
/// page size below 1 and a page table that ends too early.
typedef struct mla_sharding {
  size_t struct_size;
  int64_t ranks;       ///< 1 to 2^31 - 1; default 1
  int64_t interleave;  ///< tokens that lie together on a rank, 1 to 2^31 - 1; default 1
} mla_sharding;

static inline mla_sharding mla_sharding_default(void) {
  mla_sharding s;
  s.struct_size = sizeof s;
  s.ranks = 1;
  s.interleave = 1;
  return s;
}

/// Who holds a position, and as which of its own tokens. Either may be NULL.
MLA_API mla_status mla_sharding_owner(const mla_sharding* sharding, int64_t position, int64_t* rank, int64_t* index);
/// The position of a rank's token: what mla_sharding_owner takes.
MLA_API mla_status mla_sharding_position(const mla_sharding* sharding, int64_t rank, int64_t index, int64_t* position);
/// How many of a sequence's first `tokens` positions a rank holds. With tokens = p + 1, what a query at p sees of them.
MLA_API mla_status mla_sharding_length(const mla_sharding* sharding, int64_t rank, int64_t tokens, int64_t* length);
/// Length of a rank's page table for a sequence of `tokens`.
MLA_API mla_status mla_sharding_pages(const mla_sharding* sharding, int64_t rank, int64_t tokens, int64_t page_size,
                                      int64_t* pages);
/// Where a rank's cache holds a position, by page_table[pages], its pages of the sequence; -1 on all ranks but the
/// owner.
MLA_API mla_status mla_sharding_slot(const mla_sharding* sharding, int64_t rank, int64_t position,
                                     const int32_t* page_table, int64_t pages, int64_t page_size, int64_t* slot);
/// The position that a rank's slot holds; -1 where its page is not in page_table[pages].
MLA_API mla_status mla_sharding_slot_position(const mla_sharding* sharding, int64_t rank, int64_t slot,
                                              const int32_t* page_table, int64_t pages, int64_t page_size,
                                              int64_t* position);

#ifdef __cplusplus
}
#endif

#endif  // MLA_C_CACHE_H
