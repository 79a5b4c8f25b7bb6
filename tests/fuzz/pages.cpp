// Any sequence of calls to the page allocator, beside a model that keeps everything in plain maps.
#include "mla/pages.hpp"

#include <algorithm>
#include <list>
#include <map>
#include <vector>

#include "fuzz/fuzz.hpp"

using namespace mla;

namespace {

struct Model {
  int64_t first, total;
  bool reuse;
  std::vector<int64_t> references;
  std::vector<bool> published;
  std::vector<PageHash> hash;
  std::map<PageHash, PageId> found;
  std::list<PageId> cached;  // unreferenced with content, the next to be evicted first
  int64_t hits = 0, lookups = 0, evictions = 0, copies = 0;

  Model(int64_t pages, PageAllocator::Options o)
      : first(o.reserve_null_page),
        total(pages - first),
        reuse(o.prefix_reuse),
        references(pages),
        published(pages),
        hash(pages) {}
  bool known(PageId p) const { return p >= first && p < static_cast<PageId>(references.size()); }
  int64_t referenced() const {
    return std::count_if(references.begin(), references.end(), [](int64_t n) { return n > 0; });
  }
  int64_t available() const { return total - referenced(); }
  void forget(PageId p) {
    const auto it = found.find(hash[p]);
    if (published[p] && it != found.end() && it->second == p) found.erase(it);
    published[p] = false;
  }
  // A page that the allocator handed out as fresh.
  void take(PageId p) {
    FUZZ_CHECK(known(p) && references[p] == 0);
    const auto it = std::find(cached.begin(), cached.end(), p);
    if (it != cached.end()) {
      // Only when nothing is free, and the one that was left alone longest.
      FUZZ_CHECK(it == cached.begin() && referenced() + static_cast<int64_t>(cached.size()) == total);
      cached.erase(it);
      ++evictions;
    }
    forget(p);
    references[p] = 1;
  }
  void release(PageId p) {
    if (--references[p] > 0) return;
    const auto it = found.find(hash[p]);
    if (published[p] && it != found.end() && it->second == p) cached.push_back(p);
    else published[p] = false;
  }
  int64_t match(const std::vector<PageHash>& hashes) const {
    int64_t n = 0;
    while (n < static_cast<int64_t>(hashes.size()) && found.count(hashes[n])) ++n;
    return n;
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Source in(data, size);
  const PageAllocator::Options options{.reserve_null_page = in.flag(), .prefix_reuse = in.flag()};
  const int64_t pages = in.within(1, 12) + options.reserve_null_page;
  PageAllocator allocator(pages, options);
  Model model(pages, options);
  std::vector<PageId> held;  // once for each reference
  while (!in.empty()) {
    uint8_t op = in.byte() % 8;
    const bool any = in.byte() > 230;
    if (held.empty() && !any && op > 2) op %= 3;  // nothing to do them with
    const PageId page = held.empty() || any ? static_cast<PageId>(in.odd(-1, pages)) : held[in.byte() % held.size()];
    const bool owned = model.known(page) && model.references[page] > 0;
    auto drop = [&] { held.erase(std::find(held.begin(), held.end(), page)); };
    switch (op) {
      case 0: {
        const int64_t count = in.odd(0, pages);
        std::vector<PageId> got;
        const int64_t before = model.available();
        const bool no = fuzz::refused([&] { got = allocator.allocate(count); });
        FUZZ_CHECK(no == (count < 0 || count > before));
        if (no) break;
        FUZZ_CHECK(static_cast<int64_t>(got.size()) == count);
        for (PageId p : got) model.take(p), held.push_back(p);
        break;
      }
      case 1:
      case 2: {
        std::vector<PageHash> hashes(in.within(0, 6));
        for (PageHash& h : hashes) h = in.byte() % 9;
        const int64_t expected = model.match(hashes);
        FUZZ_CHECK(allocator.match_prefix(hashes) == expected);
        if (op == 1) break;
        const std::vector<PageId> got = allocator.acquire_prefix(hashes);
        FUZZ_CHECK(static_cast<int64_t>(got.size()) == expected);
        model.lookups += static_cast<int64_t>(hashes.size());
        model.hits += expected;
        for (int64_t i = 0; i < expected; ++i) {
          const PageId p = got[i];
          FUZZ_CHECK(p == model.found.at(hashes[i]));
          if (model.references[p]++ == 0) model.cached.remove(p);
          held.push_back(p);
        }
        break;
      }
      case 3: {
        const PageHash hash = in.byte() % 9;
        const bool no = fuzz::refused([&] { allocator.publish(page, hash); });
        FUZZ_CHECK(no == (!owned || (model.reuse && model.published[page] && model.hash[page] != hash)));
        if (no || !model.reuse) break;
        if (!model.published[page] && model.found.emplace(hash, page).second) {
          model.published[page] = true;
          model.hash[page] = hash;
        }
        break;
      }
      case 4: {
        const bool no = fuzz::refused([&] { allocator.retain(page); });
        FUZZ_CHECK(no == !owned);
        if (!no) ++model.references[page], held.push_back(page);
        break;
      }
      case 5: {
        const bool no = fuzz::refused([&] { allocator.release(page); });
        FUZZ_CHECK(no == !owned);
        if (!no) model.release(page), drop();
        break;
      }
      case 6: {
        PageAllocator::WritablePage got{};
        const bool stays = owned && model.references[page] == 1 && !model.published[page];
        const bool room = owned && (stays || model.available() > 0);
        const bool no = fuzz::refused([&] { got = allocator.make_writable(page); });
        FUZZ_CHECK(no == !room);
        if (no) break;
        FUZZ_CHECK(got.copy == !stays && (got.page == page) == stays);
        if (stays) break;
        model.take(got.page);
        ++model.copies;
        drop();
        model.release(page);
        held.push_back(got.page);
        break;
      }
      default: {
        std::vector<PageId> all = held;
        const size_t keep = all.empty() ? 0 : in.byte() % (all.size() + 1);
        all.erase(all.begin(), all.begin() + static_cast<ptrdiff_t>(keep));
        allocator.release_all(all);
        for (auto p = all.rbegin(); p != all.rend(); ++p) model.release(*p);
        held.resize(keep);
      }
    }
    const PageCounts c = allocator.counts();
    const int64_t referenced = model.referenced(), available = model.total - referenced;
    FUZZ_CHECK(c.total == model.total && c.referenced == referenced &&
               c.cached == static_cast<int64_t>(model.cached.size()) && c.free == available - c.cached);
    FUZZ_CHECK(c.hits == model.hits && c.lookups == model.lookups && c.evictions == model.evictions &&
               c.copies == model.copies);
    FUZZ_CHECK(allocator.available() == available);
    for (PageId p = static_cast<PageId>(model.first); p < pages; ++p)
      FUZZ_CHECK(allocator.references(p) == model.references[p]);
  }
  return 0;
}
