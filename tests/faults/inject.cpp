// Preloaded into a program: makes the n-th call of a kind fail, once or from then on, and counts calls.
//
//   MLA_FAULT_KIND    alloc, mmap, open, read, write, stat, rename, thread, or cuda: any function of the CUDA driver
//   MLA_FAULT_AT      which call of that kind fails, from 1
//   MLA_FAULT_FROM    set: all later ones fail, too
//   MLA_FAULT_WINDOW  set: calls count between fault_window(1) and fault_window(0), which the program calls; else in
//                     main
//
//   MLA_FAULT_OF      parts of names of files, separated by commas: only calls out of these libraries count, of those
//                     that are loaded when the window opens
//
//   MLA_FAULT_HURRY   set: each look at the clock of intervals takes 10 ms of it, for programs that measure for a while
//   MLA_FAULT_REPORT  a file: "fired" is added to it when a call fails, and the counts when counting ends
//   MLA_FAULT_TRACE   set: where the failing call came from goes to stderr
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

enum Kind { alloc, map, open_, read_, write_, stat_, rename_, thread_, cuda, kinds };
constexpr const char* kNames[] = {"alloc", "mmap", "open", "read", "write", "stat", "rename", "thread", "cuda"};

std::atomic<bool> counting{false};
std::atomic<long> counts[kinds];
std::atomic<long> live_blocks{0}, live_maps{0};
Kind chosen = kinds;
long at = 0;
bool from = false, trace = false;
const char* report = nullptr;

