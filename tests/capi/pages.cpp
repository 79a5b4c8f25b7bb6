// The page allocator, the caches' memory, and caches split over ranks.
#include "call.hpp"

namespace capi {
namespace {

TEST(CPages, AllocateReleaseAndRunOut) {
  Pages pool;
  mla_page_options options = mla_page_options_default();
  options.reserve_null_page = 1;
  ASSERT_OK(mla_pages_create(4, &options, &pool));
  int32_t pages[4] = {-1, -1, -1, -1};
  ASSERT_OK(mla_pages_allocate(pool, 3, pages));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(pages[i] >= 1 && pages[i] <= 3);
  EXPECT_EQ(MLA_ERROR_OUT_OF_PAGES, mla_pages_allocate(pool, 1, pages + 3)) << mla_last_error();
  int64_t n = -1;
  EXPECT_OK(mla_pages_available(pool, &n));
  EXPECT_EQ(n, 0);
  EXPECT_OK(mla_pages_retain(pool, pages[0]));
  EXPECT_OK(mla_pages_references(pool, pages[0], &n));
  EXPECT_EQ(n, 2);
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_pages_retain(pool, 0), "page is 0, allowed 1 to 3");
  EXPECT_EQ(MLA_ERROR_INPUT, mla_pages_retain(pool, 4));

  // A list that names a page once too often changes nothing.
  const int32_t twice[] = {pages[1], pages[1]};
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_pages_release(pool, twice, 2), "released 2 times, it has 1 owners");
  EXPECT_OK(mla_pages_references(pool, pages[1], &n));
  EXPECT_EQ(n, 1);
  EXPECT_OK(mla_pages_release(pool, pages, 3));
  EXPECT_OK(mla_pages_release(pool, pages, 1));
  EXPECT_EQ(MLA_ERROR_INPUT, mla_pages_release(pool, pages, 1));
  EXPECT_OK(mla_pages_available(pool, &n));
  EXPECT_EQ(n, 3);
}

TEST(CPages, PrefixesAreFoundAgain) {
  Pages pool;
  ASSERT_OK(mla_pages_create(8, nullptr, &pool));
  int32_t pages[3];
  ASSERT_OK(mla_pages_allocate(pool, 3, pages));
  uint64_t hashes[4] = {mla_chain_hash(0, 11)};
  for (int i = 1; i < 4; ++i) hashes[i] = mla_chain_hash(hashes[i - 1], 11 + i);
  for (int i = 0; i < 3; ++i) ASSERT_OK(mla_pages_publish(pool, pages[i], hashes[i]));
  ASSERT_OK(mla_pages_release(pool, pages, 3));

  int64_t n = 0;
  EXPECT_OK(mla_pages_match_prefix(pool, hashes, 4, &n));
  EXPECT_EQ(n, 3);
  int32_t found[4] = {-1, -1, -1, -1};
  EXPECT_OK(mla_pages_acquire_prefix(pool, hashes, 4, found, &n));
  EXPECT_EQ(n, 3);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(found[i], pages[i]);
  EXPECT_EQ(found[3], -1);

  // A published page is written in a copy.
  int32_t writable = -1, copy = -1;
  EXPECT_OK(mla_pages_make_writable(pool, found[2], &writable, &copy));
  EXPECT_EQ(copy, 1);
  EXPECT_NE(writable, found[2]);
  int32_t same = -1;
  EXPECT_OK(mla_pages_make_writable(pool, writable, &same, &copy));
  EXPECT_EQ(copy, 0);
  EXPECT_EQ(same, writable);
  mla_page_counts counts = make<mla_page_counts>();
  EXPECT_OK(mla_pages_counts(pool, &counts));
  EXPECT_EQ(counts.total, 8);
  EXPECT_EQ(counts.referenced, 3);
  EXPECT_EQ(counts.cached, 1);
  EXPECT_EQ(counts.copies, 1);
  EXPECT_EQ(counts.hits, 3);
}

TEST(CPages, ImpossibleCallsAreRefused) {
  mla_pages* none = nullptr;
  EXPECT_EQ(MLA_ERROR_INPUT, mla_pages_create(-1, nullptr, &none));
  Pages pool;
  ASSERT_OK(mla_pages_create(4, nullptr, &pool));
  int32_t page = 0;
  int64_t n = 0;
  EXPECT_EQ(MLA_ERROR_INPUT, mla_pages_allocate(pool, -1, &page));
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_pages_allocate(pool, 1, nullptr));
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_pages_match_prefix(pool, nullptr, 2, &n));
  EXPECT_EQ(MLA_ERROR_SHAPE, mla_pages_match_prefix(pool, nullptr, -2, &n));
  EXPECT_OK(mla_pages_match_prefix(pool, nullptr, 0, &n));
}

