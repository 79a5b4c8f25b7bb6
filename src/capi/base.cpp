#include <mutex>
#include <new>
#include <shared_mutex>
#include <stdexcept>
#include <unordered_map>

#include "capi/boundary.hpp"
#include "core/one_line.hpp"

namespace mla::capi {
namespace {

// No address of an object: on 64-bit machines none has the highest bit.
constexpr uintptr_t kFirst = (~uintptr_t{0} >> 1) + 1;

// Never destroyed: handles may be ended by other objects' destructors as the process ends.
struct Registry {
  std::shared_mutex mutex;
  uintptr_t next = kFirst;
  std::unordered_map<uintptr_t, std::shared_ptr<Object>> objects;
};
Registry& registry() {
  static Registry& r = *new Registry;
  return r;
}

uintptr_t number(const void* handle) { return reinterpret_cast<uintptr_t>(handle); }

thread_local std::string last_message;
thread_local const char* last_text = "";

mla_status failed(const char* function, mla_status status, std::string_view what) noexcept {
  try {
    // An op's messages begin with its name, which the function's has too.
    std::string message = function;
    const std::string_view op = std::string_view(function).substr(sizeof("mla_") - 1);
    if (what.size() > op.size() + 1 && what.substr(0, op.size()) == op && what[op.size()] == ':')
      what.remove_prefix(op.size() + 2);
    message.append(": ").append(one_line(what));
    last_message = std::move(message);
    last_text = last_message.c_str();
  } catch (...) {
    last_text = "out of memory";
  }
  return status;
}

}  // namespace

const void* adopt(std::shared_ptr<Object> object) {
  Registry& r = registry();
  const std::scoped_lock lock(r.mutex);
  if (r.next == ~uintptr_t{0}) throw DeviceError("no handles are left");
  r.objects.emplace(r.next, std::move(object));
  return reinterpret_cast<const void*>(r.next++);
}

std::shared_ptr<Object> find(const void* handle) {
  Registry& r = registry();
  const std::shared_lock lock(r.mutex);
  const auto at = r.objects.find(number(handle));
  return at == r.objects.end() ? nullptr : at->second;
}

std::shared_ptr<Object> remove(const void* handle) {
  Registry& r = registry();
  const std::scoped_lock lock(r.mutex);
  const auto at = r.objects.find(number(handle));
  if (at == r.objects.end()) return nullptr;
  std::shared_ptr<Object> object = std::move(at->second);
  r.objects.erase(at);
  return object;  // destroyed by the caller, without the lock
}

mla_status failed(const char* function) noexcept {
  try {
    throw;
  } catch (const HandleError& e) {
    return failed(function, MLA_ERROR_HANDLE, e.what());
  } catch (const RecordError& e) {
    return failed(function, e.status, e.what());
  } catch (const ShapeError& e) {
    return failed(function, MLA_ERROR_SHAPE, e.what());
  } catch (const UnsupportedError& e) {
    return failed(function, MLA_ERROR_UNSUPPORTED, e.what());
  } catch (const BatchError& e) {
    return failed(function, MLA_ERROR_BATCH, e.what());
  } catch (const CheckpointError& e) {
    return failed(function, MLA_ERROR_CHECKPOINT, e.what());
  } catch (const InputError& e) {
    return failed(function, MLA_ERROR_INPUT, e.what());
  } catch (const OutOfPages& e) {
    return failed(function, MLA_ERROR_OUT_OF_PAGES, e.what());
  } catch (const DeviceError& e) {
    return failed(function, MLA_ERROR_DEVICE, e.what());
  } catch (const std::bad_alloc&) {
    return failed(function, MLA_ERROR_OUT_OF_MEMORY, "the host is out of memory");
  } catch (const std::length_error&) {
    return failed(function, MLA_ERROR_OUT_OF_MEMORY, "more elements than the host can hold");
  } catch (const std::exception& e) {
    return failed(function, MLA_ERROR_INTERNAL, e.what());
  } catch (...) {
    return failed(function, MLA_ERROR_INTERNAL, "unknown exception");
  }
}

void write_text(std::string_view from, char* text, size_t capacity, size_t* length) {
  if (length) *length = from.size();
  if (capacity == 0) return;
  required("text", text);
  const size_t n = from.size() < capacity ? from.size() : capacity - 1;
  std::memcpy(text, from.data(), n);
  text[n] = '\0';
}

}  // namespace mla::capi

const char* mla_last_error(void) { return mla::capi::last_text; }

const char* mla_status_name(mla_status status) {
  switch (status) {
    case MLA_OK: return "MLA_OK";
    case MLA_ERROR_HANDLE: return "MLA_ERROR_HANDLE";
    case MLA_ERROR_SHAPE: return "MLA_ERROR_SHAPE";
    case MLA_ERROR_INPUT: return "MLA_ERROR_INPUT";
    case MLA_ERROR_BATCH: return "MLA_ERROR_BATCH";
    case MLA_ERROR_CHECKPOINT: return "MLA_ERROR_CHECKPOINT";
    case MLA_ERROR_UNSUPPORTED: return "MLA_ERROR_UNSUPPORTED";
    case MLA_ERROR_OUT_OF_PAGES: return "MLA_ERROR_OUT_OF_PAGES";
    case MLA_ERROR_DEVICE: return "MLA_ERROR_DEVICE";
    case MLA_ERROR_OUT_OF_MEMORY: return "MLA_ERROR_OUT_OF_MEMORY";
    case MLA_ERROR_INTERNAL: return "MLA_ERROR_INTERNAL";
  }
  return "unknown status";
}

const char* mla_version(void) { return MLA_VERSION_TEXT; }

int32_t mla_version_number(void) { return MLA_VERSION_NUMBER; }
