// The page allocator: each rule by name, then thousands of random operations against a naive model.
#include "mla/pages.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <map>
#include <set>

#include "cases/compare.hpp"
#include "support/message.hpp"

namespace mla {
namespace {

using test::message_of;

bool operator==(const PageCounts& a, const PageCounts& b) {
  return std::tie(a.total, a.referenced, a.cached, a.free, a.hits, a.lookups, a.evictions, a.copies) ==
         std::tie(b.total, b.referenced, b.cached, b.free, b.hits, b.lookups, b.evictions, b.copies);
}

TEST(Pages, ExhaustionChangesNothing) {
  PageAllocator pages(3);
  const auto held = pages.allocate(2);
  pages.publish(held[0], 7);
  pages.release(held[0]);
  const PageCounts before = pages.counts();
  try {
    pages.allocate(3);
    FAIL();
  } catch (const OutOfPages& e) {
    EXPECT_EQ(e.wanted(), 3);
    EXPECT_EQ(e.available(), 2);
  }
  EXPECT_TRUE(pages.counts() == before);
  EXPECT_EQ(pages.match_prefix(std::vector<PageHash>{7}), 1);
  EXPECT_EQ(pages.allocate(2).size(), 2u);
  EXPECT_EQ(pages.available(), 0);
}

TEST(Pages, PrefixIsFoundUntilItsFirstGap) {
  PageAllocator pages(4);
  const auto held = pages.allocate(3);
  for (int i = 0; i < 3; ++i) pages.publish(held[i], 10 + i);
  EXPECT_EQ(pages.acquire_prefix(std::vector<PageHash>{10, 11, 99, 12}), (std::vector<PageId>{held[0], held[1]}));
  EXPECT_EQ(pages.references(held[0]), 2);
  EXPECT_EQ(pages.references(held[2]), 1);
  EXPECT_EQ(pages.counts().hits, 2);
  EXPECT_EQ(pages.counts().lookups, 4);
  EXPECT_TRUE(pages.acquire_prefix(std::vector<PageHash>{11, 0}).size() == 1);
  EXPECT_TRUE(pages.acquire_prefix({}).empty());
}

TEST(Pages, EvictsTheLeastRecentlyUsedAndTailsBeforePrefixes) {
  PageAllocator pages(4);
  const auto a = pages.allocate(2), b = pages.allocate(2);
  for (int i = 0; i < 2; ++i) pages.publish(a[i], 100 + i), pages.publish(b[i], 200 + i);
  pages.release_all(a);
  pages.release_all(b);
  pages.release_all(pages.acquire_prefix(std::vector<PageHash>{100, 101}));  // a is used again: b is now the older
  EXPECT_EQ(pages.allocate(1).front(), b[1]);
  EXPECT_EQ(pages.allocate(1).front(), b[0]);
  EXPECT_EQ(pages.allocate(1).front(), a[1]);
  EXPECT_EQ(pages.match_prefix(std::vector<PageHash>{100, 101}), 1);
  EXPECT_EQ(pages.counts().evictions, 3);
}

TEST(Pages, TheFirstPublisherOfAHashStays) {
  PageAllocator pages(2);
  const auto held = pages.allocate(2);
  pages.publish(held[0], 0);  // zero is a hash like any other
  pages.publish(held[0], 0);
  pages.publish(held[1], 0);
  EXPECT_EQ(pages.acquire_prefix(std::vector<PageHash>{0}), std::vector<PageId>{held[0]});
  pages.release(held[1]);
  EXPECT_EQ(pages.counts().free, 1);
  EXPECT_EQ(pages.counts().cached, 0);
}

TEST(Pages, WritesGoToAnUnsharedUnpublishedPage) {
  PageAllocator pages(3);
  const PageId page = pages.allocate(1).front();
  auto same = pages.make_writable(page);
  EXPECT_EQ(same.page, page);
  EXPECT_FALSE(same.copy);

  pages.retain(page);  // shared
  const auto fresh = pages.make_writable(page);
  EXPECT_NE(fresh.page, page);
  EXPECT_TRUE(fresh.copy);
  EXPECT_EQ(pages.references(page), 1);
  EXPECT_EQ(pages.references(fresh.page), 1);

  pages.publish(page, 5);  // published: its content is promised to others
  const auto moved = pages.make_writable(page);
  EXPECT_TRUE(moved.copy);
  EXPECT_EQ(pages.references(page), 0);
  EXPECT_EQ(pages.counts().cached, 1);
  EXPECT_EQ(pages.counts().copies, 2);

  pages.allocate(1);
  pages.retain(moved.page);
  const PageCounts before = pages.counts();
  EXPECT_THROW(pages.make_writable(moved.page), OutOfPages);
  EXPECT_TRUE(pages.counts() == before);
  EXPECT_EQ(pages.references(moved.page), 2);
}

TEST(Pages, NullPageIsNeverHandedOut) {
  PageAllocator pages(3, {.reserve_null_page = true});
  EXPECT_EQ(pages.counts().total, 2);
  EXPECT_EQ(pages.allocate(2), (std::vector<PageId>{1, 2}));
  EXPECT_THROW(pages.allocate(1), OutOfPages);
  EXPECT_EQ(message_of<InputError>([&] { pages.retain(0); }), "retain: page is 0, allowed 1 to 2");
}

TEST(Pages, WithoutPrefixReuseNothingIsKept) {
  PageAllocator pages(1, {.prefix_reuse = false});
  const PageId page = pages.allocate(1).front();
  pages.publish(page, 1);
  EXPECT_EQ(pages.match_prefix(std::vector<PageHash>{1}), 0);
  pages.release(page);
  EXPECT_EQ(pages.counts().free, 1);
}

TEST(Pages, MisuseNamesThePage) {
  PageAllocator pages(4);
  const PageId page = pages.allocate(1).front();
  pages.release(page);
  const PageCounts before = pages.counts();
  EXPECT_EQ(message_of<InputError>([&] { pages.release(page); }), "release: page 0 is held by no one");
  EXPECT_EQ(message_of<InputError>([&] { pages.retain(page); }), "retain: page 0 is held by no one");
  EXPECT_EQ(message_of<InputError>([&] { pages.publish(3, 1); }), "publish: page 3 is held by no one");
  EXPECT_EQ(message_of<InputError>([&] { pages.make_writable(2); }), "make_writable: page 2 is held by no one");
  EXPECT_EQ(message_of<InputError>([&] { pages.release(4); }), "release: page is 4, allowed 0 to 3");
  EXPECT_EQ(message_of<InputError>([&] { pages.references(-1); }), "references: page is -1, allowed 0 to 3");
  EXPECT_EQ(message_of<InputError>([&] { pages.allocate(-1); }), "allocate: count is -1, must not be negative");
  EXPECT_EQ(message_of<InputError>([] { PageAllocator(-1); }), "page allocator: pages is -1, allowed 0 to 2147483647");
  EXPECT_EQ(message_of<InputError>([] { PageAllocator(0, {.reserve_null_page = true}); }),
            "page allocator: pages is 0, allowed 1 to 2147483647");
  EXPECT_TRUE(pages.counts() == before);
  pages.allocate(1);
  pages.publish(0, 1);
  EXPECT_EQ(message_of<InputError>([&] { pages.publish(0, 2); }), "publish: page 0 already holds published content");
}

TEST(Pages, ChainedHashesDependOnTheWholePrefix) {
  std::set<PageHash> seen;
  for (uint64_t first = 0; first < 64; ++first)
    for (uint64_t second = 0; second < 64; ++second) seen.insert(chain_hash(chain_hash(0, first), second));
  EXPECT_EQ(seen.size(), 64u * 64u);
  EXPECT_EQ(chain_hash(1, 2), chain_hash(1, 2));
}

// The rules written down with sets and a list, slow and plain.
struct Model {
  std::map<PageId, int64_t> references;  // held pages
  std::map<PageId, PageHash> published;
  std::list<PageId> cached;  // oldest first
  std::set<PageId> free;
  PageCounts counts;

