// A miniature serving engine for tests: sequences that share one paged cache, stepped in batches. Everything the layer
// must not read is poisoned: unused cache slots, unused block-table entries, the workspace before each step, padded
// rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "cases/compare.hpp"
#include "mla/mla.hpp"
#include "support/device.hpp"

namespace mla::test {

class Engine {
 public:
  static constexpr int64_t kAll = std::numeric_limits<int32_t>::max();
  struct Options {
    PlanOptions plan;
    int threads = 2;
    int64_t pages = 256;
    uint64_t page_seed = 1;  ///< which pages sequences get
    bool poison = true;      ///< false: zeros instead, to compare bits against
    int64_t padding = 3;     ///< rows past the step's tokens in hidden and out
    int64_t prompt = kAll;   ///< of each sequence, its first tokens that are its prompt
  };
  struct Piece {
    int64_t sequence;
    int64_t count;  ///< new tokens
  };

  Engine(const LayerWeights& weights, const CacheSpec& spec, Options options)
      : weights_(weights),
        options_(options),
        cache_(spec, options.pages, kDevice),
        pool_(options.threads),
        stream_(stream_on_device(pool_)),
        staged_(stream_),
        rotary_(weights.config.rotary, weights.config.rope, 4096, kDevice),
        index_rotary_(weights.config.indexer
                          ? RotaryTable(weights.config.index_rotary(), weights.config.rope, 4096, kDevice)
                          : RotaryTable()),
        free_(options.pages) {
    std::iota(free_.begin(), free_.end(), 0);
    cases::Random random(options.page_seed);
    for (size_t i = free_.size(); i > 1; --i)
      std::swap(free_[i - 1], free_[random.integer(0, static_cast<int64_t>(i) - 1)]);
    // All-ones bytes are NaN in every format, scales included.
    fill(stream_, cache_.view().data, spec.page_bytes() * options.pages, poison());
    if (!weights.indexer) return;
    const IndexCacheSpec index = index_cache_spec(weights.config, spec, options.plan.index_format);
    index_cache_ = IndexCache(index, options.pages, kDevice);
    fill(stream_, index_cache_.view().data, index.page_bytes() * options.pages, poison());
  }

  /// Adds a sequence whose hidden states are rows of `hidden` [any, H] from its start; returns its id.
  int64_t add(std::span<const float> hidden) {
    sequences_.push_back({hidden, 0, {}});
    return static_cast<int64_t>(sequences_.size()) - 1;
  }

  /// Adds a sequence of the same hidden states whose first pages are another's, as if they had been found in the cache.
  int64_t add_behind(int64_t sequence, int64_t pages) {
    const Sequence& s = sequences_[sequence];
    Sequence found{s.hidden, pages * cache_.spec().page_size, {s.pages.begin(), s.pages.begin() + pages}};
    sequences_.push_back(std::move(found));
    return static_cast<int64_t>(sequences_.size()) - 1;
  }
  /// Gives a sequence's pages back: its tokens are to be computed again.
  void restart(int64_t sequence) {
    Sequence& s = sequences_[sequence];
    free_.insert(free_.begin(), s.pages.begin(), s.pages.end());
    s.pages.clear();
    s.length = 0;
  }

  /// One step; returns each piece's output rows [count, H], in the pieces' order.
  std::vector<std::vector<float>> step(std::span<const Piece> pieces) {
    const ModelConfig& m = weights_.config;
    const int64_t q = cache_.spec().page_size;
    std::vector<int32_t> starts{0}, lengths, slots;
    const std::vector<int32_t> prompts(pieces.size(), static_cast<int32_t>(options_.prompt));
    size_t width = 1;
    for (const Piece& p : pieces) {
      Sequence& s = sequences_[p.sequence];
      while (static_cast<int64_t>(s.pages.size()) * q < s.length + p.count) {
        s.pages.push_back(free_.back());
        free_.pop_back();
      }
      for (int64_t i = s.length; i < s.length + p.count; ++i)
        slots.push_back(static_cast<int32_t>(s.pages[i / q] * q + i % q));
      starts.push_back(starts.back() + static_cast<int32_t>(p.count));
      lengths.push_back(static_cast<int32_t>(s.length + p.count));
      width = std::max(width, s.pages.size());
    }
    width += 2;
    std::vector<int32_t> table(pieces.size() * width, options_.poison ? std::numeric_limits<int32_t>::min() + 7 : 0);
    for (size_t r = 0; r < pieces.size(); ++r) {
      const auto& pages = sequences_[pieces[r].sequence].pages;
      std::copy(pages.begin(), pages.end(), table.begin() + static_cast<int64_t>(r * width));
    }

    const int64_t tokens = starts.back(), rows = tokens + options_.padding;
    std::vector<float> hidden(rows * m.hidden, options_.poison ? cases::poison() : 0.0f),
        out(rows * m.hidden, kSentinel);
    for (size_t r = 0; r < pieces.size(); ++r) {
      const Sequence& s = sequences_[pieces[r].sequence];
      std::copy_n(s.hidden.begin() + s.length * m.hidden, pieces[r].count * m.hidden,
                  hidden.begin() + starts[r] * m.hidden);
    }

    const Batch batch{starts,
                      lengths,
                      {table.data(), {static_cast<int64_t>(pieces.size()), static_cast<int64_t>(width)}},
                      slots,
                      prompts};
    PlanOptions o = options_.plan;
    if (chooser && o.sparse == SparsePolicy::automatic) o.sparse = SparsePolicy::mixed;  // a choice takes no masks
    last_plan = plan(m, cache_.spec(), cache_.pages(), batch, device_info(stream_, m), o);
    const Plan& p = last_plan;
    const Buffer workspace = filled(p.workspace_bytes, poison());
    selection_ = filled(p.selection_bytes, poison());
    run(p, batch, {workspace.data(), workspace.size()}, hidden, out, rows, pieces);

    padding_touched = padding_touched ||
                      !std::all_of(out.begin() + tokens * m.hidden, out.end(), [](float x) { return x == kSentinel; });
    std::vector<std::vector<float>> result;
    for (size_t r = 0; r < pieces.size(); ++r) {
      result.emplace_back(out.begin() + starts[r] * m.hidden, out.begin() + starts[r + 1] * m.hidden);
      sequences_[pieces[r].sequence].length += pieces[r].count;
    }
    return result;
  }