void tell(const char* text) {
  if (!report) return;
  const long fd = syscall(SYS_openat, AT_FDCWD, report, O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (fd < 0) return;
  syscall(SYS_write, fd, text, std::strlen(text));
  syscall(SYS_close, fd);
}

// Code of the libraries whose calls count; all do when none is named.
struct Code {
  uintptr_t begin, end;
};
Code codes[64];
int code_count = 0;
const char* of = nullptr;

int find_code(dl_phdr_info* library, size_t, void*) {
  for (const char* name = of; *name;) {
    const size_t n = std::strcspn(name, ",");
    if (n > 0 && memmem(library->dlpi_name, std::strlen(library->dlpi_name), name, n))
      for (int i = 0; i < library->dlpi_phnum && code_count < 64; ++i) {
        const auto& part = library->dlpi_phdr[i];
        const uintptr_t begin = library->dlpi_addr + part.p_vaddr;
        if (part.p_type == PT_LOAD && part.p_flags & PF_X) codes[code_count++] = {begin, begin + part.p_memsz};
      }
    name += n + (name[n] == ',');
  }
  return 0;
}

bool counts_from(const void* caller) {
  if (!of) return true;
  const auto at_caller = reinterpret_cast<uintptr_t>(caller);
  for (int i = 0; i < code_count; ++i)
    if (at_caller >= codes[i].begin && at_caller < codes[i].end) return true;
  return false;
}

bool fails_from(const void* caller, Kind kind, int error) {
  if (!counting.load(std::memory_order_relaxed) || !counts_from(caller)) return false;
  const long n = ++counts[kind];
  if (kind != chosen || n < at || (n > at && !from)) return false;
  if (n == at) {
    tell("fired\n");
    if (trace) {
      counting = false;
      void* frames[40];
      backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
      counting = true;
    }
  }
  errno = error;
  return true;
}

// Inlined, so that the caller is that of the function that stands for the system's.
[[gnu::always_inline]] inline bool fails(Kind kind, int error) {
  return fails_from(__builtin_return_address(0), kind, error);
}

template <class F>
F* next(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

void end() {
  counting = false;
  char text[256] = "";
  for (int k = 0; k < kinds; ++k) {
    const size_t used = std::strlen(text);
    std::snprintf(text + used, sizeof text - used, "%s %ld\n", kNames[k], counts[k].load());
  }
  tell(text);
}

bool hurry = false;
std::atomic<int64_t> looks{0};

int (*program)(int, char**, char**) = nullptr;

int counted_main(int argc, char** argv, char** env) {
  const char* kind = std::getenv("MLA_FAULT_KIND");
  for (int k = 0; k < kinds; ++k)
    if (kind && std::strcmp(kind, kNames[k]) == 0) chosen = static_cast<Kind>(k);
  if (const char* n = std::getenv("MLA_FAULT_AT")) at = std::atol(n);
  from = std::getenv("MLA_FAULT_FROM");
  trace = std::getenv("MLA_FAULT_TRACE");
  report = std::getenv("MLA_FAULT_REPORT");
  hurry = std::getenv("MLA_FAULT_HURRY");
  of = std::getenv("MLA_FAULT_OF");
  if (trace) {
    void* frames[2];
    backtrace(frames, 2);  // loads what it needs
  }
  if (std::getenv("MLA_FAULT_WINDOW")) return program(argc, argv, env);
  counting = true;
  const int status = program(argc, argv, env);
  end();
  return status;
}

}  // namespace

extern "C" {

void* __libc_malloc(size_t) noexcept;
void* __libc_calloc(size_t, size_t) noexcept;
void* __libc_realloc(void*, size_t) noexcept;
void* __libc_memalign(size_t, size_t) noexcept;
void __libc_free(void*) noexcept;

// The program's own: opens and closes what counts.
void fault_window(int on) {
  if (!on) return end();
  code_count = 0;
  if (of) dl_iterate_phdr(find_code, nullptr);
  counting = true;
}
// Blocks and maps that are held, by whoever took them.
long fault_live() { return live_blocks + live_maps; }

int __libc_start_main(int (*main)(int, char**, char**), int argc, char** argv, void (*init)(), void (*fini)(),
                      void (*rtld_fini)(), void* stack_end) {
  program = main;
  return next<decltype(__libc_start_main)>("__libc_start_main")(counted_main, argc, argv, init, fini, rtld_fini,
                                                                stack_end);
}

static void* held(void* p) {
  if (p) ++live_blocks;
  return p;
}
void* malloc(size_t n) { return fails(alloc, ENOMEM) ? nullptr : held(__libc_malloc(n)); }
void* calloc(size_t n, size_t size) { return fails(alloc, ENOMEM) ? nullptr : held(__libc_calloc(n, size)); }
void* realloc(void* p, size_t n) {
  if (fails(alloc, ENOMEM)) return nullptr;
  if (p && n == 0) --live_blocks;
  void* q = __libc_realloc(p, n);
  if (!p && q) ++live_blocks;
  return q;
}
[[gnu::always_inline]] static inline void* aligned(size_t align, size_t n) {
  return fails(alloc, ENOMEM) ? nullptr : held(__libc_memalign(align, n));
}
void* memalign(size_t align, size_t n) { return aligned(align, n); }
void* aligned_alloc(size_t align, size_t n) { return aligned(align, n); }
int posix_memalign(void** p, size_t align, size_t n) {
  const int before = errno;
  void* q = aligned(align, n);
  errno = before;
  if (!q) return ENOMEM;
  *p = q;
  return 0;
}
void free(void* p) {
  if (p) --live_blocks;
  __libc_free(p);
}

void* mmap(void* where, size_t n, int protection, int flags, int fd, off_t offset) noexcept {
  if (fails(map, ENOMEM)) return MAP_FAILED;
  void* p = reinterpret_cast<void*>(syscall(SYS_mmap, where, n, protection, flags, fd, offset));
  if (p != MAP_FAILED) ++live_maps;
  return p;
}
int munmap(void* p, size_t n) noexcept {
  const int status = static_cast<int>(syscall(SYS_munmap, p, n));
  if (status == 0) --live_maps;
  return status;
}

[[gnu::always_inline]] static inline int opened(int folder, const char* path, int flags, va_list more) {
  if (fails(open_, EMFILE)) return -1;
  return static_cast<int>(syscall(SYS_openat, folder, path, flags, flags & O_CREAT ? va_arg(more, int) : 0));
}
int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int fd = opened(AT_FDCWD, path, flags, more);
  va_end(more);
  return fd;
}
int open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int fd = opened(AT_FDCWD, path, flags, more);
  va_end(more);
  return fd;
}
int openat(int folder, const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int fd = opened(folder, path, flags, more);
  va_end(more);
  return fd;
}
FILE* fopen(const char* path, const char* mode) {
  return fails(open_, EMFILE) ? nullptr : next<decltype(fopen)>("fopen")(path, mode);
}
FILE* fopen64(const char* path, const char* mode) {
  return fails(open_, EMFILE) ? nullptr : next<decltype(fopen64)>("fopen64")(path, mode);
}
int mkostemp(char* path, int flags) {
  return fails(open_, EMFILE) ? -1 : next<decltype(mkostemp)>("mkostemp")(path, flags);
}
int mkstemp(char* path) { return fails(open_, EMFILE) ? -1 : next<decltype(mkstemp)>("mkstemp")(path); }

