// Replaces operator new and malloc's family for the program it is linked into, libraries it loads among it, and counts
// their calls.
#include "support/count_allocations.hpp"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

// Sanitizers replace malloc themselves.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && defined(__GLIBC__)
#define MLA_COUNT_MALLOC 1
extern "C" {
void* __libc_malloc(std::size_t) noexcept;
void* __libc_calloc(std::size_t, std::size_t) noexcept;
void* __libc_realloc(void*, std::size_t) noexcept;
void* __libc_memalign(std::size_t, std::size_t) noexcept;
}
#endif

namespace {

std::atomic<int64_t> allocations{0};

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

#if MLA_COUNT_MALLOC
extern "C" {
void* malloc(std::size_t n) {
  ++allocations;
  return __libc_malloc(n);
}
void* calloc(std::size_t n, std::size_t size) {
  ++allocations;
  return __libc_calloc(n, size);
}
void* realloc(void* p, std::size_t n) {
  ++allocations;
  return __libc_realloc(p, n);
}
void* aligned_alloc(std::size_t align, std::size_t n) {
  ++allocations;
  return __libc_memalign(align, n);
}
int posix_memalign(void** p, std::size_t align, std::size_t n) {
  ++allocations;
  *p = __libc_memalign(align, n);
  return *p ? 0 : ENOMEM;
}
}
#endif

void* operator new(std::size_t n) {
  ++allocations;
  return obtain(n);
}
void* operator new(std::size_t n, std::align_val_t align) {
  ++allocations;
  return obtain(n, static_cast<std::size_t>(align));
}
void* operator new(std::size_t n, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(n ? n : 1);
}
void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
