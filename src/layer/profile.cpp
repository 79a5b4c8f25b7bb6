#include <chrono>
#include <utility>

#include "core/gpu.hpp"
#include "mla/layer.hpp"

namespace mla {
namespace {

void add_to(std::vector<Profile::Row>& rows, const Profile::Row& more) {
  for (Profile::Row& row : rows)
    if (row.op == more.op) {
      row.seconds += more.seconds;
      row.bytes += more.bytes;
      row.flops += more.flops;
      row.calls += more.calls;
      return;
    }
  rows.push_back(more);
}

}  // namespace

struct Profile::Pending {
  std::string_view op;
  std::unique_ptr<gpu::Stopwatch> watch;
  std::function<Work()> work;
};

Profile::Profile() = default;
Profile::~Profile() = default;
Profile::Profile(Profile&&) noexcept = default;
Profile& Profile::operator=(Profile&&) noexcept = default;

void Profile::add(std::string_view op, double seconds, double bytes, double flops) {
  settle();
  if (observer_) {
    const double now = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    observer_({op, now - seconds, seconds, bytes, flops});
  }
  add_to(rows_, {op, seconds, bytes, flops, 1});
}

void Profile::add(std::string_view op, std::unique_ptr<gpu::Stopwatch> watch, std::function<Work()> work) {
  pending_.push_back({op, std::move(watch), std::move(work)});
}

void Profile::add(const Row& sums) {
  settle();
  add_to(rows_, sums);
}

void Profile::settle() const {
  for (const Pending& p : pending_) {
    const double seconds = p.watch->seconds();
    const Work work = p.work();
    if (observer_) observer_({p.op, 0, seconds, work.bytes, work.flops});
    add_to(rows_, {p.op, seconds, work.bytes, work.flops, 1});
  }
  pending_.clear();
}

const std::vector<Profile::Row>& Profile::rows() const {
  settle();
  return rows_;
}

void Profile::scale(double factor) {
  settle();
  for (Row& row : rows_) {
    row.seconds *= factor;
    row.bytes *= factor;
    row.flops *= factor;
    row.calls = static_cast<int64_t>(static_cast<double>(row.calls) * factor + 0.5);
  }
}

void Profile::clear() {
  pending_.clear();
  rows_.clear();
}

void Profile::observe(std::function<void(const Call&)> observer) {
  settle();
  observer_ = std::move(observer);
}

}  // namespace mla
