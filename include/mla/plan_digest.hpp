// What ranks that run a step together must have planned alike, in a few bytes that go with each of their messages.
#pragma once

#include <cstdint>

namespace mla {

/// Of a plan of several ranks (Plan::digest), or of whatever else a caller's ranks must know alike: every call between
/// ranks compares it (Collective::plan). Ranks with other hashes have other plans; tokens and requests are for the
/// message then. All 0: nothing is said.
struct PlanDigest {
  uint64_t hash = 0;
  int32_t tokens = 0, requests = 0;
  friend bool operator==(const PlanDigest&, const PlanDigest&) = default;
};

}  // namespace mla
