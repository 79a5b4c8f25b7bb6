// Below the six calls: one round of messages between ranks that have found that they make the same call.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <type_traits>

#include "mla/communicator.hpp"

namespace mla {

enum class Operation : int32_t { all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, barrier };

/// What ranks must agree about before they send anything. Plain bytes of one size, for transports that must carry it.
struct Record {
  uint64_t round = 0;  ///< 1 for a rank's first
  uint64_t sizes = 0;  ///< stands for counts and bytes that all ranks must know alike
  Operation operation = Operation::barrier;
  int32_t dtype = 0, root = 0;
  uint32_t reserved = 0;
  PlanDigest plan;
  char step[64] = {};  ///< ends with a 0
  friend bool operator==(const Record&, const Record&) = default;
};
static_assert(sizeof(Record) == 112 && std::is_trivially_copyable_v<Record>);

/// "all_gather of step 'lse' (round 3)"
std::string to_string(const Record& record);

/// Why a group cannot go on.
struct Fault {
  int rank;
  std::string step, what;
};

/// The first rank whose record is not that of most ranks (the lower ranks' among as many); none if all are the same.
std::optional<Fault> disagreement(std::span<const Record> records);
/// Of a message whose two ends do not expect the same.
Fault size_disagreement(const Record& record, int from, int to, size_t sent, size_t expected);

/// A group's way of carrying a round, seen from one rank.
class Carrier {
 public:
  virtual ~Carrier() = default;
  virtual int rank() const = 0;
  virtual int ranks() const = 0;
  /// RankError; after it no round is carried any more.
  virtual void carry(const Record& record, const Exchange& messages) = 0;
  /// RankError where the group is known to have failed; at once.
  virtual void check() const = 0;
  virtual void abort(std::string_view reason) noexcept = 0;
};

}  // namespace mla
