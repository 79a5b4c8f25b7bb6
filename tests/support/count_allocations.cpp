// Replaces operator new for the program it is linked into and counts what libmla itself allocates. oneDNN's own
// bookkeeping inside a call is not counted: it is told apart by the library the call comes from.
#include "support/count_allocations.hpp"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<int64_t> allocations{0};

void count(const void* caller) {
  Dl_info info{};
  if (dladdr(caller, &info) && info.dli_fname && std::strstr(info.dli_fname, "libdnnl")) return;
  ++allocations;
}

void* obtain(std::size_t n) {
  if (void* p = std::malloc(n ? n : 1)) return p;
  throw std::bad_alloc();
}

void* obtain(std::size_t n, std::size_t align) {
  if (void* p = std::aligned_alloc(align, (n + align - 1) / align * align)) return p;
  throw std::bad_alloc();
}

}  // namespace

namespace mla::test {
int64_t allocation_count() { return allocations.load(); }
}  // namespace mla::test

void* operator new(std::size_t n) {
  count(__builtin_return_address(0));
  return obtain(n);
}
void* operator new(std::size_t n, std::align_val_t align) {
  count(__builtin_return_address(0));
  return obtain(n, static_cast<std::size_t>(align));
}
void* operator new(std::size_t n, const std::nothrow_t&) noexcept {
  count(__builtin_return_address(0));
  return std::malloc(n ? n : 1);
}
void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
