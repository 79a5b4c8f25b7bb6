// Continuous batching as pure bookkeeping: which tokens of which requests run in the next step. No attention, no clock
// of its own.
//
// Decodes run first, then running prefills in order of admission, then waiting requests are admitted first come, first
// served, while the token budget and the pages last. When a decode finds no page, the request admitted last loses its
// pages and starts over later from the front of the queue (preemption by recompute). Full pages are published, so
// prompts that share a prefix share pages.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "mla/pages.hpp"
#include "serve/trace.hpp"

namespace mla::serve {

struct Limits {
  int64_t pages = 0;
  int64_t page_size = 64;
  int64_t token_budget = 512;  ///< new tokens a step
  bool prefix_reuse = true;
  bool prompts_apart = false;  ///< no step brings a prompt's last tokens and those behind it (PathPolicy::by_prompt)

  /// InputError for limits that no request could run under.
  void validate() const;
};

/// A request's tokens in one step.
struct StepPiece {
  int64_t request = 0;
  int64_t start = 0;  ///< first position to compute
  int64_t count = 0;
  bool decode = false;
  bool emits = false;  ///< the piece ends with the sequence's last known token: it yields a new one
};

struct RequestTimes {
  double first_token = -1, finish = -1;  ///< seconds on the simulated clock; -1: not yet
  bool refused = false;
};

class Scheduler {
 public:
  /// InputError for limits that no request could run under.
  Scheduler(const Trace& trace, Limits limits);

  /// The next step at simulated time `now`; empty when nothing can run before next_arrival().
  const std::vector<StepPiece>& plan_step(double now);
  /// The planned step has run and ended at `end`.
  void commit(double end);

  bool done() const;
  /// Arrival of the next request that is not yet in the queue; infinity when there is none.
  double next_arrival() const;
  std::span<const PageId> pages(int64_t request) const { return states_[static_cast<size_t>(request)].pages; }
  const std::vector<RequestTimes>& times() const { return times_; }
  const PageAllocator& allocator() const { return allocator_; }
  int64_t preemptions() const { return preemptions_; }
  int64_t refused() const { return refused_; }
  int64_t finished() const { return finished_; }
  int64_t running() const { return static_cast<int64_t>(running_.size()); }
  /// Prompt tokens looked up on admission, and those found in the cache.
  int64_t prompt_tokens() const { return prompt_tokens_; }
  int64_t hit_tokens() const { return hit_tokens_; }

 private:
  struct State {
    int64_t computed = 0, generated = 0;
    std::vector<PageId> pages;
    std::vector<PageHash> hashes;  ///< of full pages of known tokens, as far as needed yet
    int64_t published = 0;         ///< pages
  };

  int64_t known(int64_t request) const {
    return trace_.requests[static_cast<size_t>(request)].input + states_[static_cast<size_t>(request)].generated;
  }
  /// Tokens of a request that one step may bring.
  int64_t left(int64_t request) const {
    const int64_t computed = states_[static_cast<size_t>(request)].computed,
                  prompt = trace_.requests[static_cast<size_t>(request)].input;
    return (limits_.prompts_apart && computed < prompt ? prompt : known(request)) - computed;
  }
  int64_t pages_for(int64_t tokens) const { return (tokens + limits_.page_size - 1) / limits_.page_size; }
  void extend_hashes(int64_t request, int64_t pages);
  bool grow(int64_t request, int64_t tokens);
  void preempt_last();
  bool admit(int64_t request);
  void add_piece(int64_t request, int64_t count, bool decode);

  const Trace& trace_;
  Limits limits_;
  PageAllocator allocator_;
  std::vector<State> states_;
  std::vector<RequestTimes> times_;
  std::deque<int64_t> waiting_;
  std::vector<int64_t> running_;  ///< in order of admission
  size_t arrived_ = 0;
  std::vector<StepPiece> step_;
  int64_t preemptions_ = 0, refused_ = 0, finished_ = 0, prompt_tokens_ = 0, hit_tokens_ = 0;
};

}  // namespace mla::serve
