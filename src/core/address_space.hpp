// Addresses without memory: where arrays would lie that nothing reads or writes.
#pragma once

#include <cstddef>
#include <span>

namespace mla {

/// `bytes` addresses, page-aligned, that fault on every access. DeviceError when there are not as many.
class AddressSpace {
 public:
  explicit AddressSpace(size_t bytes);
  ~AddressSpace();
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;
  std::byte* data() const { return data_; }
  std::span<std::byte> span() const { return {data_, bytes_}; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace mla