  std::map<PageHash, PageId> index() const {
    std::map<PageHash, PageId> m;
    for (auto [page, hash] : published) m[hash] = page;
    return m;
  }
  void take(PageId page) {
    if (!free.empty()) {
      ASSERT_TRUE(free.erase(page)) << "page " << page << " is not free";
    } else {
      ASSERT_EQ(page, cached.front());
      cached.pop_front();
      published.erase(page);
      ++counts.evictions;
    }
    references[page] = 1;
  }
  void release(PageId page) {
    if (--references.at(page) > 0) return;
    references.erase(page);
    if (published.contains(page)) cached.push_back(page);
    else free.insert(page);
  }
};

void agree(const PageAllocator& pages, Model& m, int64_t first, int64_t total) {
  m.counts.total = total;
  m.counts.referenced = static_cast<int64_t>(m.references.size());
  m.counts.cached = static_cast<int64_t>(m.cached.size());
  m.counts.free = static_cast<int64_t>(m.free.size());
  ASSERT_EQ(m.counts.referenced + m.counts.cached + m.counts.free, total);
  ASSERT_TRUE(pages.counts() == m.counts);
  ASSERT_EQ(pages.available(), m.counts.cached + m.counts.free);
  for (int64_t p = first; p < first + total; ++p) {
    const PageId page = static_cast<PageId>(p);
    ASSERT_EQ(pages.references(page), m.references.contains(page) ? m.references.at(page) : 0) << "page " << page;
  }
}

class RandomPages : public testing::TestWithParam<uint64_t> {};

TEST_P(RandomPages, AgreeWithTheModel) {
  cases::Random random(GetParam());
  const bool null_page = random.integer(0, 1) == 1, reuse = random.integer(0, 4) > 0;
  const int64_t total = random.integer(1, 40), first = null_page ? 1 : 0;
  PageAllocator pages(total + first, {.reserve_null_page = null_page, .prefix_reuse = reuse});
  Model m;
  for (int64_t p = first; p < first + total; ++p) m.free.insert(static_cast<PageId>(p));
  auto any_held = [&] { return std::next(m.references.begin(), random.integer(0, m.references.size() - 1))->first; };

  for (int step = 0; step < 4000; ++step) {
    const int64_t what = random.integer(0, 9);
    if (what <= 2) {
      const int64_t count = random.integer(0, 1 + total / 4);
      if (count > static_cast<int64_t>(m.free.size() + m.cached.size())) {
        ASSERT_THROW(pages.allocate(count), OutOfPages);
      } else {
        for (PageId page : pages.allocate(count)) m.take(page);
      }
    } else if (what == 3) {
      std::vector<PageHash> hashes(random.integer(0, 4));
      for (PageHash& h : hashes) h = random.integer(0, 12);
      std::vector<PageId> expected;
      const auto index = m.index();
      for (PageHash h : hashes) {
        if (!index.contains(h)) break;
        expected.push_back(index.at(h));
      }
      ASSERT_EQ(pages.match_prefix(hashes), static_cast<int64_t>(expected.size()));
      ASSERT_EQ(pages.acquire_prefix(hashes), expected);
      for (PageId page : expected) {
        m.cached.remove(page);
        ++m.references[page];
      }
      m.counts.lookups += static_cast<int64_t>(hashes.size());
      m.counts.hits += static_cast<int64_t>(expected.size());
    } else if (m.references.empty()) {
      const PageId page = static_cast<PageId>(random.integer(-3, total + 3));
      ASSERT_THROW(pages.release(page), InputError);
      ASSERT_THROW(pages.publish(page, 1), InputError);
    } else if (what <= 5) {
      const PageId page = any_held();
      const PageHash hash = random.integer(0, 12);
      if (reuse && m.published.contains(page) && m.published.at(page) != hash) {
        ASSERT_THROW(pages.publish(page, hash), InputError);
      } else {
        pages.publish(page, hash);
        if (reuse && !m.index().contains(hash)) m.published[page] = hash;
      }
    } else if (what == 6) {
      const PageId page = any_held();
      pages.retain(page);
      ++m.references[page];
    } else if (what == 7) {
      const PageId page = any_held();
      if (m.references.at(page) == 1 && !m.published.contains(page)) {
        const auto w = pages.make_writable(page);
        ASSERT_EQ(w.page, page);
        ASSERT_FALSE(w.copy);
      } else if (m.free.empty() && m.cached.empty()) {
        ASSERT_THROW(pages.make_writable(page), OutOfPages);
      } else {
        const auto w = pages.make_writable(page);
        ASSERT_TRUE(w.copy);
        m.take(w.page);
        m.release(page);
        ++m.counts.copies;
      }
    } else if (what == 8) {
      std::vector<PageId> some;
      for (auto [page, count] : m.references)
        if (random.integer(0, 2) == 0) some.push_back(page);
      pages.release_all(some);
      for (size_t i = some.size(); i-- > 0;) m.release(some[i]);
    } else {
      const PageId page = any_held();
      pages.release(page);
      m.release(page);
    }
    agree(pages, m, first, total);
    if (HasFatalFailure()) FAIL() << "after step " << step << ", operation " << what;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPages, testing::Range<uint64_t>(1, 25));

}  // namespace
}  // namespace mla
