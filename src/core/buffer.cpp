#include <sys/mman.h>

#include <string>

#include "mla/device.hpp"
#include "mla/error.hpp"

namespace mla {

std::string to_string(const Device& d) { return d.kind == DeviceKind::cpu ? "cpu" : "cuda:" + std::to_string(d.index); }

// Anonymous maps come zeroed and page-aligned, and large ones may be backed by huge pages.
Buffer::Buffer(size_t bytes, Device device) : size_(bytes), device_(device) {
  if (device.kind != DeviceKind::cpu)
    throw UnsupportedError("no backend in this build allocates on " + to_string(device));
  if (bytes == 0) return;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw DeviceError("cpu has no " + std::to_string(bytes) + " bytes to give");
  madvise(p, bytes, MADV_HUGEPAGE);
  data_ = std::unique_ptr<std::byte, Free>(static_cast<std::byte*>(p), Free{bytes});
}

void Buffer::Free::operator()(std::byte* p) const { munmap(p, bytes); }

}  // namespace mla
