#include "mla/batch.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <vector>

#include "core/find_twice.hpp"
#include "mla/error.hpp"
#include "plan/internal.hpp"

namespace mla {
namespace {

std::string n(int64_t x) { return std::to_string(x); }

[[noreturn]] void fail(const std::string& why) { throw BatchError("batch: " + why); }

// Of a request's first pages; those below 0 are the largest of all.
uint64_t largest_page(const View<const int32_t, Request, Page>& table, int64_t request, int64_t pages) {
  uint32_t largest = 0;
  const int32_t* row = &table(request, 0);
  if (const int64_t stride = table.stride<Page>(); stride == 1)
    for (int64_t p = 0; p < pages; ++p) largest = std::max(largest, static_cast<uint32_t>(row[p]));
  else
    for (int64_t p = 0; p < pages; ++p) largest = std::max(largest, static_cast<uint32_t>(row[p * stride]));
  return largest;
}

// Every slot is the one of its token's position; gives the pages written, once for each request and page.
std::vector<int32_t> check_slots(const Batch& b, int64_t pages, int64_t page_size) {
  std::vector<int32_t> written;
  for (int64_t r = 0; r < b.requests(); ++r) {
    const int64_t begin = b.query_start_loc[r], first = b.context_len(r) - begin;  // position - token
    for (int64_t t = begin, end = b.query_start_loc[r + 1]; t < end;) {
      const int64_t page = (first + t) / page_size, id = b.block_table(r, page);
      const int64_t slot = (id - page) * page_size + first, page_end = std::min(end, (page + 1) * page_size - first);
      // Vectors of the compiler's look first; the one that is wrong is found when there is one.
      const int32_t* slots = b.slot_mapping.data();
      const int64_t from = t;
      bool writes = false, wrong = false;
      for (; t < page_end; ++t) {
        writes |= slots[t] >= 0;
        wrong |= slots[t] >= 0 && slots[t] != slot + t;
      }
      for (int64_t at = from; wrong; ++at) {
        const int64_t found = slots[at];
        if (found < 0 || found == slot + at) continue;
        if (found >= pages * page_size)
          fail("slot_mapping[" + n(at) + "] is " + n(found) + ", the cache has " + n(pages * page_size) + " slots");
        fail("request " + n(r) + ": slot_mapping[" + n(at) + "] is " + n(found) + ", its token's position " +
             n(first + at) + " is slot " + n(slot + at) + " (block_table[" + n(page) + "] is " + n(id) + ", pages of " +
             n(page_size) + "); below 0 writes nothing");
      }
      if (writes) written.push_back(static_cast<int32_t>(id));
    }
  }
  return written;
}

bool any_twice(std::span<const int32_t> pages) {
  if (pages.size() < 2) return false;
  const size_t mask = std::bit_ceil(2 * pages.size()) - 1;
  std::vector<int32_t> seen(mask + 1, -1);
  for (const int32_t page : pages) {
    size_t at = (static_cast<uint32_t>(page) * 0x9e3779b97f4a7c15u >> 32) & mask;
    for (; seen[at] >= 0; at = (at + 1) & mask)
      if (seen[at] == page) return true;
    seen[at] = page;
  }
  return false;
}

// Two tokens with one slot: only in a page that is written for two requests, or stands twice in a block table.
void check_single_writers(const Batch& b, std::span<const int32_t> written) {
  if (!any_twice(written)) return;
  if (const auto tokens = find_twice(b.slot_mapping)) {
    const auto [first, second] = *tokens;
    fail("slot_mapping[" + std::to_string(second) + "] is " + n(b.slot_mapping[second]) + ", the slot of token " +
         std::to_string(first) + " too: one of them would be lost");
  }
}

void require_data(const char* name, const int32_t* data, bool entries) {
  if (entries && !data) fail(std::string(name) + " has no data");
}

[[noreturn]] void fail_at(int64_t request, const std::string& why) { fail("request " + n(request) + ": " + why); }

}  // namespace

namespace planning {

void validate_lengths(const Batch& b) {
  const int64_t requests = b.requests();
  require_data("query_start_loc", b.query_start_loc.data(), !b.query_start_loc.empty());
  require_data("seq_lens", b.seq_lens.data(), requests > 0);
  if (static_cast<int64_t>(b.query_start_loc.size()) != requests + 1)
    fail("query_start_loc has " + n(static_cast<int64_t>(b.query_start_loc.size())) + " entries, " + n(requests) +
         " requests need " + n(requests + 1));
  if (b.query_start_loc[0] != 0) fail("query_start_loc[0] is " + n(b.query_start_loc[0]) + ", must be 0");
  for (int64_t r = 0; r < requests; ++r) {
    if (b.query_start_loc[r + 1] < b.query_start_loc[r])
      fail_at(r, "query_start_loc falls from " + n(b.query_start_loc[r]) + " to " + n(b.query_start_loc[r + 1]));
    if (b.seq_lens[r] < 0) fail_at(r, "seq_len is " + n(b.seq_lens[r]) + ", must not be negative");
    if (b.seq_lens[r] < b.query_len(r))
      fail_at(r, "seq_len is " + n(b.seq_lens[r]) + ", below its " + n(b.query_len(r)) + " new tokens");
  }
  if (b.prompt_lens.empty()) return;
  require_data("prompt_lens", b.prompt_lens.data(), true);
  if (std::ssize(b.prompt_lens) != requests)
    fail("prompt_lens has " + n(std::ssize(b.prompt_lens)) + " entries, the batch has " + n(requests) + " requests");
  for (int64_t r = 0; r < requests; ++r)
    if (b.prompt_lens[r] < 0) fail_at(r, "prompt_len is " + n(b.prompt_lens[r]) + ", must not be negative");
}

bool is_prompt(const Batch& b, int64_t r) {
  if (b.prompt_lens.empty()) fail("path policy by_prompt needs prompt_lens, there are none");
  const int64_t context = b.context_len(r), prompt = b.prompt_lens[r];
  if (context < prompt && b.seq_lens[r] > prompt)
    fail_at(r, "brings tokens " + n(context) + " to " + n(b.seq_lens[r] - 1) + " of a prompt of " + n(prompt) +
                   ": by path policy by_prompt a step ends where the prompt does");
  return context < prompt;
}

void validate_new(const Batch& b) {
  validate_lengths(b);
  for (int64_t r = 0; r < b.requests(); ++r)
    if (b.query_len(r) > 0 && b.context_len(r) > 0)
      fail_at(r, "seq_len is " + n(b.seq_lens[r]) + " with " + n(b.query_len(r)) +
                     " new tokens: without a cache there is no context");
}

}  // namespace planning

namespace {

// needed(r): pages of a request's cached tokens.
template <class Needed>
void validate_pages(const Batch& b, int64_t pages, int64_t page_size, Needed needed_of) {
  const int64_t requests = b.requests();
  constexpr int64_t kMostSlots = std::numeric_limits<int32_t>::max();
  if (page_size < 1 || pages < 0 || pages > kMostSlots / page_size)
    fail("a cache of " + n(pages) + " pages of " + n(page_size) + " cannot be, slots go up to " + n(kMostSlots));
  planning::validate_lengths(b);
  require_data("block table", b.block_table.data(), requests > 0 && b.block_table.extent<Page>() > 0);
  require_data("slot_mapping", b.slot_mapping.data(), !b.slot_mapping.empty());
  if (requests > 0 && b.block_table.extent<Request>() < requests)
    fail("block table has " + n(b.block_table.extent<Request>()) + " rows, " + n(requests) + " requests need as many");
  for (int64_t r = 0; r < requests; ++r) {
    if (b.query_len(r) == 0) continue;  // nothing to do: its table is not read
    const int64_t needed = needed_of(r);
    if (needed == 0) continue;
    if (needed > b.block_table.extent<Page>())
      fail_at(r, "seq_len " + n(b.seq_lens[r]) + " needs " + n(needed) + " pages of " + n(page_size) +
                     ", block table has " + n(b.block_table.extent<Page>()));
    const bool all_there = largest_page(b.block_table, r, needed) < static_cast<uint64_t>(pages);
    for (int64_t p = 0; !all_there && p < needed; ++p)
      if (const int32_t page = b.block_table(r, p); page < 0 || page >= pages)
        fail_at(r, "block_table[" + n(p) + "] is " + n(page) + ", the cache has " + n(pages) + " pages");
  }
  if (static_cast<int64_t>(b.slot_mapping.size()) != b.tokens())
    fail("slot_mapping has " + n(static_cast<int64_t>(b.slot_mapping.size())) + " entries, the batch has " +
         n(b.tokens()) + " tokens");
}

}  // namespace

void validate(const Batch& b, int64_t pages, int64_t page_size) {
  validate_pages(b, pages, page_size,
                 [&](int64_t r) { return (static_cast<int64_t>(b.seq_lens[r]) + page_size - 1) / page_size; });
  check_single_writers(b, check_slots(b, pages, page_size));
}

void planning::validate_held(const Batch& b, int64_t pages, int64_t page_size, const ContextParallel& c) {
  validate_pages(b, pages, page_size,
                 [&](int64_t r) { return c.sharding.pages(c.member(), b.seq_lens[r], page_size); });
  std::vector<int32_t> written;  // once for each request and page, as check_slots()
  for (int64_t r = 0; r < b.requests(); ++r) {
    const int64_t first = b.context_len(r) - b.query_start_loc[r];  // position - token
    int64_t last = -1;
    for (int64_t t = b.query_start_loc[r]; t < b.query_start_loc[r + 1]; ++t) {
      const int64_t slot = b.slot_mapping[t], position = first + t;
      if (slot < 0) continue;
      const auto found = [&] {
        return "slot_mapping[" + n(t) + "] is " + n(slot) + ", its token's position " + n(position);
      };
      if (const int64_t owner = c.sharding.owner(position); owner != c.member())
        fail_at(r, found() + " is rank " + n(c.first() + owner) + "'s, this is rank " + n(c.rank));
      const int64_t at = c.sharding.index(position), page = at / page_size, id = b.block_table(r, page);
      if (slot != id * page_size + at % page_size)
        fail_at(r, found() + " is slot " + n(id * page_size + at % page_size) + " of this rank (block_table[" +
                       n(page) + "] is " + n(id) + ", pages of " + n(page_size) + "); below 0 writes nothing");
      if (page != last) written.push_back(static_cast<int32_t>(id)), last = page;
    }
  }
  check_single_writers(b, written);
}

DecodePrefillSplit split_decodes_and_prefills(std::span<const int32_t> starts, const SplitOptions& o) {
  if (starts.empty()) fail("query_start_loc is empty, at least [0] is needed");
  const int64_t requests = static_cast<int64_t>(starts.size()) - 1, tokens = starts.back();
  auto len = [&](int64_t r) { return starts[r + 1] - starts[r]; };
  auto split_at = [&](int64_t r) { return DecodePrefillSplit{r, requests - r, starts[r], tokens - starts[r]}; };
  if (requests == 0) return {};
  if (!o.treat_short_extends_as_decodes && static_cast<int64_t>(o.is_prefilling.size()) != requests)
    fail("is_prefilling has " + n(static_cast<int64_t>(o.is_prefilling.size())) + " entries, " + n(requests) +
         " requests need as many");
  auto prefills = [&](int64_t r) { return !o.treat_short_extends_as_decodes && o.is_prefilling[r]; };

  int64_t longest = 0;
  bool any_prefilling = false;
  for (int64_t r = 0; r < requests; ++r) {
    longest = std::max<int64_t>(longest, len(r));
    any_prefilling = any_prefilling || prefills(r);
  }
  if (longest <= o.threshold && (!o.require_uniform || o.threshold <= 1) && !any_prefilling) return split_at(requests);
  if (len(0) > o.threshold || prefills(0)) return split_at(0);
  for (int64_t r = 0; r < requests; ++r) {
    const bool differs = o.require_uniform && len(r) != len(0);
    if (!differs && len(r) <= o.threshold && !prefills(r)) continue;
    // A tail of empty requests after uniform ones is padding, not prefill.
    const bool padding = differs && tokens == starts[r];
    return split_at(padding ? requests : r);
  }
  return split_at(requests);
}

// Every decode behind the border must swap with a prefill before it, so counting pairs gives the fewest swaps.
std::vector<std::pair<int64_t, int64_t>> reorder_swaps(std::span<const int32_t> lens, int64_t threshold) {
  const int64_t total = static_cast<int64_t>(lens.size());
  const int64_t decodes = std::count_if(lens.begin(), lens.end(), [&](int32_t l) { return l <= threshold; });
  std::vector<std::pair<int64_t, int64_t>> swaps;
  for (int64_t front = 0, back = decodes; front < decodes; ++front) {
    if (lens[front] <= threshold) continue;
    while (back < total && lens[back] > threshold) ++back;
    swaps.emplace_back(front, back++);
  }
  return swaps;
}

}  // namespace mla
