#include "comm/carrier.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/counted.hpp"

namespace mla {
namespace {

const char* name(Operation operation) {
  switch (operation) {
    case Operation::all_reduce: return "all_reduce";
    case Operation::all_gather: return "all_gather";
    case Operation::reduce_scatter: return "reduce_scatter";
    case Operation::all_to_all: return "all_to_all";
    case Operation::broadcast: return "broadcast";
    case Operation::barrier: return "barrier";
  }
  return "a call that this library does not know";
}

}  // namespace

RankError::RankError(int rank, std::string step, const std::string& what)
    : DeviceError(what), rank_(rank), step_(std::move(step)) {}

std::string to_string(const Record& record) {
  return std::string(name(record.operation)) + " of step '" +
         std::string(record.step, strnlen(record.step, sizeof record.step)) + "' (round " +
         std::to_string(record.round) + ")";
}

std::optional<Fault> disagreement(std::span<const Record> records) {
  const auto alike = [&](const Record& r) { return std::count(records.begin(), records.end(), r); };
  if (alike(records[0]) == std::ssize(records)) return std::nullopt;
  const Record* most = &records[0];
  for (const Record& r : records)
    if (alike(r) > alike(*most)) most = &r;
  const auto other = std::find_if(records.begin(), records.end(), [&](const Record& r) { return r != *most; });
  const int rank = static_cast<int>(other - records.begin());
  const std::string theirs = to_string(*most), its = to_string(*other);
  std::string what = "rank " + std::to_string(rank) + " is at " + its + ", rank " +
                     std::to_string(most - records.data()) + " at " + theirs;
  if (other->plan != most->plan) {
    // Whatever else differs follows from it.
    const auto planned = [](const PlanDigest& p) {
      return counted(p.tokens, "token") + " of " + counted(p.requests, "request");
    };
    what += ": their plans differ, " + planned(other->plan) + " and " + planned(most->plan);
    if (other->plan.tokens == most->plan.tokens && other->plan.requests == most->plan.requests)
      what += ", of other lengths, or with other options";
  } else if (its == theirs) {
    const auto dtype = [](const Record& r) { return std::string(to_string(static_cast<Dtype>(r.dtype))); };
    what += other->dtype != most->dtype ? ": the dtypes are " + dtype(*other) + " and " + dtype(*most)
            : other->root != most->root
                ? ": the roots are " + std::to_string(other->root) + " and " + std::to_string(most->root)
                : ": the sizes differ";
  }
  return Fault{rank, std::string(most->step, strnlen(most->step, sizeof most->step)), std::move(what)};
}

Fault size_disagreement(const Record& record, int from, int to, size_t sent, size_t expected) {
  return {from, record.step,
          to_string(record) + ": rank " + std::to_string(from) + " sends " + std::to_string(sent) + " bytes to rank " +
              std::to_string(to) + ", which expects " + std::to_string(expected)};
}

}  // namespace mla
