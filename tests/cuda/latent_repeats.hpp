// What attend_latent's tests over all caches hold each case to: it agrees with float64, and has the same bits again.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "backend/cuda/sm90/attention/attention.hpp"
#include "cuda/device.hpp"

namespace mla::cuda::test {

/// Whoever merges, by how long workers wait for each other, and by a schedule made ahead and a cache that is settled.
/// Batch-invariant, whoever attends, too: few workers have several pieces of a tile, and tiles that others share.
/// s: after a call, whose bits the others' must be.
template <class Inputs>
void expect_same_bits(Inputs& s) {
  const auto out = s.out();
  const auto lse = s.lse();
  const auto again = [&](int patience, const char* by) {
    const std::string where = by + ("patience " + std::to_string(patience));
    s.choice.patience = patience;
    s.poison();
    attend_latent(s.args, s.choice, nullptr);
    check(cudaDeviceSynchronize(), "attend_latent", "run");
    EXPECT_EQ(out, s.out()) << where;
    EXPECT_EQ(0, std::memcmp(lse.data(), s.lse().data(), lse.size() * 4)) << where;
    for (const unsigned n : s.counters()) ASSERT_EQ(n, 0u) << "counters, " << where;
  };
  const int most = s.choice.patience;
  for (const int patience : {most, most, 0, 2000, 0}) again(patience, "");
  DeviceArray<std::byte> schedule(attend_latent_schedule_bytes(s.choice), 0x7f);
  s.args.schedule = schedule.data(), s.args.schedule_bytes = schedule.size();
  attend_latent_schedule(s.args, s.choice, nullptr);
  check(cudaDeviceSynchronize(), "attend_latent", "schedule");  // the next call must not begin before it is there
  for (const int patience : {most, 0}) again(patience, "with a schedule, ");
  s.choice.settled = true;
  for (const int patience : {most, most, 0}) again(patience, "cache settled, ");
  s.args.schedule = nullptr, s.choice.settled = false;
  const int all = s.choice.workers;
  if (s.choice.split_blocks)
    for (const int workers : {7, 3, 1}) {
      s.choice.workers = std::min(workers, all);
      for (const int patience : {most, 0}) again(patience, "few workers, ");
    }
  s.choice.workers = all, s.choice.patience = most;
}

/// As chosen, and, at 16 rows, with all workers merging where half would, or half where all would: sums in another
/// order.
template <class Inputs>
void expect_right_and_same_bits(Inputs& s) {
  const bool chosen = s.choice.relay;
  for (const bool relay : {chosen, !chosen}) {
    if (relay != chosen && s.choice.tile_rows != 16) break;
    s.choice.relay = relay;
    s.poison();
    attend_latent(s.args, s.choice, nullptr);
    check(cudaDeviceSynchronize(), "attend_latent", "run");
    s.verify();
    expect_same_bits(s);
  }
  s.choice.relay = chosen;
}

}  // namespace mla::cuda::test
