#include "capi/tensor.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/find_twice.hpp"

namespace mla::capi {
namespace {

// DLDataTypeCode's numbers, some of which an older DLPack header does not name.
constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kFloat8E4m3fn = 10;

std::string text(DLDataType t) {
  std::string out;
  switch (t.code) {
    case kInt: out = "int"; break;
    case kUInt: out = "uint"; break;
    case kFloat: out = "float"; break;
    case kBfloat: out = "bfloat"; break;
    case kFloat8E4m3fn: return "float8_e4m3fn" + (t.lanes == 1 ? "" : "x" + std::to_string(t.lanes));
    default: out = "type " + std::to_string(t.code) + " of ";
  }
  out += std::to_string(t.bits);
  if (t.lanes != 1) out += "x" + std::to_string(t.lanes);
  return out;
}

std::optional<Element> parse(DLDataType t) {
  if (t.lanes != 1) return {};
  if (t.code == kFloat && t.bits == 32) return Element::f32;
  if (t.code == kBfloat && t.bits == 16) return Element::bf16;
  if (t.code == kFloat && t.bits == 16) return Element::f16;
  if (t.code == kFloat8E4m3fn && t.bits == 8) return Element::fp8_e4m3;
  if (t.code == kInt && t.bits == 32) return Element::i32;
  if (t.code == kUInt && t.bits == 8) return Element::u8;
  return {};
}

int64_t size_of(Element e) {
  switch (e) {
    case Element::f32:
    case Element::i32: return 4;
    case Element::bf16:
    case Element::f16: return 2;
    case Element::fp8_e4m3:
    case Element::u8: return 1;
  }
  return 1;
}

std::string text(DLDevice d) {
  switch (static_cast<int>(d.device_type)) {
    case kDLCPU: return "cpu";
    case kDLCUDA: return "cuda:" + std::to_string(d.device_id);
    case kDLCUDAHost: return "pinned host memory";
    case kDLCUDAManaged: return "managed memory";
    default: return "device type " + std::to_string(static_cast<int>(d.device_type));
  }
}

// Whether a device reads a tensor's memory where it lies.
bool reachable(Device from, DLDevice memory) {
  const int type = static_cast<int>(memory.device_type);
  if (type == kDLCUDAHost || type == kDLCUDAManaged) return true;
  if (from.kind == DeviceKind::cpu) return type == kDLCPU;
  return type == kDLCUDA && memory.device_id == from.index;
}

// No element of a written tensor lies where another does: a dimension steps over all that the shorter steps reach.
void require_apart(const std::string& name, const Checked& c, std::initializer_list<std::string_view> dims) {
  for (size_t d = 0; d < dims.size(); ++d) {
    if (c.extents[d] <= 1) continue;
    int64_t taken = 1;
    for (size_t e = 0; e < dims.size(); ++e)
      if (c.extents[e] > 1 && std::pair(c.strides[e], e) < std::pair(c.strides[d], d))
        taken += c.strides[e] * (c.extents[e] - 1);
    if (c.strides[d] < taken)
      throw ShapeError(name + " " + std::string(*(dims.begin() + d)) + " has stride " + std::to_string(c.strides[d]) +
                       ", at least " + std::to_string(taken) + " is needed for elements that are written");
  }
}

}  // namespace

std::string_view to_string(Element e) {
  switch (e) {
    case Element::f32: return "float32";
    case Element::bf16: return "bfloat16";
    case Element::f16: return "float16";
    case Element::fp8_e4m3: return "float8_e4m3fn";
    case Element::i32: return "int32";
    case Element::u8: return "uint8";
  }
  return "";
}

Device read_device(DLDevice d) {
  const int type = static_cast<int>(d.device_type);
  if (type != kDLCPU && type != kDLCUDA)
    throw UnsupportedError("device type is " + std::to_string(type) + ", allowed: 1 (CPU) 2 (CUDA)");
  if (d.device_id < 0 || (type == kDLCPU && d.device_id != 0))
    throw InputError("device_id is " + std::to_string(d.device_id) + " of " + (type == kDLCPU ? "the CPU" : "a GPU"));
  return {type == kDLCPU ? DeviceKind::cpu : DeviceKind::cuda, d.device_id};
}

DLDevice write_device(Device d) { return {d.kind == DeviceKind::cpu ? kDLCPU : kDLCUDA, d.index}; }

void Tensors::require_dense(const char* name, std::string_view dim, int64_t extent, int64_t stride) {
  if (extent > 1 && stride != 1)
    throw ShapeError(std::string(name) + " " + std::string(dim) + " has stride " + std::to_string(stride) +
                     ", 1 is needed");
}

Checked Tensors::check_dtypes(const char* name, const DLTensor* t, std::initializer_list<Dtype> allowed,
                              std::initializer_list<std::string_view> dims, bool writable) const {
  // Dtype's numbers are Element's first ones.
  static_assert(sizeof(Dtype) == sizeof(Element));
  Element elements[4];
  std::transform(allowed.begin(), allowed.end(), elements, element_of);
  switch (allowed.size()) {
    case 1: return check(name, t, {elements[0]}, dims, writable);
    case 2: return check(name, t, {elements[0], elements[1]}, dims, writable);
    case 3: return check(name, t, {elements[0], elements[1], elements[2]}, dims, writable);
    default: return check(name, t, {elements[0], elements[1], elements[2], elements[3]}, dims, writable);
  }
}

Checked Tensors::check(const char* name, const DLTensor* t, std::initializer_list<Element> allowed,
                       std::initializer_list<std::string_view> dims, bool writable) const {
  const std::string n = name;
  if (!t) throw ShapeError(n + " is missing");

  std::optional<Element> found = parse(t->dtype);
  if (found == Element::u8 && std::find(allowed.begin(), allowed.end(), Element::u8) == allowed.end())
    found = Element::fp8_e4m3;  // frameworks without the dtype hold its codes in bytes
  if (!found || std::find(allowed.begin(), allowed.end(), *found) == allowed.end()) {
    std::string list;
    for (Element e : allowed) list += " " + std::string(to_string(e));
    throw ShapeError(n + " dtype is " + text(t->dtype) + ", allowed:" + list);
  }
  if (!reachable(device_, t->device))
    throw ShapeError(n + " is on " + text(t->device) + ", the call is on " + mla::to_string(device_));

  if (t->ndim != static_cast<int32_t>(dims.size())) {
    std::string list;
    for (std::string_view d : dims) list += (list.empty() ? "" : ", ") + std::string(d);
    throw ShapeError(n + " has " + std::to_string(t->ndim) + " dimensions, needed: [" + list + "]");
  }
  if (!t->shape) throw ShapeError(n + " has no shape");
  if (t->byte_offset > (uint64_t{1} << 62))
    throw ShapeError(n + " byte_offset is " + std::to_string(t->byte_offset) + ", allowed up to 2^62");

  Checked c{.element = *found};
  // Extents, strides and every offset that they reach fit 2^62 bytes.
  constexpr int64_t kMost = int64_t{1} << 59;
  int64_t count = 1, reach = 0;
  decltype(c.strides) dense{};
  const size_t rank = dims.size();
  for (size_t i = 0; i < rank; ++i) {
    const std::string dim(*(dims.begin() + i));
    c.extents[i] = t->shape[i];
    if (c.extents[i] < 0) throw ShapeError(n + " " + dim + " is " + std::to_string(c.extents[i]));
  }
  bool empty = false;
  for (size_t i = rank; i-- > 0;) {
    empty |= c.extents[i] == 0;
    dense[i] = count;
    c.strides[i] = t->strides ? t->strides[i] : count;
    if (__builtin_mul_overflow(count, std::max<int64_t>(c.extents[i], 1), &count) || count > kMost)
      throw ShapeError(n + " has more than 2^59 elements");
  }
  // Nothing of an empty tensor is read, whatever its strides: those of a dense one serve.
  if (empty) {
    c.strides = dense;
  } else {
    for (size_t i = 0; i < rank; ++i) {
      const std::string dim(*(dims.begin() + i));
      const int64_t stride = c.strides[i], extent = c.extents[i];
      if (extent == 1) {
        // Frameworks put anything there.
        if (stride < 0 || stride > kMost) c.strides[i] = 1;
        continue;
      }
      if (stride < (writable ? 1 : 0))
        throw ShapeError(n + " " + dim + " has stride " + std::to_string(stride) + ", at least " +
                         (writable ? "1" : "0") + " is needed");
      int64_t span = 0;
      if (__builtin_mul_overflow(stride, extent - 1, &span) || __builtin_add_overflow(reach, span, &reach) ||
          reach > kMost)
        throw ShapeError(n + " " + dim + " has stride " + std::to_string(stride) + ", which leaves 2^59 elements");
    }
    if (!t->data) throw ShapeError(n + " has no data");
    if (writable) require_apart(n, c, dims);
  }
  // Kernels form addresses of rows that have no elements, too: those of an empty tensor are in the library's own bytes.
  alignas(64) static char nothing[64];
  if (empty) {
    c.data = nothing;
    return c;
  }
  const uintptr_t address = reinterpret_cast<uintptr_t>(t->data) + t->byte_offset;
  if (const auto past = static_cast<int64_t>(address % static_cast<uintptr_t>(size_of(*found))); past != 0)
    throw ShapeError(n + " is at an address that is " + std::to_string(past) + " past a multiple of " +
                     std::to_string(size_of(*found)));
  c.data = static_cast<char*>(t->data) + t->byte_offset;
  return c;
}

std::span<const int32_t> read_slots(const int32_t* slots, int64_t count) {
  const std::span<const int32_t> list = read_list("slots", slots, count);
  // Mostly they rise, as positions do in pages that were taken one after the other.
  int32_t last = -1;
  if (std::all_of(list.begin(), list.end(), [&](int32_t slot) { return slot < 0 || slot > std::exchange(last, slot); }))
    return list;
  if (const auto tokens = find_twice(list))
    throw ShapeError("slots[" + std::to_string(tokens->second) + "] is " + std::to_string(list[tokens->second]) +
                     ", the slot of token " + std::to_string(tokens->first) + " too: one of them would be lost");
  return list;
}

}  // namespace mla::capi
