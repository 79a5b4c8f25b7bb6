#include "serve/ranks.hpp"

#include <algorithm>
#include <string>
#include <system_error>

namespace mla::serve {

Ranks::Ranks(const Options& o, int64_t positions, ThreadPool& pool, const std::atomic<bool>& stop, Result& r)
    : begin_(o.plan.tensor_parallel), end_(o.plan.tensor_parallel) {
  const int n = o.plan.tensor_parallel;
  if (n == 1) {
    alone_ = std::make_unique<Engine>(o, Engine::Part{{0, o.model.heads}}, positions, pool, stop, r);
    return;
  }
  communicators_ = thread_communicators(n);
  for (int i = 0; i < n; ++i) {
    const int threads = std::max(1, pool.threads() / n + (i < pool.threads() % n));
    ranks_.push_back(std::make_unique<Rank>(
        o, Engine::Part{head_share(o.model.heads, i, n), &communicators_[static_cast<size_t>(i)]}, positions, threads,
        stop, i == 0 ? &r : nullptr));
    const Result& own = ranks_.back()->own;  // rank 0's is empty
    r.weight_bytes += own.weight_bytes;
    r.cache_bytes += own.cache_bytes;
    r.index_cache_bytes += own.index_cache_bytes;
  }
  try {
    for (int i = 1; i < n; ++i) threads_.emplace_back([this, i] { work(i); });
  } catch (const std::system_error& e) {
    // The barriers are those of all ranks: who is missing arrives here.
    over_ = true;
    for (int i = static_cast<int>(threads_.size()) + 1; i < n; ++i) begin_.arrive_and_drop();
    begin_.arrive_and_wait();
    threads_.clear();
    throw DeviceError("a rank's thread could not be started: " + std::string(e.what()));
  }
}

Ranks::~Ranks() {
  if (threads_.empty()) return;
  over_ = true;
  begin_.arrive_and_wait();
}

void Ranks::work(int rank) {
  for (;;) {
    begin_.arrive_and_wait();
    if (over_) return;
    step(rank, {});
    end_.arrive_and_wait();
  }
}

StepTime Ranks::step(int rank, std::span<WantedRow> rows) {
  Rank& own = *ranks_[static_cast<size_t>(rank)];
  try {
    return own.engine.run(*batch_, hidden_, rows, own.result);
  } catch (const std::exception& e) {
    own.error = std::current_exception();
    communicators_[static_cast<size_t>(rank)].abort(e.what());
    return {};
  }
}

StepTime Ranks::run(const Batch& batch, std::span<const float> hidden, std::span<WantedRow> rows, Result& r) {
  if (alone_) return alone_->run(batch, hidden, rows, r);
  batch_ = &batch, hidden_ = hidden;
  begin_.arrive_and_wait();
  const StepTime time = step(0, rows);
  end_.arrive_and_wait();
  // The error that the others' are about.
  std::exception_ptr error;
  for (const auto& rank : ranks_) {
    if (!rank->error) continue;
    try {
      std::rethrow_exception(rank->error);
    } catch (const RankError&) {
      if (!error) error = rank->error;
    } catch (...) {
      std::rethrow_exception(rank->error);
    }
  }
  if (error) std::rethrow_exception(error);
  return time;
}

void Ranks::finish(Result& r) {
  if (alone_) return alone_->finish(r);
  for (const auto& rank : ranks_) {
    rank->engine.finish(rank->result);
    r.workspace_bytes += rank->own.workspace_bytes;
  }
}

}  // namespace mla::serve
