#include "model/quantised/stored.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/quantised_weights.hpp"
#include "mla/error.hpp"
#include "model/text.hpp"

namespace mla {
namespace {

template <class T>
T at(const Buffer& b, size_t i) {
  T x;
  std::memcpy(&x, b.data() + i * sizeof(T), sizeof(T));
  return x;
}

float scale_at(std::string_view dtype, const Buffer& b, size_t i) {
  if (dtype == "F32") return at<float>(b, i);
  if (dtype == "BF16") return to_float(at<bf16>(b, i));
  if (dtype == "F16") return to_float(at<f16>(b, i));
  if (dtype == "F8_E4M3") return to_float(at<fp8_e4m3>(b, i));
  return e8m0_value(at<uint8_t>(b, i));
}

int64_t count(const SafetensorsEntry& e) {
  int64_t n = 1;
  for (int64_t extent : e.shape) n *= extent;
  return n;
}

std::string any_of(const std::vector<std::vector<int64_t>>& shapes) {
  std::string all;
  for (const auto& s : shapes) all += (all.empty() ? "" : " or ") + shape_text(s);
  return all;
}

}  // namespace

const SafetensorsEntry* StoredMatrix::entry(std::string_view part) const {
  const Safetensors* file = find_(name(part));
  return file ? file->find(name(part)) : nullptr;
}

const Safetensors& StoredMatrix::file(std::string_view part) const { return *find_(name(part)); }

const SafetensorsEntry& StoredMatrix::take(std::string_view part, std::initializer_list<std::string_view> dtypes,
                                           const std::vector<std::vector<int64_t>>& shapes,
                                           std::string_view what) const {
  const SafetensorsEntry* e = entry(part);
  const std::string use = what.empty() ? "" : " for " + std::string(what);
  if (!e) missing(part, "expected shape " + any_of(shapes) + use);
  if (std::find(shapes.begin(), shapes.end(), e->shape) == shapes.end())
    fail(part, "has shape " + shape_text(e->shape) + ", expected " + any_of(shapes) + use);
  if (std::find(dtypes.begin(), dtypes.end(), e->dtype) == dtypes.end()) {
    std::string known;
    for (std::string_view d : dtypes) known += (known.empty() ? "" : " ") + std::string(d);
    fail(part, "has dtype " + e->dtype + ", expected one of " + known + use);
  }
  pass(part);
  return *e;
}

std::shared_ptr<const Buffer> StoredMatrix::bytes(std::string_view part) const {
  return data ? std::make_shared<const Buffer>(file(part).bytes(*entry(part))) : nullptr;
}

std::vector<float> StoredMatrix::scales(std::string_view part) const {
  if (!data) return {};
  const SafetensorsEntry& e = *entry(part);
  const Buffer memory = file(part).bytes(e);
  std::vector<float> x(static_cast<size_t>(count(e)));
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = scale_at(e.dtype, memory, i);
    if (!std::isfinite(x[i]))
      fail(part, "is " + std::to_string(x[i]) + " at element " + std::to_string(i) + ", scales must be finite");
  }
  return x;
}

HostTensor StoredMatrix::tensor(std::string_view part, std::string format) const {
  HostTensor t;
  t.name = name(part);
  t.shape = {rows, cols};
  t.format = std::move(format);
  return t;
}

HostTensor StoredMatrix::tensor(std::string_view part, std::string format,
                                std::shared_ptr<const QuantisedMatrix> values) const {
  static constexpr std::byte kThere{};
  HostTensor t = tensor(part, std::move(format));
  if (!data) return t;
  t.quantised = std::move(values);
  t.data = &kThere;
  return t;
}

void StoredMatrix::missing(std::string_view part, const std::string& why) const {
  refuse(where_, "tensor '" + name(part) + "' is missing, " + why);
}

void StoredMatrix::fail(std::string_view part, const std::string& why) const {
  refuse(file(part).file().string(), "tensor '" + name(part) + "' " + why);
}

void StoredMatrix::unsupported(std::string_view part, const std::string& why) const {
  throw UnsupportedError(file(part).file().string() + ": tensor '" + name(part) + "' " + why);
}

}  // namespace mla
