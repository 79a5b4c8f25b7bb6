#include "serve/ranks.hpp"

#include <algorithm>
#include <string>
#include <system_error>

#include "serve/shares.hpp"

namespace mla::serve {

Ranks::Ranks(const Options& o, int64_t positions, ThreadPool& pool, const std::atomic<bool>& stop, Result& r)
    : begin_(o.plan.tensor_parallel), end_(o.plan.tensor_parallel) {
  const int n = o.plan.tensor_parallel;
  if (o.group) {
    const int rank = o.group->rank();
    if (o.device.kind == DeviceKind::cuda) o.group->connect(o.device, o.link);
    const Engine::Part part{head_share(o.model.heads, rank, n), o.group,
                            context_share(o.model.heads, rank, n, o.context_parallel, o.interleave, o.exchange)};
    alone_ = std::make_unique<Engine>(o, part, positions, pool, stop, r);
    return;
  }
  if (n == 1) {
    alone_ = std::make_unique<Engine>(o, Engine::Part{{0, o.model.heads}}, positions, pool, stop, r);
    return;
  }
  if (o.device.kind == DeviceKind::cuda && o.device.index + n > gpu_count())
    throw DeviceError(std::to_string(n) + " ranks on GPUs from " + to_string(o.device) + " on, this machine has " +
                      std::to_string(gpu_count()));
  communicators_ = thread_communicators(n);
  options_.assign(static_cast<size_t>(n), o);
  // Pinned, ranks have processors of their own: consecutive ones, so that few have several nodes.
  std::vector<Place> all;
  if (o.pinning == Pinning::cores) all = places(this_topology(), std::max(n, pool.threads()));
  std::span<const Place> left = all;
  for (int i = 0; i < n; ++i) {
    if (o.device.kind == DeviceKind::cuda) options_[static_cast<size_t>(i)].device.index += i;
    const int threads = std::max(1, pool.threads() / n + (i < pool.threads() % n));
    Result* const shown = i == 0 ? &r : nullptr;
    if (all.empty()) {
      ranks_.push_back(std::make_unique<Rank>(threads, shown));
    } else {
      ranks_.push_back(std::make_unique<Rank>(left.first(static_cast<size_t>(threads)), shown));
      left = left.subspan(static_cast<size_t>(threads));
    }
  }
  // Together: on GPUs ranks connect, and run their first steps.
  try {
    std::vector<std::jthread> makers;
    try {
      for (int i = 1; i < n; ++i) makers.emplace_back([&, i] { make(i, positions, stop); });
    } catch (const std::system_error& e) {
      communicators_[0].abort(e.what());  // those that were started do not wait for the missing
      throw;
    }
    make(0, positions, stop);
  } catch (const std::system_error& e) {
    throw DeviceError("a rank's thread could not be started: " + std::string(e.what()));
  }
  rethrow();
  for (const auto& rank : ranks_) {
    const Result& own = rank->own;  // rank 0's is empty
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

void Ranks::make(int i, int64_t positions, const std::atomic<bool>& stop) {
  Rank& rank = *ranks_[static_cast<size_t>(i)];
  const Options& o = options_[static_cast<size_t>(i)];
  Communicator& group = communicators_[static_cast<size_t>(i)];
  const int n = o.plan.tensor_parallel;
  try {
    if (o.device.kind == DeviceKind::cuda) group.connect(o.device, o.link);
    const Engine::Part part{head_share(o.model.heads, i, n), &group,
                            context_share(o.model.heads, i, n, o.context_parallel, o.interleave, o.exchange)};
    rank.engine = std::make_unique<Engine>(o, part, positions, rank.pool, stop, rank.result);
  } catch (const std::exception& e) {
    rank.error = std::current_exception();
    group.abort(e.what());
  }
}

// The error that the others' are about.
void Ranks::rethrow() const {
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
}

Ranks::~Ranks() {
  if (threads_.empty()) return;
  over_ = true;
  begin_.arrive_and_wait();
}

std::vector<float> Ranks::use_k_scales(std::vector<float> scales, std::span<const float> hidden, Processes& processes) {
  Engine& first = alone_ ? *alone_ : *ranks_.front()->engine;
  first.calibrate(hidden, scales);
  scales = processes.first(std::move(scales));
  first.use_k_scales(scales);
  for (const auto& rank : ranks_) rank->engine->use_k_scales(scales);
  return scales;
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
    return own.engine->run(*batch_, hidden_, rows, own.result);
  } catch (const std::exception& e) {
    own.error = std::current_exception();
    communicators_[static_cast<size_t>(rank)].abort(e.what());
    return {};
  }
}

StepTime Ranks::run(const Batch& batch, std::span<const float> hidden, std::span<WantedRow> rows, Result& r) {
  if (alone_) return alone_->run(batch, hidden, rows, r);
  batch_ = &batch, hidden_ = hidden;
  for (const auto& rank : ranks_) rank->result.steps = r.steps;  // by which steps are sampled: all ranks' the same
  begin_.arrive_and_wait();
  const StepTime time = step(0, rows);
  end_.arrive_and_wait();
  rethrow();
  return time;
}

void Ranks::finish(Result& r) {
  if (alone_) return alone_->finish(r);
  for (const auto& rank : ranks_) {
    rank->engine->finish(rank->result);
    r.workspace_bytes += rank->own.workspace_bytes;
  }
}

}  // namespace mla::serve
