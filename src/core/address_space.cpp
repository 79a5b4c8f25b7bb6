#include "core/address_space.hpp"

#include <sys/mman.h>

#include "core/counted.hpp"
#include "mla/error.hpp"

namespace mla {

AddressSpace::AddressSpace(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw DeviceError("cpu has no " + readable_bytes(bytes) + " of addresses to reserve");
  data_ = static_cast<std::byte*>(p);
}

AddressSpace::~AddressSpace() {
  if (data_) munmap(data_, bytes_);
}

}  // namespace mla
