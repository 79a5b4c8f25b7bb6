// What every C function goes through: exceptions become statuses, handles and structs are checked before they are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "mla/c/base.h"
#include "mla/error.hpp"

namespace mla::capi {

/// NULL, a destroyed handle or one of another kind. Messages of what is thrown within guarded() leave the function's
/// name out: it puts it in front.
class HandleError : public Error {
 public:
  using Error::Error;
};

/// A status that the caller's own function gave.
class RecordError : public Error {
 public:
  RecordError(mla_status s, const std::string& what) : Error(what), status(s) {}
  mla_status status;
};

/// Base of what handles point to.
struct Object {
  virtual ~Object() = default;
  virtual std::string_view kind() const = 0;
};

/// Handles are numbers, each given once in a process: a destroyed one is never another object's, wherever that lies. No
/// pointer is behind them, so that any value is safe to pass; a call keeps what it found alive though another thread
/// destroys the handle meanwhile.
const void* adopt(std::shared_ptr<Object> object);
std::shared_ptr<Object> find(const void* handle);
/// Null when there is none.
std::shared_ptr<Object> remove(const void* handle);

/// Stores the message of the exception in flight for this thread and gives its status.
mla_status failed(const char* function) noexcept;

template <class F>
mla_status guarded(const char* function, F&& f) noexcept {
  try {
    f();
    return MLA_OK;
  } catch (...) {
    return failed(function);
  }
}

template <class T>
std::shared_ptr<T> get(const char* name, const T* handle) {
  if (!handle) throw HandleError(std::string(name) + " is NULL");
  const std::shared_ptr<Object> object = find(handle);
  if (!object) throw HandleError(std::string(name) + " is no handle, or a destroyed one");
  std::shared_ptr<T> found = std::dynamic_pointer_cast<T>(object);
  if (!found) throw HandleError(std::string(name) + " is a " + std::string(object->kind()) + ", needed: " + T::kKind);
  return found;
}

/// Null where the caller passed none.
template <class T>
std::shared_ptr<T> get_optional(const char* name, const T* handle) {
  return handle ? get(name, handle) : nullptr;
}

template <class T>
void put(T** out, std::shared_ptr<T> object) {
  *out = static_cast<T*>(const_cast<void*>(adopt(std::move(object))));
}

template <class T>
mla_status destroy(const char* function, const char* name, T* handle) noexcept {
  return guarded(function, [&] {
    if (!handle) return;
    get(name, handle);
    if (!remove(handle)) get(name, handle);  // another thread was first
  });
}

template <class T>
T& required(const char* name, T* pointer) {
  if (!pointer) throw HandleError(std::string(name) + " is NULL");
  return *pointer;
}

/// Where a new handle goes: NULL until there is one.
template <class T>
void expect_handle(const char* name, T** out) {
  required(name, out) = nullptr;
}

/// Of a struct that a caller passes: as many of its fields as both sides know, the others as in `defaults`.
///
/// Fields are never larger than their alignment of 8, so sizes that are multiples of it cut between fields. A field
/// that is added begins behind the old struct's sizeof, padding included.
template <class T>
T read_struct(const char* name, const T* in, const T& defaults) {
  static_assert(std::is_trivially_copyable_v<T> && alignof(T) == 8 && offsetof(T, struct_size) == 0);
  const size_t size = required(name, in).struct_size;
  const auto text = [&] { return std::string(name) + " struct_size is " + std::to_string(size); };
  if (size < sizeof(size_t) || size % alignof(T) != 0)
    throw ShapeError(text() + ", must be sizeof of the struct (" + std::to_string(sizeof(T)) + " in this library)");
  constexpr size_t kMost = 4096;  // more is no struct of any version
  if (size > kMost) throw ShapeError(text() + ", allowed up to " + std::to_string(kMost));
  const auto* bytes = reinterpret_cast<const unsigned char*>(in);
  for (size_t i = sizeof(T); i < size; ++i)
    if (bytes[i] != 0)
      throw UnsupportedError(text() + ", this library knows " + std::to_string(sizeof(T)) +
                             " bytes, and what follows is not zero");
  T out = defaults;
  std::memcpy(&out, in, size < sizeof(T) ? size : sizeof(T));
  out.struct_size = sizeof(T);
  return out;
}
template <class T>
T read_struct(const char* name, const T* in) {
  T none;
  std::memset(&none, 0, sizeof none);
  return read_struct(name, in, none);
}

/// Fills as many fields of a caller's struct as it has room for; its struct_size stays, what this library does not know
/// becomes zero.
template <class T>
void write_struct(const char* name, T* out, const T& values) {
  const size_t size = required(name, out).struct_size;
  read_struct(name, out);
  std::memcpy(reinterpret_cast<char*>(out) + sizeof(size_t), reinterpret_cast<const char*>(&values) + sizeof(size_t),
              (size < sizeof(T) ? size : sizeof(T)) - sizeof(size_t));
}

/// A C enumerator as the C++ one, whose values run from 0 to `last` and are the same.
template <class E>
E read_enum(const char* name, int64_t value, E last) {
  if (value < 0 || value > static_cast<int64_t>(last))
    throw InputError(std::string(name) + " is " + std::to_string(value) + ", allowed 0 to " +
                     std::to_string(static_cast<int64_t>(last)));
  return static_cast<E>(value);
}

inline bool read_flag(const char* name, int64_t value) {
  if (value != 0 && value != 1)
    throw InputError(std::string(name) + " is " + std::to_string(value) + ", allowed 0 and 1");
  return value == 1;
}

inline int64_t read_range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    throw InputError(std::string(name) + " is " + std::to_string(value) + ", allowed " + std::to_string(least) +
                     " to " + std::to_string(most));
  return value;
}

void write_text(std::string_view from, char* text, size_t capacity, size_t* length);

}  // namespace mla::capi
