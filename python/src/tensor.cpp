#include "tensor.hpp"

#include <nanobind/stl/string.h>

#include <charconv>
#include <unordered_map>

namespace mla::python {
namespace {

[[noreturn]] void fail(std::string_view name, const std::string& what) {
  throw ShapeError(std::string(name) + ": " + what);
}

std::string class_of(nb::handle x) { return Py_TYPE(x.ptr())->tp_name; }

// NumPy exports no array of ml_dtypes through DLPack or the buffer protocol: the dtype's name says what its bits are,
// and the array is taken as integers of that size. Other arrays pass through.
struct Export {
  nb::object array;
  Element element = Element::f32;
  bool renamed = false;
};

// DLPack 1.3's table of C functions, which a framework's array type may carry: no Python is run to read an array.
struct ExchangeApi {
  struct {
    uint32_t major, minor;
  } version;
  ExchangeApi* older;
  void *allocate, *from_object, *to_object;
  int (*view)(void* object, nb::dlpack::dltensor* out);  ///< of memory that the object owns; may be null
  void* current_stream;
};

// Of an array's type; null when it has none.
const ExchangeApi* exchange_api(nb::handle array) {
  static std::unordered_map<PyTypeObject*, const ExchangeApi*> known;  // types are few, and stay
  PyTypeObject* const type = Py_TYPE(array.ptr());
  if (const auto found = known.find(type); found != known.end()) return found->second;
  const ExchangeApi* api = nullptr;
  if (const nb::object capsule =
          nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
      capsule.is_valid() && PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api"))
    api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  PyErr_Clear();
  while (api && api->version.major > 1) api = api->older;
  if (api && (api->version.major != 1 || !api->view)) api = nullptr;
  Py_INCREF(type);
  known.emplace(type, api);
  return api;
}

// torch's own export without its Python wrapper, an eighth of the time; null until torch is there.
struct Torch {
  nb::handle tensor, to_dlpack;
};
const Torch& torch() {
  static Torch found;  // never freed
  if (found.tensor.is_valid()) return found;
  const nb::object loaded = nb::steal(PyImport_GetModule(nb::str("torch").ptr()));
  PyErr_Clear();
  if (!loaded.is_valid() || !nb::hasattr(loaded, "_C") || !nb::hasattr(loaded, "Tensor")) return found;
  const nb::object module = loaded.attr("_C");
  if (!nb::hasattr(module, "_to_dlpack")) return found;
  found.to_dlpack = nb::object(module.attr("_to_dlpack")).release();
  found.tensor = nb::object(loaded.attr("Tensor")).release();
  return found;
}

// A torch tensor's capsule, which owns its memory; nothing for other arrays and for tensors that torch does not export.
nb::object torch_capsule(nb::handle array) {
  const Torch& t = torch();
  if (!t.tensor.is_valid() || !PyObject_TypeCheck(array.ptr(), reinterpret_cast<PyTypeObject*>(t.tensor.ptr())))
    return {};
  nb::object capsule = nb::steal(PyObject_CallOneArg(t.to_dlpack.ptr(), array.ptr()));
  PyErr_Clear();  // refusal() says why
  return capsule;
}

Export exported(nb::handle array) {
  static PyObject* const ndarray = nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr();
  Export e{nb::borrow(array)};
  if (!PyObject_TypeCheck(array.ptr(), reinterpret_cast<PyTypeObject*>(ndarray))) return e;
  const nb::object dtype = array.attr("dtype");
  if (nb::cast<int>(dtype.attr("num")) < 256) return e;  // NumPy's own
  std::string_view name = reinterpret_cast<PyTypeObject*>(nb::object(dtype.attr("type")).ptr())->tp_name;
  name = name.substr(name.rfind('.') + 1);
  if (name == "bfloat16") e.element = Element::bf16;
  else if (name == "float8_e4m3fn") e.element = Element::fp8_e4m3;
  else return e;
  e.renamed = true;
  e.array = array.attr("view")(e.element == Element::bf16 ? "uint16" : "uint8");
  return e;
}

// Why an array cannot be taken, in its own framework's words.
std::string refusal(nb::handle array) {
  if (!nb::hasattr(array, "__dlpack__"))
    return "is a " + class_of(array) + ", an array of a framework with DLPack is needed";
  try {
    array.attr("__dlpack__")();
  } catch (nb::python_error& e) {
    std::string text = nb::cast<std::string>(nb::str(e.value()));
    std::replace(text.begin(), text.end(), '\n', ' ');
    return "is an array that exports no memory: " + text;
  }
  return "is an array whose memory is of no known kind";
}

Element element_of(nb::dlpack::dtype t) {
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(t.code);
  if (t.lanes != 1) return Element::other;
  if (code == Code::Float && t.bits == 32) return Element::f32;
  if (code == Code::Float && t.bits == 16) return Element::f16;
  if (code == Code::Bfloat && t.bits == 16) return Element::bf16;
  if (t.code == 10 && t.bits == 8) return Element::fp8_e4m3;  // kDLFloat8_e4m3fn
  if ((code == Code::UInt || code == Code::Int) && t.bits == 8) return Element::byte;
  if (code == Code::Int && t.bits == 32) return Element::i32;
  if (code == Code::Int && t.bits == 64) return Element::i64;
  return Element::other;
}

std::string text_of(nb::dlpack::dtype t) {
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(t.code);
  const char* kind = code == Code::Float ? "float" : code == Code::Int ? "int" : code == Code::UInt ? "uint" : nullptr;
  if (code == Code::Bool && t.lanes == 1) return "bool";
  if (kind && t.lanes == 1) return kind + std::to_string(t.bits);
  return "of DLPack type " + std::to_string(t.code) + " in " + std::to_string(t.bits) + " bits";
}

}  // namespace

Tensor::Tensor(nb::handle array, std::string_view name, Access access, Use use) : name_(name) {
  if (const ExchangeApi* api = use == Use::call ? exchange_api(array) : nullptr) {
    nb::dlpack::dltensor t;
    if (api->view(array.ptr(), &t) == 0) {
      owner_ = nb::borrow(array);
      read(t, nullptr);
      return;
    }
    PyErr_Clear();  // refusal() says why
  }
  owner_ = torch_capsule(array);
  if (owner_.is_valid()) {
    // A DLManagedTensor begins with its DLTensor.
    const void* managed = PyCapsule_GetPointer(owner_.ptr(), "dltensor");
    if (!managed) throw nb::python_error();
    read(*static_cast<const nb::dlpack::dltensor*>(managed), nullptr);
    return;
  }
  const Export e = exported(array);
  if (access == Access::write) {
    nb::ndarray<> writable;
    if (nb::try_cast(e.array, writable, false)) held_ = nb::ndarray<nb::ro>(writable);
  } else {
    nb::try_cast(e.array, held_, false);
  }
  if (!held_.is_valid()) {
    PyErr_Clear();
    if (nb::ndarray<nb::ro> readable; access == Access::write && nb::try_cast(e.array, readable, false))
      fail(name, "is read-only, and is to be written");
    PyErr_Clear();
    fail(name, refusal(array));
  }
  nb::dlpack::dltensor t;
  t.data = const_cast<void*>(held_.data());
  t.device = {held_.device_type(), held_.device_id()};
  t.ndim = static_cast<int32_t>(held_.ndim());
  t.dtype = held_.dtype();
  t.shape = const_cast<int64_t*>(held_.shape_ptr());
  t.strides = const_cast<int64_t*>(held_.stride_ptr());
  read(t, e.renamed ? &e.element : nullptr);
}

void Tensor::read(const nb::dlpack::dltensor& t, const Element* element) {
  element_ = element ? *element : element_of(t.dtype);
  type_ = t.dtype;
  bytes_ = std::max(1, t.dtype.bits * t.dtype.lanes / 8);
  data_ = static_cast<std::byte*>(t.data) + t.byte_offset;
  if (t.ndim > static_cast<int32_t>(kMostDimensions))
    fail(name_,
         "has " + std::to_string(t.ndim) + " dimensions, at most " + std::to_string(kMostDimensions) + " are allowed");
  rank_ = static_cast<size_t>(t.ndim);
  bool empty = false;
  for (size_t i = 0; i < rank_; ++i) empty = (shape_[i] = t.shape[i]) == 0 || empty;
  // Frameworks do not agree on the strides of nothing.
  int64_t step = 1;
  for (size_t i = rank_; i-- > 0; step *= std::max<int64_t>(1, shape_[i]))
    strides_[i] = empty || !t.strides ? step : t.strides[i];
  if (reinterpret_cast<uintptr_t>(data_) % static_cast<uintptr_t>(bytes_) != 0)
    fail(name_, "lies at an address that is no multiple of its elements' " + std::to_string(bytes_) + " bytes");
  switch (t.device.device_type) {
    case nb::device::cpu::value:
    case nb::device::cuda_host::value: break;
    case nb::device::cuda::value:
    case nb::device::cuda_managed::value: device_ = {DeviceKind::cuda, t.device.device_id}; break;
    default:
      fail(name_,
           "lies on DLPack device type " + std::to_string(t.device.device_type) + ", allowed: CPU and CUDA memory");
  }
}

std::string Tensor::shape_text() const {
  std::string s;
  for (size_t i = 0; i < rank_; ++i) s += (s.empty() ? "[" : ", ") + std::to_string(shape_[i]);
  return s.empty() ? "[]" : s + "]";
}

void Tensor::require_rank(size_t rank, std::string_view dims) const {
  if (rank_ != rank) fail(name_, "has shape " + shape_text() + ", " + std::string(dims) + " is needed");
}

void Tensor::require_device(Device device) const {
  if (device_ != device)
    fail(name_, "lies on " + mla::to_string(device_) + ", the stream is on " + mla::to_string(device));
}

std::string Tensor::element_text() const {
  switch (element_) {
    case Element::f32: return "f32";
    case Element::bf16: return "bf16";
    case Element::f16: return "f16";
    case Element::fp8_e4m3: return "fp8_e4m3";
    case Element::byte: return "8-bit integers";
    case Element::i32: return "int32";
    case Element::i64: return "int64";
    case Element::other: return text_of(type_);
  }
  return "?";
}

Dtype Tensor::dtype() const {
  switch (element_) {
    case Element::f32: return Dtype::f32;
    case Element::bf16: return Dtype::bf16;
    case Element::f16: return Dtype::f16;
    case Element::fp8_e4m3: return Dtype::fp8_e4m3;
    default: fail(name_, "is " + element_text() + ", allowed: f32 bf16 f16 fp8_e4m3");
  }
}

void Tensor::require_int32() const {
  if (element_ != Element::i32) fail(name_, "is " + element_text() + ", int32 is needed");
}

std::vector<int32_t> Tensor::int32_values() const {
  if (element_ != Element::i64) require_int32();
  require_device({});
  std::vector<int32_t> values;
  int64_t count = 1;
  for (size_t i = 0; i < rank_; ++i) count *= shape_[i];
  values.reserve(static_cast<size_t>(count));
  for (int64_t n = 0; n < count; ++n) {
    int64_t at = 0, rest = n;
    for (size_t i = rank_; i-- > 0; rest /= shape_[i]) at += rest % shape_[i] * strides_[i];
    const int64_t value = element_ == Element::i32 ? reinterpret_cast<const int32_t*>(data_)[at]
                                                   : reinterpret_cast<const int64_t*>(data_)[at];
    if (!std::in_range<int32_t>(value))
      fail(name_, "element " + std::to_string(n) + " is " + std::to_string(value) + ", int32 is needed");
    values.push_back(static_cast<int32_t>(value));
  }
  return values;
}

Device parse_device(std::string_view name) {
  if (name == "cpu") return {};
  int index = 0;
  if (name == "cuda") return {DeviceKind::cuda, index};
  if (name.starts_with("cuda:")) {
    const std::string_view digits = name.substr(5);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    if (error == std::errc() && end == digits.data() + digits.size() && index >= 0) return {DeviceKind::cuda, index};
  }
  throw InputError("device is '" + std::string(name) + "', allowed: cpu cuda cuda:N");
}

}  // namespace mla::python
