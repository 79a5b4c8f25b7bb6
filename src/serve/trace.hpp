// Request traces: when requests arrive, how long they are, and which prompt blocks they share.
#pragma once

#include <cstdint>
#include <filesystem>
#include <istream>
#include <string>
#include <vector>

namespace mla::serve {

struct TraceRequest {
  double arrival = 0;  ///< seconds from the trace's start
  int64_t input = 0;   ///< prompt tokens, >= 1
  int64_t output = 0;  ///< generated tokens, >= 1
  /// Identity of the first prompt blocks; equal ids are equal content after equal prefixes. Later ones are nobody
  /// else's (block_id).
  std::vector<uint64_t> blocks;
  uint64_t own = 0;  ///< sets its own blocks apart from other requests'
};

struct Trace {
  std::string source;  ///< file, or how it was generated
  std::string format;
  int64_t block_tokens = 512;  ///< prompt tokens a block holds
  std::vector<TraceRequest> requests;
  int64_t descending = 0, first_descending = 0;  ///< lines with an earlier time than the line above, and the first
};

/// Identity of a prompt's block, shared or its own.
uint64_t block_id(const TraceRequest& request, int64_t block);

/// Reads Mooncake jsonl (timestamp in ms, input_length, output_length, hash_ids of 512-token blocks), Azure csv
/// (TIMESTAMP, ContextTokens, GeneratedTokens) or BurstGPT csv (Timestamp in s, Request tokens, Response tokens; rows
/// without a response are left out). The format is taken from the first line; requests are sorted by arrival. Reads at
/// most max_requests (0: all). Traces without ids share nothing. InputError with file, line and reason for a malformed
/// line, a time of 1e12 seconds or more, a line that cannot be read, and for more than memory should hold: lines of 4
/// MiB, 1 GiB in all, 2^23 requests, 2^24 ids. A file must be a regular one.
Trace read_trace(const std::filesystem::path& file, int64_t max_requests = 0);
Trace read_trace(std::istream& in, const std::string& name, int64_t max_requests = 0);

struct Generated {
  int64_t requests = 24;
  int64_t input = 192;  ///< mean prompt length
  int64_t output = 12;  ///< mean generated length
  double rate = 20;     ///< arrivals a second (Poisson), the last before 1e12 seconds; 0: all at once
  uint64_t seed = 1;
};
/// Lengths from half to one and a half times the mean; a third of the prompts continue an earlier one, as conversations
/// do. InputError for numbers that no trace may have.
Trace generate_trace(const Generated& options);

/// Lengths times factor (at least 1), blocks scaled alike, so that reuse keeps its shape. InputError unless 0 < factor
/// <= 1.
Trace scale_lengths(Trace trace, double factor);

}  // namespace mla::serve
