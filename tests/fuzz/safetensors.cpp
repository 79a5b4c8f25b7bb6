// A safetensors file: refused, or every byte of its data belongs to exactly one tensor.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "fuzz/fuzz.hpp"
#include "fuzz/memory_file.hpp"
#include "mla/weights.hpp"

using namespace mla;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::MemoryFile file;
  file.write(data, size);
  fuzz::refused([&] {
    const Safetensors s(file.path());
    uint64_t header = 0;
    FUZZ_CHECK(size >= 8);
    std::memcpy(&header, data, 8);
    FUZZ_CHECK(header <= size - 8);
    const size_t first = 8 + header;
    uint64_t end = 0;
    for (const SafetensorsEntry& e : s.entries()) {
      FUZZ_CHECK(e.begin == end && e.end >= e.begin && e.end <= size - first);
      end = e.end;
      FUZZ_CHECK(s.find(e.name) && s.find(e.name)->begin == e.begin);
      const Buffer bytes = s.bytes(e);
      FUZZ_CHECK(bytes.size() == e.end - e.begin);
      FUZZ_CHECK(bytes.size() == 0 || std::memcmp(bytes.data(), data + first + e.begin, bytes.size()) == 0);
      for (int64_t n : e.shape) FUZZ_CHECK(n >= 0);
      // Its last row's last half, where it is made of rows.
      const uint64_t row = e.shape.empty() ? 0 : bytes.size() / static_cast<uint64_t>(std::max<int64_t>(e.shape[0], 1));
      fuzz::refused([&] {
        const uint64_t last = row == 0 ? 0 : bytes.size() / row - 1, half = row / 2;
        const Buffer some = s.bytes(e, {.row_bytes = row, .row = last, .rows = 1, .first = half, .size = row - half});
        FUZZ_CHECK(some.size() == row - half);
        FUZZ_CHECK(std::memcmp(some.data(), bytes.data() + last * row + half, some.size()) == 0);
      });
      fuzz::refused([&] {
        const HostTensor t = s.tensor(e.name);
        uint64_t count = 1;
        for (int64_t n : t.shape) count *= static_cast<uint64_t>(n);
        FUZZ_CHECK(count * size_of(t.dtype) == bytes.size());
        FUZZ_CHECK(t.to_f32().size() == count);
      });
    }
    FUZZ_CHECK(end == size - first);
    FUZZ_CHECK(fuzz::refused([&] { s.tensor("\x01 no tensor has this name"); }) ||
               s.find("\x01 no tensor has this name"));
  });
  return 0;
}
