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

int64_t row_length(const SafetensorsEntry& e) { return e.shape.size() == 2 ? e.shape[1] : 1; }

MatrixPart all_of(const SafetensorsEntry& e) {
  return {.rows = e.shape.empty() ? 1 : e.shape[0], .cols = row_length(e)};
}

std::string any_of(const std::vector<std::vector<int64_t>>& shapes) {
  std::string all;
  for (const auto& s : shapes) all += (all.empty() ? "" : " or ") + shape_text(s);
  return all;
}

}  // namespace

MatrixPart blocks_of(const MatrixPart& p, int64_t block_rows, int64_t block_cols) {
  const int64_t row = p.row / block_rows, col = p.col / block_cols;
  return {.row = row,
          .rows = (p.row + p.rows + block_rows - 1) / block_rows - row,
          .col = col,
          .cols = (p.col + p.cols + block_cols - 1) / block_cols - col};
}

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

std::shared_ptr<const Buffer> StoredMatrix::bytes(std::string_view part, const MatrixPart& p) const {
  if (!data) return nullptr;
  const SafetensorsEntry& e = *entry(part);
  const MatrixPart all = all_of(e);
  if (all.rows == 0 || all.cols == 0) return bytes(part);
  const uint64_t row_bytes = (e.end - e.begin) / static_cast<uint64_t>(all.rows),
                 element = row_bytes / static_cast<uint64_t>(all.cols);
  return std::make_shared<const Buffer>(file(part).bytes(e, {.row_bytes = row_bytes,
                                                             .row = static_cast<uint64_t>(p.row),
                                                             .rows = static_cast<uint64_t>(p.rows),
                                                             .first = static_cast<uint64_t>(p.col) * element,
                                                             .size = static_cast<uint64_t>(p.cols) * element}));
}

std::vector<float> StoredMatrix::scales(std::string_view part) const {
  return data ? scales(part, all_of(*entry(part))) : std::vector<float>();
}

std::vector<float> StoredMatrix::scales(std::string_view part, const MatrixPart& p) const {
  if (!data) return {};
  const SafetensorsEntry& e = *entry(part);
  const auto memory = bytes(part, p);
  std::vector<float> x(static_cast<size_t>(p.rows * p.cols));
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = scale_at(e.dtype, *memory, i);
    if (std::isfinite(x[i])) continue;
    const int64_t at = static_cast<int64_t>(i), in_whole = (p.row + at / p.cols) * row_length(e) + p.col + at % p.cols;
    fail(part, "is " + std::to_string(x[i]) + " at element " + std::to_string(in_whole) + ", scales must be finite");
  }
  return x;
}

HostTensor StoredMatrix::tensor(std::string_view part, std::string format) const {
  HostTensor t;
  t.name = name(part);
  t.shape = {wanted.rows, wanted.cols};
  t.format = std::move(format);
  return t;
}

HostTensor StoredMatrix::tensor(std::string_view part, std::string format,
                                std::shared_ptr<const QuantisedMatrix> values) const {
  static constexpr std::byte kThere{};
  HostTensor t = tensor(part, std::move(format));
  if (!data) return t;
  t.quantised = std::move(values);
  t.first_row = wanted.row;
  t.first_col = wanted.col;
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
