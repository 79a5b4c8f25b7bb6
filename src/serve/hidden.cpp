#include "serve/hidden.hpp"

#include <bit>

namespace mla::serve {

uint64_t token_key(const Trace& trace, int64_t request, int64_t position) {
  const TraceRequest& r = trace.requests[static_cast<size_t>(request)];
  if (position < r.input) return block_id(r, position / trace.block_tokens);
  return mix(mix(static_cast<uint64_t>(request) + 0x6f7574u)) | (uint64_t{1} << 63);
}

void hidden_row(uint64_t seed, uint64_t key, int64_t position, std::span<float> row) {
  const uint64_t base = mix(mix(seed + 0x9e3779b97f4a7c15u) ^ mix(key + 0x632be59bd9b4e019u)) +
                        static_cast<uint64_t>(position) * 0xd1342543de82ef95u;
  for (size_t i = 0; i < row.size(); ++i) {
    // Four bytes' sum is near normal; an integer below 2^10 over a power of two has few enough bits for bf16 after the
    // shift below.
    const uint64_t u = mix(base + i * 0x9e3779b97f4a7c15u);
    const int sum = static_cast<int>(u & 63) + static_cast<int>((u >> 16) & 63) + static_cast<int>((u >> 32) & 63) +
                    static_cast<int>((u >> 48) & 63);
    row[i] = static_cast<float>(sum - 126) * 0x1.bp-6f;  // variance 4 * (64^2 - 1) / 12 = 36.9^2
    row[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(row[i]) & 0xffff0000u);
  }
}

}  // namespace mla::serve