  /// Of so many tokens, how many a step may bring of a sequence that has `done`: up to its prompt's end.
  int64_t up_to_prompt(int64_t done, int64_t count) const {
    return done < options_.prompt ? std::min(count, options_.prompt - done) : count;
  }

  /// The whole sequence in steps of at most `chunk` tokens, alone.
  std::vector<float> run_alone(int64_t sequence, int64_t tokens, int64_t chunk) {
    std::vector<float> out;
    for (int64_t done = 0; done < tokens;) {
      const Piece piece{sequence, up_to_prompt(done, std::min(chunk, tokens - done))};
      done += piece.count;
      const auto rows = step({&piece, 1});
      out.insert(out.end(), rows[0].begin(), rows[0].end());
    }
    return out;
  }

  /// Positions that each row of the last step attended to, by token; empty where that was everything.
  std::vector<std::vector<int32_t>> selected() const {
    std::vector<std::vector<int32_t>> rows(last_plan.tokens);
    Stream stream = stream_;
    std::vector<std::byte> selection = read(stream, selection_.data(), selection_.size());
    const View<int32_t, Token, Topk> all = last_plan.selected(selection);
    for (int64_t row = 0; row < last_plan.sparse_rows(); ++row)
      for (int64_t k = 0; k < last_plan.topk; ++k)
        if (all(row, k) >= 0) rows[last_plan.sparse_tokens[row]].push_back(all(row, k));
    return rows;
  }

  /// Chosen by the test for weights without an indexer: positions of `sequence` at a position.
  std::function<std::vector<int32_t>(int64_t sequence, int64_t position)> chooser;

  const Cache& cache() const { return cache_; }
  /// The cache's bytes, page after page.
  std::vector<std::byte> cache_bytes() const {
    Stream stream = stream_;
    return read(stream, cache_.view().data, cache_.spec().page_bytes() * cache_.pages());
  }
  std::span<const int32_t> pages(int64_t sequence) const { return sequences_[sequence].pages; }

  bool padding_touched = false;
  Profile* profile = nullptr;  ///< filled by steps when there
  Plan last_plan;
  int64_t allocations = 0;  ///< during forward(), counted through `counter`
  int64_t (*counter)() = nullptr;

 private:
  std::byte poison() const { return options_.poison ? std::byte{0xff} : std::byte{0}; }
  static constexpr float kSentinel = -1.5e30f;
  struct Sequence {
    std::span<const float> hidden;
    int64_t length;
    std::vector<int32_t> pages;
  };

  void run(const Plan& p, const Batch& batch, std::span<std::byte> workspace, std::span<const float> hidden,
           std::span<float> out, int64_t rows, std::span<const Piece> pieces) {
    const int64_t h = weights_.config.hidden;
    staged_.stage(p, batch);
    const LayerContext context{.plan = p,
                               .batch = batch,
                               .weights = weights_,
                               .rotary = rotary_,
                               .cache = cache_.view(),
                               .workspace = workspace,
                               .profile = profile,
                               .index_cache = index_cache_.view(),
                               .index_rotary = &index_rotary_,
                               .selection = {selection_.data(), selection_.size()},
                               .staged = &staged_};
    if (chooser && p.topk > 0) choose(stream_, context, pieces);
    const int64_t before = counter ? counter() : 0;
    forward(stream_, context, View<const float, Token, Hidden>(hidden.data(), {rows, h}),
            View<float, Token, Hidden>(out.data(), {rows, h}));
    stream_.synchronize();
    allocations += counter ? counter() - before : 0;
  }

  void choose(Stream& stream, const LayerContext& context, std::span<const Piece> pieces) {
    std::vector<int32_t> positions(context.plan.tokens * context.plan.topk, -1);
    int64_t token = 0;
    for (const Piece& p : pieces)
      for (int64_t i = 0; i < p.count; ++i, ++token) {
        const std::vector<int32_t> row = chooser(p.sequence, sequences_[p.sequence].length + i);
        std::copy(row.begin(), row.end(), positions.begin() + token * context.plan.topk);
      }
    select(stream, context, View<const int32_t, Token, Topk>(positions.data(), {token, context.plan.topk}));
    stream.synchronize();  // a GPU reads the positions later
  }

  const LayerWeights& weights_;
  Options options_;
  Cache cache_;
  ThreadPool pool_;
  Stream stream_;
  StagedStep staged_;
  IndexCache index_cache_;
  Buffer selection_;
  RotaryTable rotary_, index_rotary_;
  std::vector<int32_t> free_;
  std::vector<Sequence> sequences_;
};

}  // namespace mla::test
