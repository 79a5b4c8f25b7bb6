// Which page holds what: allocation, reference counts, prefix reuse, eviction, copy on write. Host bookkeeping only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "mla/error.hpp"

namespace mla {

using PageId = int32_t;

/// Hash of a full page's content, chained: the caller mixes in the hash of the page before it, so equal hashes mean
/// equal prefixes. Zero is a hash like any other.
using PageHash = uint64_t;
PageHash chain_hash(PageHash previous, uint64_t content);

struct PageCounts {
  int64_t total = 0;                                         ///< pages under management (without a reserved null page)
  int64_t referenced = 0;                                    ///< held by someone
  int64_t cached = 0;                                        ///< unreferenced, content kept for reuse, evictable
  int64_t free = 0;                                          ///< unreferenced, no content
  int64_t hits = 0, lookups = 0, evictions = 0, copies = 0;  ///< pages, since construction
};

/// Allocates the pages of one cache. Every operation is O(1) a page. Not thread-safe: one owner.
/// InputError naming the page for an id outside the pool (or the null page), or for one that nobody holds where an
/// owner acts.
class PageAllocator {
 public:
  struct Options {
    bool reserve_null_page = false;  ///< page 0 is never handed out
    bool prefix_reuse = true;
  };
  explicit PageAllocator(int64_t pages);
  PageAllocator(int64_t pages, Options options);
  ~PageAllocator();
  PageAllocator(PageAllocator&&) noexcept;
  PageAllocator& operator=(PageAllocator&&) noexcept;

  /// count fresh pages, each with one reference, evicting cached pages least recently used first.
  /// OutOfPages when fewer than count are unreferenced; nothing has changed then.
  std::vector<PageId> allocate(int64_t count);
  /// The longest run of cached pages that matches the front of `hashes`; each gains a reference.
  std::vector<PageId> acquire_prefix(std::span<const PageHash> hashes);
  /// How many pages acquire_prefix would return; changes nothing.
  int64_t match_prefix(std::span<const PageHash> hashes) const;
  /// Publishes a full page's content for reuse. If another page already holds this hash, the earlier one stays the one
  /// found. InputError when the page is published under another hash.
  void publish(PageId page, PageHash hash);
  /// One more owner.
  void retain(PageId page);
  /// One owner fewer; at zero a published page becomes cached (most recently used), another one free.
  void release(PageId page);
  /// release() for a sequence's pages, last page first, so that prefixes outlive their tails.
  void release_all(std::span<const PageId> pages);

  struct WritablePage {
    PageId page;
    bool copy;  ///< the caller must copy the old page's bytes into `page`
  };
  /// A page that its caller may write: the same one when unshared and unpublished, otherwise a fresh one (the reference
  /// moves over). OutOfPages when a fresh one is needed and none is left; nothing has changed then.
  WritablePage make_writable(PageId page);

  int64_t references(PageId page) const;
  int64_t available() const;  ///< pages allocate() could hand out now
  PageCounts counts() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mla