ssize_t read(int fd, void* to, size_t n) { return fails(read_, EIO) ? -1 : syscall(SYS_read, fd, to, n); }
ssize_t pread(int fd, void* to, size_t n, off_t offset) {
  return fails(read_, EIO) ? -1 : syscall(SYS_pread64, fd, to, n, offset);
}
ssize_t pread64(int fd, void* to, size_t n, off64_t offset) {
  return fails(read_, EIO) ? -1 : syscall(SYS_pread64, fd, to, n, offset);
}
ssize_t readv(int fd, const struct iovec* to, int n) { return fails(read_, EIO) ? -1 : syscall(SYS_readv, fd, to, n); }
ssize_t write(int fd, const void* from_, size_t n) {
  return fails(write_, ENOSPC) ? -1 : syscall(SYS_write, fd, from_, n);
}
ssize_t writev(int fd, const struct iovec* from_, int n) {
  return fails(write_, ENOSPC) ? -1 : syscall(SYS_writev, fd, from_, n);
}
int fstat(int fd, struct stat* to) noexcept {
  return fails(stat_, EIO) ? -1 : static_cast<int>(syscall(SYS_fstat, fd, to));
}
int stat(const char* path, struct stat* to) noexcept {
  return fails(stat_, EIO) ? -1 : static_cast<int>(syscall(SYS_newfstatat, AT_FDCWD, path, to, 0));
}
int rename(const char* a, const char* b) noexcept {
  return fails(rename_, EIO) ? -1 : static_cast<int>(syscall(SYS_renameat, AT_FDCWD, a, AT_FDCWD, b));
}
int clock_gettime(clockid_t clock, struct timespec* to) noexcept {
  const int status = static_cast<int>(syscall(SYS_clock_gettime, clock, to));
  if (status != 0 || clock != CLOCK_MONOTONIC || !hurry) return status;
  constexpr int64_t kSecond = 1000000000, kLook = 10000000;
  const int64_t now = to->tv_nsec + kLook * ++looks;
  to->tv_sec += now / kSecond;
  to->tv_nsec = now % kSecond;
  return 0;
}
int fsync(int fd) { return fails(rename_, EIO) ? -1 : static_cast<int>(syscall(SYS_fsync, fd)); }

// The CUDA runtime, linked statically too, finds each of the driver's functions by one that it finds by dlsym. What it
// gets are stubs that come here first. Arguments stay in their registers: no function of the driver takes a float by
// value.
#if defined(__x86_64__)
constexpr int kMostStubs = 2048;
constexpr size_t kStubBytes = 32;
static void* driver[kMostStubs];
static bool creates[kMostStubs];
static std::atomic<int> stubs{0};
static pthread_mutex_t stubs_lock = PTHREAD_MUTEX_INITIALIZER;

