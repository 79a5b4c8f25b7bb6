#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "core/counted.hpp"
#include "core/gpu.hpp"
#include "core/mapped.hpp"
#include "mla/error.hpp"

namespace mla {

namespace {

// Anonymous maps come zeroed and page-aligned, and large ones may be backed by huge pages.
void* zeroed(size_t bytes) {
  void* p = nullptr;
  if (bytes < kLeastMap) return posix_memalign(&p, 64, bytes) == 0 ? std::memset(p, 0, bytes) : nullptr;
  p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  madvise(p, bytes, MADV_HUGEPAGE);
  return p;
}

}  // namespace

Buffer::Buffer(size_t bytes, Device device) : size_(bytes), device_(device) {
  if (bytes == 0) return;
  if (device.kind == DeviceKind::cuda) {
    data_ = std::unique_ptr<std::byte, Free>(gpu::allocate(bytes, device.index), Free{bytes, device});
    return;
  }
  void* p = zeroed(bytes);
  if (!p)
    throw DeviceError("cpu has no " + counted(static_cast<int64_t>(bytes), "byte") + " to give (" +
                      readable_bytes(bytes) + ")");
  data_ = std::unique_ptr<std::byte, Free>(static_cast<std::byte*>(p), Free{bytes, device});
}

Buffer Buffer::copy_of(const void* data, size_t bytes, Device device) {
  Buffer b(bytes, device);
  if (bytes == 0) return b;
  if (device.kind == DeviceKind::cuda) gpu::upload(b.data(), data, bytes, device.index);
  else std::memcpy(b.data(), data, bytes);
  return b;
}

void Buffer::Free::operator()(std::byte* p) const {
  if (device.kind == DeviceKind::cuda) gpu::release(p, device.index);
  else if (bytes < kLeastMap) std::free(p);
  else munmap(p, bytes);
}

}  // namespace mla
