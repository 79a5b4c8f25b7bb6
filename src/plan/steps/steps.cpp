#include "plan/steps/steps.hpp"

#include "plan/internal.hpp"

namespace mla::planning {

void Steps::go_on_in(int lane) { lane_ = forks(plan) ? static_cast<int8_t>(lane) : 0; }

void Steps::wait(Calls calls, int on) {
  const auto with_indexer = [](Calls c) { return c.any_of(kForward) ? c | kIndexer : c; };  // layers that have one, too
  Calls& since = since_[lane_][on];
  calls.bits &= with_indexer(since).bits;
  if (on == lane_ || calls.bits == 0) return;
  plan.steps.push_back({"wait", calls, steps::Wait{static_cast<int8_t>(on)}, lane_});
  since.bits &= static_cast<uint8_t>(~with_indexer(calls).bits);
  // What the other one has waited for is done then, too.
  for (int lane = 0; lane < kLanes; ++lane)
    since_[lane_][lane].bits &= static_cast<uint8_t>(since_[on][lane].bits | ~with_indexer(calls).bits);
  for (auto& lane : since_) lane[lane_] = lane[lane_] | calls;
}

void Steps::join(Calls calls) {
  for (int on = 1; on < kLanes; ++on) wait(calls, on);
}

void append_steps(Plan& plan) {
  plan.steps.reserve(32);
  Steps s(plan);
  if (plan.options.dummy) return dummy_steps(s);
  if (plan.options.absorbed) return absorbed_steps(s);
  if (plan.serves_block()) return block_steps(s);
  choice_steps(s);
  attention_steps(s, kAttend);
}

}  // namespace mla::planning