TEST(CCaches, DescribeThemselves) {
  Model model;
  ASSERT_OK(mla_model_create_preset("deepseek-v3.2", &model));
  mla_cache_spec spec = mla_cache_spec_default();
  ASSERT_OK(mla_cache_spec_of(model, MLA_CACHE_FP8_DS_MLA, 64, &spec));
  size_t bytes = 0, stride = 0;
  EXPECT_OK(mla_cache_page_bytes(&spec, &bytes));
  EXPECT_EQ(bytes, 64u * 656);
  Cache cache;
  ASSERT_OK(mla_cache_create(&spec, 3, kCpu, &cache));
  mla_cache_spec found = mla_cache_spec_default();
  int64_t pages = 0;
  void* data = nullptr;
  EXPECT_OK(mla_cache_get(cache, &found, &pages, &data, &stride));
  EXPECT_EQ(0, std::memcmp(&found, &spec, sizeof spec));
  EXPECT_EQ(pages, 3);
  EXPECT_NE(data, nullptr);
  EXPECT_EQ(stride, bytes);

  mla_index_cache_spec index = mla_index_cache_spec_default();
  ASSERT_OK(mla_index_cache_spec_of(model, &spec, MLA_INDEX_CACHE_FP8, &index));
  EXPECT_OK(mla_index_cache_page_bytes(&index, &bytes));
  EXPECT_EQ(bytes, 64u * 132);
  IndexCache keys;
  ASSERT_OK(mla_index_cache_create(&index, 3, kCpu, &keys));
  EXPECT_OK(mla_index_cache_get(keys, nullptr, &pages, nullptr, nullptr));
  EXPECT_EQ(pages, 3);

  Bytes memory(3 * (bytes + 32));
  IndexCache borrowed;
  ASSERT_OK(mla_index_cache_create_in(&index, 3, memory.data, bytes + 32, kCpu, &borrowed));
  mla_index_cache_spec found_index = mla_index_cache_spec_default();
  EXPECT_OK(mla_index_cache_get(borrowed, &found_index, &pages, &data, &stride));
  EXPECT_EQ(0, std::memcmp(&found_index, &index, sizeof index));
  EXPECT_EQ(pages, 3);
  EXPECT_EQ(data, memory.data);
  EXPECT_EQ(stride, bytes + 32);
}

TEST(CCaches, CallersMemoryIsChecked) {
  mla_cache_spec spec = mla_cache_spec_default();
  size_t bytes = 0;
  ASSERT_OK(mla_cache_page_bytes(&spec, &bytes));
  Bytes memory(3 * (bytes + 64));
  mla_cache* none = nullptr;
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_cache_create_in(&spec, 3, nullptr, 0, kCpu, &none));
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_cache_create_in(&spec, 3, memory.data, bytes - 16, kCpu, &none), "page_stride");
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_cache_create_in(&spec, 3, memory.data, bytes + 8, kCpu, &none), "multiple of 16");
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_cache_create_in(&spec, -1, memory.data, 0, kCpu, &none), "pages is -1");
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_cache_create_in(&spec, 3, static_cast<char*>(memory.data) + 4, 0, kCpu, &none),
               "4 past a multiple");
  spec.latent = -1;
  EXPECT_EQ(MLA_ERROR_SHAPE, mla_cache_create(&spec, 3, kCpu, &none));
  spec = mla_cache_spec_default();
  spec.format = MLA_CACHE_FP8_DS_MLA;
  spec.latent = 256;
  EXPECT_EQ(MLA_ERROR_UNSUPPORTED, mla_cache_create(&spec, 3, kCpu, &none));
  EXPECT_EQ(none, nullptr);
  const mla_index_cache_spec index = mla_index_cache_spec_default();
  mla_index_cache* no_keys = nullptr;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_index_cache_create_in(&index, 3, memory.data, 16, kCpu, &no_keys), "page_stride");
  EXPECT_EQ(no_keys, nullptr);
}

// All is said of the library's own type in tests/cache/sharding.cpp; here, that every argument arrives.
TEST(CSharding, EveryPositionGoesToItsRankAndBack) {
  mla_sharding sharding = mla_sharding_default();
  sharding.ranks = 3;
  sharding.interleave = 2;
  const int32_t table[] = {9, 4, 6};
  int64_t held[3] = {0, 0, 0}, rank = -1, index = -1, n = -1;
  for (int64_t p = 0; p < 17; ++p) {
    ASSERT_OK(mla_sharding_owner(&sharding, p, &rank, &index));
    EXPECT_EQ(rank, p / 2 % 3);
    EXPECT_EQ(index, held[rank]++);
    EXPECT_OK(mla_sharding_position(&sharding, rank, index, &n));
    EXPECT_EQ(n, p);
    for (int64_t r = 0; r < 3; ++r) {
      EXPECT_OK(mla_sharding_length(&sharding, r, p + 1, &n));
      EXPECT_EQ(n, held[r]);
      EXPECT_OK(mla_sharding_pages(&sharding, r, p + 1, 4, &n));
      EXPECT_EQ(n, (held[r] + 3) / 4);
      EXPECT_OK(mla_sharding_slot(&sharding, r, p, table, 3, 4, &n));
      EXPECT_EQ(n, r == rank ? table[index / 4] * 4 + index % 4 : -1);
    }
    int64_t slot = -1;
    EXPECT_OK(mla_sharding_slot(&sharding, rank, p, table, 3, 4, &slot));
    EXPECT_OK(mla_sharding_slot_position(&sharding, rank, slot, table, 3, 4, &n));
    EXPECT_EQ(n, p);
  }
  EXPECT_OK(mla_sharding_owner(&sharding, 5, nullptr, nullptr));
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_sharding_length(&sharding, 3, 5, &n), "rank is 3, allowed 0 to 2");
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_sharding_slot(&sharding, 0, 30, table, 2, 4, &n), "page of the position is 2");
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_sharding_slot(&sharding, 0, 0, table, -1, 4, &n), "pages is -1");
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_sharding_slot(&sharding, 0, 0, nullptr, 2, 4, &n), "page_table is NULL");
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_sharding_pages(&sharding, 0, 9, 4, nullptr), "pages is NULL");
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_sharding_position(nullptr, 0, 9, &n), "sharding is NULL");
  sharding.interleave = 0;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_sharding_owner(&sharding, 5, &rank, &index), "interleave is 0");
}

}  // namespace
}  // namespace capi
