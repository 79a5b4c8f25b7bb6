#include "mla/pages.hpp"

#include <cstdint>
#include <string>
#include <unordered_map>

namespace mla {

PageHash chain_hash(PageHash previous, uint64_t content) {
  // Two rounds of splitmix64's finaliser over both words.
  uint64_t z = previous * 0x9e3779b97f4a7c15u + content + 0x632be59bd9b4e019u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// A page is in one of three places: held by someone (references > 0), in the list of cached pages (published,
// unreferenced, least recently used first), or on the stack of free ones.
struct PageAllocator::State {
  struct Page {
    int64_t references = 0;
    PageHash hash = 0;
    bool published = false;
    PageId previous = kNone, next = kNone;  // neighbours among cached pages
  };
  static constexpr PageId kNone = -1;

  Options options;
  std::vector<Page> pages;
  std::vector<PageId> free;  // a stack: recently freed pages are warm
  std::unordered_map<PageHash, PageId> by_hash;
  PageId oldest = kNone, newest = kNone;
  int64_t cached = 0, usable = 0;
  int64_t hits = 0, lookups = 0, evictions = 0, copies = 0;

  PageId first() const { return options.reserve_null_page ? 1 : 0; }

  Page& at(PageId page, const char* what) {
    if (page < first() || page >= static_cast<PageId>(pages.size()))
      throw InputError(std::string(what) + ": page is " + std::to_string(page) + ", allowed " +
                       std::to_string(first()) + " to " + std::to_string(static_cast<int64_t>(pages.size()) - 1));
    return pages[page];
  }
  Page& held(PageId page, const char* what) {
    Page& p = at(page, what);
    if (p.references == 0)
      throw InputError(std::string(what) + ": page " + std::to_string(page) + " is held by no one");
    return p;
  }

  void link_newest(PageId page) {
    Page& p = pages[page];
    p.previous = newest;
    p.next = kNone;
    (newest == kNone ? oldest : pages[newest].next) = page;
    newest = page;
    ++cached;
  }
  void unlink(PageId page) {
    Page& p = pages[page];
    (p.previous == kNone ? oldest : pages[p.previous].next) = p.next;
    (p.next == kNone ? newest : pages[p.next].previous) = p.previous;
    --cached;
  }
  void forget(Page& p) {
    by_hash.erase(p.hash);
    p.published = false;
  }

  int64_t available() const { return static_cast<int64_t>(free.size()) + cached; }

  PageId take() {
    PageId page;
    if (!free.empty()) {
      page = free.back();
      free.pop_back();
    } else {
      page = oldest;
      unlink(page);
      forget(pages[page]);
      ++evictions;
    }
    pages[page].references = 1;
    return page;
  }

  void release(PageId page) {
    Page& p = held(page, "release");
    if (--p.references > 0) return;
    if (p.published) link_newest(page);
    else free.push_back(page);
  }
};

PageAllocator::PageAllocator(int64_t pages) : PageAllocator(pages, Options{}) {}

PageAllocator::PageAllocator(int64_t pages, Options options) : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.options = options;
  if (pages < s.first() || pages > INT32_MAX)
    throw InputError("page allocator: pages is " + std::to_string(pages) + ", allowed " + std::to_string(s.first()) +
                     " to " + std::to_string(INT32_MAX));
  s.pages.resize(static_cast<size_t>(pages));
  s.usable = pages - s.first();
  for (PageId p = static_cast<PageId>(pages) - 1; p >= s.first(); --p) s.free.push_back(p);
}

PageAllocator::~PageAllocator() = default;
PageAllocator::PageAllocator(PageAllocator&&) noexcept = default;
PageAllocator& PageAllocator::operator=(PageAllocator&&) noexcept = default;

std::vector<PageId> PageAllocator::allocate(int64_t count) {
  State& s = *state_;
  if (count < 0) throw InputError("allocate: count is " + std::to_string(count) + ", must not be negative");
  if (count > s.available()) throw OutOfPages(count, s.available(), s.usable);
  std::vector<PageId> pages(static_cast<size_t>(count));
  for (PageId& p : pages) p = s.take();
  return pages;
}

int64_t PageAllocator::match_prefix(std::span<const PageHash> hashes) const {
  int64_t n = 0;
  while (n < static_cast<int64_t>(hashes.size()) && state_->by_hash.contains(hashes[n])) ++n;
  return n;
}

std::vector<PageId> PageAllocator::acquire_prefix(std::span<const PageHash> hashes) {
  State& s = *state_;
  std::vector<PageId> found(static_cast<size_t>(match_prefix(hashes)));
  for (size_t i = 0; i < found.size(); ++i) {
    found[i] = s.by_hash.find(hashes[i])->second;
    if (s.pages[found[i]].references++ == 0) s.unlink(found[i]);
  }
  s.lookups += static_cast<int64_t>(hashes.size());
  s.hits += static_cast<int64_t>(found.size());
  return found;
}

void PageAllocator::publish(PageId page, PageHash hash) {
  State& s = *state_;
  State::Page& p = s.held(page, "publish");
  if (!s.options.prefix_reuse) return;
  if (p.published) {
    if (p.hash == hash) return;
    throw InputError("publish: page " + std::to_string(page) + " already holds published content");
  }
  if (!s.by_hash.try_emplace(hash, page).second) return;
  p.hash = hash;
  p.published = true;
}

void PageAllocator::retain(PageId page) { ++state_->held(page, "retain").references; }

void PageAllocator::release(PageId page) { state_->release(page); }

void PageAllocator::release_all(std::span<const PageId> pages) {
  for (size_t i = pages.size(); i-- > 0;) state_->release(pages[i]);
}

PageAllocator::WritablePage PageAllocator::make_writable(PageId page) {
  State& s = *state_;
  const State::Page& p = s.held(page, "make_writable");
  if (p.references == 1 && !p.published) return {page, false};
  const PageId fresh = allocate(1)[0];  // throws before anything changes
  s.release(page);
  ++s.copies;
  return {fresh, true};
}

int64_t PageAllocator::references(PageId page) const { return state_->at(page, "references").references; }

int64_t PageAllocator::available() const { return state_->available(); }

PageCounts PageAllocator::counts() const {
  const State& s = *state_;
  const int64_t free = static_cast<int64_t>(s.free.size());
  return {.total = s.usable,
          .referenced = s.usable - free - s.cached,
          .cached = s.cached,
          .free = free,
          .hits = s.hits,
          .lookups = s.lookups,
          .evictions = s.evictions,
          .copies = s.copies};
}

}  // namespace mla
