#include "comm/device_carrier.hpp"
#include "core/device_attention.hpp"
#include "core/device_largest.hpp"
#include "core/gpu.hpp"
#include "mla/error.hpp"

namespace mla::gpu {
namespace {

[[noreturn]] void none(int index) {
  throw DeviceError("cuda:" + std::to_string(index) + ": this build has no CUDA; the CPU serves everything");
}

}  // namespace

// Without a stream on a GPU, which open() refuses, nothing below it is reached.
int count() { return 0; }
std::string describe(int index) { none(index); }
std::byte* allocate(size_t, int index) { none(index); }
void release(std::byte*, int) noexcept {}
void upload(std::byte*, const void*, size_t, int index) { none(index); }
std::byte* allocate_pinned(size_t) { none(0); }
void release_pinned(std::byte*) noexcept {}
int current() { return 0; }
void make_current(int) {}
std::shared_ptr<cuda::Queue> open(int index, void*) { none(index); }
std::shared_ptr<cuda::Queue> lane(const std::shared_ptr<cuda::Queue>&, int) { return nullptr; }
void wait(cuda::Queue&, cuda::Queue&) {}
void* native(const cuda::Queue&) { return nullptr; }
void synchronize(cuda::Queue&) {}
void copy(cuda::Queue&, void*, const void*, size_t) {}
void clear(cuda::Queue&, void*, size_t, int64_t, size_t) {}
void begin_capture(cuda::Queue&) {}
void abandon_capture(cuda::Queue&) noexcept {}
std::shared_ptr<void> end_capture(cuda::Queue&) { return nullptr; }
void launch(cuda::Queue&, void*) {}
bool capturing(const cuda::Queue&) { return false; }
Mark::~Mark() = default;
void Mark::set(cuda::Queue&) {}
void Mark::wait() const {}
std::shared_ptr<void> hold(cuda::Queue&) { return nullptr; }
void open_gate(void*) noexcept {}
bool held(const cuda::Queue&) { return false; }
Stopwatch::Stopwatch() = default;
Stopwatch::~Stopwatch() = default;
void Stopwatch::start(cuda::Queue&) {}
void Stopwatch::stop(cuda::Queue&) {}
double Stopwatch::seconds() const { return 0; }
std::unique_ptr<DeviceCarrier> connect(const DeviceGroup& group) { none(group.device); }
size_t workspace_bytes(const PagedAttention&) { return 0; }
size_t workspace_bytes(const ListAttention&) { return 0; }
size_t workspace_bytes(const SequenceAttention&) { return 0; }
unsigned long long capture_of(int device, void*) { none(device); }
void attend(const PagedAttention&, const CallerStream& at) { none(at.device); }
void attend(const ListAttention&, const CallerStream& at) { none(at.device); }
void attend(const SequenceAttention&, const CallerStream& at) { none(at.device); }
void raise_to_largest(cuda::Queue&, const AnyView<Token, Head, In>&, float*) { none(0); }

}  // namespace mla::gpu