static int cuda_out_of_memory() { return 2; }
static int cuda_launch_failed() { return 719; }
__attribute__((visibility("hidden"), used)) void* fault_cuda_target(int stub, const void* caller) {
  if (!fails_from(caller, cuda, 0)) return driver[stub];
  return reinterpret_cast<void*>(creates[stub] ? cuda_out_of_memory : cuda_launch_failed);
}
__attribute__((visibility("hidden"))) void fault_cuda_entry();
asm(R"(
  .text
  .hidden fault_cuda_entry
  .type fault_cuda_entry, @function
fault_cuda_entry:
  push %rdi; push %rsi; push %rdx; push %rcx; push %r8; push %r9; push %r11
  mov %r11d, %edi
  mov 56(%rsp), %rsi
  call fault_cuda_target
  pop %r11; pop %r9; pop %r8; pop %rcx; pop %rdx; pop %rsi; pop %rdi
  jmp *%rax
  .size fault_cuda_entry, . - fault_cuda_entry
)");

static void* stub_of(const char* name, void* function) {
  static unsigned char* code = static_cast<unsigned char*>(
      reinterpret_cast<void*>(syscall(SYS_mmap, nullptr, kMostStubs * kStubBytes, PROT_READ | PROT_WRITE | PROT_EXEC,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)));
  pthread_mutex_lock(&stubs_lock);
  int n = 0;
  while (n < stubs && driver[n] != function) ++n;
  if (n < kMostStubs && n == stubs) {
    driver[n] = function;
    creates[n] = std::strstr(name, "Alloc") || std::strstr(name, "Create");
    unsigned char* at_stub = code + n * kStubBytes;
    const auto entry = reinterpret_cast<uint64_t>(&fault_cuda_entry);
    const unsigned char start[] = {0x41, 0xbb}, move[] = {0x48, 0xb8}, jump[] = {0xff, 0xe0};
    std::memcpy(at_stub, start, 2);  // mov $n, %r11d
    std::memcpy(at_stub + 2, &n, 4);
    std::memcpy(at_stub + 6, move, 2);  // movabs $entry, %rax
    std::memcpy(at_stub + 8, &entry, 8);
    std::memcpy(at_stub + 16, jump, 2);  // jmp *%rax
    ++stubs;
  }
  pthread_mutex_unlock(&stubs_lock);
  return n < kMostStubs ? code + n * kStubBytes : function;
}

using Find2 = int(const char*, void**, int, uint64_t, void*);
using Find1 = int(const char*, void**, int, uint64_t);
static Find2* find2 = nullptr;
static Find1* find1 = nullptr;
static void wrap(const char* name, void** function);
static int found2(const char* name, void** function, int version, uint64_t flags, void* status) {
  const int error = find2(name, function, version, flags, status);
  if (error == 0) wrap(name, function);
  return error;
}
static int found1(const char* name, void** function, int version, uint64_t flags) {
  const int error = find1(name, function, version, flags);
  if (error == 0) wrap(name, function);
  return error;
}
static void wrap(const char* name, void** function) {
  if (!function || !*function) return;
  if (std::strncmp(name, "cuGetProcAddress", 16) == 0) {
    if (*function == reinterpret_cast<void*>(find2)) *function = reinterpret_cast<void*>(found2);
    else if (*function == reinterpret_cast<void*>(find1)) *function = reinterpret_cast<void*>(found1);
    return;
  }
  // Data, or told apart by nothing that may fail.
  if (std::strcmp(name, "cuGetExportTable") == 0 || std::strncmp(name, "cuGetError", 10) == 0) return;
  *function = stub_of(name, *function);
}

void* dlsym(void* handle, const char* name) noexcept {
  using Dlsym = void*(void*, const char*);
  static auto* const real = [] {
    void* p = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    return reinterpret_cast<Dlsym*>(p ? p : dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5"));
  }();
  void* p = real(handle, name);
  if (p && std::strcmp(name, "cuGetProcAddress_v2") == 0) {
    find2 = reinterpret_cast<Find2*>(p);
    return reinterpret_cast<void*>(found2);
  }
  if (p && std::strcmp(name, "cuGetProcAddress") == 0) {
    find1 = reinterpret_cast<Find1*>(p);
    return reinterpret_cast<void*>(found1);
  }
  return p;
}
#endif

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) noexcept {
  if (fails(thread_, EAGAIN)) return EAGAIN;
  return next<decltype(pthread_create)>("pthread_create")(thread, attributes, start, argument);
}
}
