// Every allocation of this program lies in memory that the host and the GPU read and write at one address, so that the
// conformance cases, made of host arrays, run on the GPU as they are. Blocks of powers of two, from one pinned arena;
// what does not fit, and everything where there is no GPU, comes from malloc.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>

namespace {

constexpr size_t kArena = size_t{3} << 30;
constexpr int kClasses = 40;
struct Free {
  Free* next;
};
struct Arena {
  std::mutex mutex;
  std::byte *begin = nullptr, *at = nullptr, *end = nullptr;
  Free* free[kClasses] = {};
  bool tried = false;
};
Arena& arena() {
  static Arena a;
  return a;
}
thread_local bool inside = false;  // the runtime allocates while the arena is made
// Libraries' constructors allocate too; compute-sanitizer's own would find the runtime at work before it watches it.
bool libraries_ready = false;
[[gnu::constructor]] void when_libraries_are_ready() { libraries_ready = true; }

int class_of(size_t bytes) { return std::bit_width((bytes < 64 ? 64 : bytes) - 1); }

void* take(size_t bytes) {
  Arena& a = arena();
  if (!inside) {
    const std::lock_guard lock(a.mutex);
    if (!a.tried && libraries_ready) {
      a.tried = inside = true;
      int devices = 0;
      void* memory = nullptr;
      if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0 &&
          cudaHostAlloc(&memory, kArena, cudaHostAllocPortable) == cudaSuccess) {
        a.begin = a.at = static_cast<std::byte*>(memory);
        a.end = a.begin + kArena;
      }
      cudaGetLastError();
      inside = false;
    }
    const int size_class = class_of(bytes);
    if (Free* f = a.free[size_class]) {
      a.free[size_class] = f->next;
      return f;
    }
    const size_t size = size_t{1} << size_class;
    if (a.at && static_cast<size_t>(a.end - a.at) >= size) {
      void* p = a.at;
      a.at += size;
      return p;
    }
  }
  void* p = nullptr;
  if (posix_memalign(&p, 64, bytes ? bytes : 1) != 0) throw std::bad_alloc();
  return p;
}

void give_back(void* p, size_t bytes) {
  if (!p) return;
  Arena& a = arena();
  std::byte* at = static_cast<std::byte*>(p);
  if (!a.begin || at < a.begin || at >= a.end) return std::free(p);
  if (bytes == 0) return;  // of unknown size: lost until the program ends
  const std::lock_guard lock(a.mutex);
  Free* f = static_cast<Free*>(p);
  f->next = a.free[class_of(bytes)];
  a.free[class_of(bytes)] = f;
}

}  // namespace

void* operator new(size_t n) { return take(n); }
void* operator new[](size_t n) { return take(n); }
void* operator new(size_t n, std::align_val_t) { return take(n); }
void operator delete(void* p) noexcept { give_back(p, 0); }
void operator delete[](void* p) noexcept { give_back(p, 0); }
void operator delete(void* p, size_t n) noexcept { give_back(p, n); }
void operator delete[](void* p, size_t n) noexcept { give_back(p, n); }
void operator delete(void* p, std::align_val_t) noexcept { give_back(p, 0); }
void operator delete(void* p, size_t n, std::align_val_t) noexcept { give_back(p, n); }

// Static objects outlive the arena, which goes with the runtime: nothing is torn down.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int failed = RUN_ALL_TESTS();
  std::fflush(nullptr);
  std::_Exit(failed);
}
