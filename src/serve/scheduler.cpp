#include "serve/scheduler.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "mla/error.hpp"
#include "serve/hidden.hpp"

namespace mla::serve {

void Limits::validate() const {
  auto positive = [](const char* what, int64_t x) {
    if (x < 1) throw InputError(std::string(what) + " is " + std::to_string(x) + ", at least 1 is needed");
  };
  positive("page budget", pages);
  positive("page size", page_size);
  positive("token budget", token_budget);
  constexpr int64_t kMostSlots = std::numeric_limits<int32_t>::max();
  if (pages > kMostSlots / page_size)
    throw InputError("page budget is " + std::to_string(pages) + ", pages of " + std::to_string(page_size) +
                     " tokens have 32 bits of slots: at most " + std::to_string(kMostSlots / page_size));
}

Scheduler::Scheduler(const Trace& trace, Limits limits)
    : trace_(trace),
      limits_(limits),
      allocator_(std::max<int64_t>(0, limits.pages), {.reserve_null_page = false, .prefix_reuse = limits.prefix_reuse}),
      states_(trace.requests.size()),
      times_(trace.requests.size()) {
  limits.validate();
}

bool Scheduler::done() const { return arrived_ == trace_.requests.size() && waiting_.empty() && running_.empty(); }

double Scheduler::next_arrival() const {
  return arrived_ < trace_.requests.size() ? trace_.requests[arrived_].arrival
                                           : std::numeric_limits<double>::infinity();
}

void Scheduler::extend_hashes(int64_t request, int64_t pages) {
  std::vector<PageHash>& hashes = states_[static_cast<size_t>(request)].hashes;
  while (static_cast<int64_t>(hashes.size()) < pages) {
    const int64_t first = static_cast<int64_t>(hashes.size()) * limits_.page_size;
    uint64_t content = 0;
    for (int64_t p = first; p < first + limits_.page_size; ++p)
      content = mix(content + token_key(trace_, request, p) + 1);
    hashes.push_back(chain_hash(hashes.empty() ? 0 : hashes.back(), content));
  }
}

/// Pages for `tokens` in all; false, and nothing changed, when there are not enough.
bool Scheduler::grow(int64_t request, int64_t tokens) {
  State& s = states_[static_cast<size_t>(request)];
  const int64_t missing = pages_for(tokens) - static_cast<int64_t>(s.pages.size());
  if (missing <= 0) return true;
  if (missing > allocator_.available()) return false;
  const std::vector<PageId> fresh = allocator_.allocate(missing);
  s.pages.insert(s.pages.end(), fresh.begin(), fresh.end());
  return true;
}

void Scheduler::preempt_last() {
  const int64_t request = running_.back();
  running_.pop_back();
  State& s = states_[static_cast<size_t>(request)];
  allocator_.release_all(s.pages);
  s.pages.clear();
  s.computed = s.published = 0;
  waiting_.push_front(request);
  std::erase_if(step_, [&](const StepPiece& p) { return p.request == request; });
  ++preemptions_;
}

void Scheduler::add_piece(int64_t request, int64_t count, bool decode) {
  const State& s = states_[static_cast<size_t>(request)];
  step_.push_back({.request = request,
                   .start = s.computed,
                   .count = count,
                   .decode = decode,
                   .emits = s.computed + count == known(request)});
}

/// Takes what the cache already holds of the request's full pages. At least its last known token is left to compute.
bool Scheduler::admit(int64_t request) {
  State& s = states_[static_cast<size_t>(request)];
  const int64_t tokens = known(request), reusable = (tokens - 1) / limits_.page_size;
  extend_hashes(request, reusable);
  const std::span<const PageHash> hashes(s.hashes.data(), static_cast<size_t>(reusable));
  // Cached pages that would be found are not free for the rest: count after taking them.
  s.pages = allocator_.acquire_prefix(hashes);
  const int64_t found = static_cast<int64_t>(s.pages.size());
  if (pages_for(tokens) - found > allocator_.available()) {
    allocator_.release_all(s.pages);
    s.pages.clear();
    return false;
  }
  s.computed = found * limits_.page_size;
  s.published = found;
  prompt_tokens_ += tokens;
  hit_tokens_ += s.computed;
  running_.push_back(request);
  return true;
}

const std::vector<StepPiece>& Scheduler::plan_step(double now) {
  step_.clear();
  while (arrived_ < trace_.requests.size() && trace_.requests[arrived_].arrival <= now) {
    const TraceRequest& r = trace_.requests[arrived_];
    if (pages_for(r.input + r.output) > limits_.pages) {
      times_[arrived_].refused = true;
      ++refused_;
    } else {
      waiting_.push_back(static_cast<int64_t>(arrived_));
    }
    ++arrived_;
  }
  int64_t budget = limits_.token_budget;
  auto run = [&](bool decodes) {
    for (size_t i = 0; i < running_.size() && budget > 0; ++i) {
      const int64_t request = running_[i], unknown = known(request) - states_[static_cast<size_t>(request)].computed;
      const bool decode = unknown == 1 && states_[static_cast<size_t>(request)].generated > 0;
      if (decode != decodes) continue;
      const int64_t count = std::min(left(request), budget);
      // The one admitted last gives way, until this one fits or has itself given way.
      while (!grow(request, states_[static_cast<size_t>(request)].computed + count)) {
        const bool self = running_.back() == request;
        preempt_last();
        if (self) return;
      }
      add_piece(request, count, decode);
      budget -= count;
    }
  };
  const int64_t preempted = preemptions_;
  run(true);
  run(false);
  // What was just taken from one request is not handed to the next.
  while (preemptions_ == preempted && budget > 0 && !waiting_.empty() && admit(waiting_.front())) {
    const int64_t request = waiting_.front();
    waiting_.pop_front();
    const int64_t count = std::min(budget, left(request));
    grow(request, states_[static_cast<size_t>(request)].computed + count);  // admit() saw to it that this fits
    add_piece(request, count, false);
    budget -= count;
  }
  return step_;
}

void Scheduler::commit(double end) {
  for (const StepPiece& p : step_) {
    State& s = states_[static_cast<size_t>(p.request)];
    RequestTimes& t = times_[static_cast<size_t>(p.request)];
    s.computed += p.count;
    const int64_t full = s.computed / limits_.page_size;
    extend_hashes(p.request, full);
    for (; s.published < full; ++s.published)
      allocator_.publish(s.pages[static_cast<size_t>(s.published)], s.hashes[static_cast<size_t>(s.published)]);
    if (!p.emits) continue;
    ++s.generated;
    if (t.first_token < 0) t.first_token = end;
    if (s.generated < trace_.requests[static_cast<size_t>(p.request)].output) continue;
    t.finish = end;
    ++finished_;
    allocator_.release_all(s.pages);
    s.pages.clear();
    std::erase(running_, p.request);
  }
  step_.clear();
}

}  // namespace mla::serve
