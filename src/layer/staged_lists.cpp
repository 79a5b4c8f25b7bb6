#include "layer/staged_lists.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "mla/error.hpp"

namespace mla::layer {
namespace {

size_t up(size_t n) { return (n + 63) / 64 * 64; }

std::string name_of(const std::optional<StepMaxima>& m) {
  if (!m) return "none";
  return "requests " + std::to_string(m->requests) + ", tokens " + std::to_string(m->tokens) + ", query_len " +
         std::to_string(m->query_len) + ", seq_len " + std::to_string(m->seq_len);
}

}  // namespace

// Every list that the step reads; the block table apart.
std::vector<StagedLists::Array> StagedLists::arrays_of(const Plan& plan, const Batch& batch) {
  std::vector<Array> all;
  all.reserve(plan.lists.size());
  for (const ListKey key : plan.lists) {
    Array a{planning::host_list(plan, batch, key), key};
    const int32_t* row = a.rows ? static_cast<const int32_t*>(a.data) : nullptr;
    a.in_order = a.rows;
    for (size_t i = 0; a.in_order && i < a.count; ++i) a.in_order = row[i] == static_cast<int32_t>(i);
    all.push_back(a);
  }
  return all;
}

size_t StagedLists::table_bytes() const {
  return table_rows_ == 0 || table_columns_ == 0
             ? 0
             : static_cast<size_t>((table_rows_ - 1) * table_stride_ + table_columns_) * sizeof(int32_t);
}

void StagedLists::lay_out(const Plan& plan, const Batch& batch) {
  if (batch.block_table.extent<Page>() > 1 && batch.block_table.stride<Page>() != 1)
    throw ShapeError("stage: block_table's Page stride is " + std::to_string(batch.block_table.stride<Page>()) +
                     ", 1 is needed");
  arrays_ = arrays_of(plan, batch);
  maxima_ = plan.options.maxima;
  idle_ = maxima_ && batch.requests() == 0;
  table_rows_ = batch.block_table.extent<Request>();
  table_columns_ = batch.block_table.extent<Page>();
  table_stride_ = batch.block_table.stride<Request>();
  table_offset_ = 0;
  for (Array& a : arrays_) {
    a.offset = table_offset_;
    table_offset_ += up(a.count * a.element);
  }
  bytes_ = table_offset_ + up(table_bytes()) + 64;
}

StagedLists::Fitted StagedLists::own() const {
  Fitted step{arrays_, 0};
  for (Array& a : step.arrays) {
    const bool items = a.key.kind == ListKind::latent_items || a.key.kind == ListKind::sparse_items ||
                       a.key.kind == ListKind::index_rows || a.key.kind == ListKind::index_tile ||
                       a.key.kind == ListKind::index_joined;
    if (idle_ && items) a.count = 0;
  }
  return step;
}

StagedLists::Fitted StagedLists::fit(const Plan& plan, const Batch& batch) const {
  if (plan.options.maxima != maxima_)
    throw ShapeError("restage: the plan's maxima (PlanOptions::maxima) are " + name_of(plan.options.maxima) +
                     ", the staged step's are " + name_of(maxima_));
  Fitted step{.arrays = {}, .spare = static_cast<int32_t>(plan.tokens)};
  std::vector<Array>& fit = step.arrays;
  // Those that the step does not read are empty.
  for (const Array& a : arrays_)
    fit.push_back({{.name = a.name, .element = a.element, .padding = a.padding, .rows = a.rows}, a.key, a.in_order});
  for (const Array& a : arrays_of(plan, batch)) {
    const auto same = [&](const Array& staged) { return staged.key == a.key; };
    const auto place = std::find_if(fit.begin(), fit.end(), same);
    if (place != fit.end()) *place = a;
    else if (a.count > 0)
      throw ShapeError(std::string("restage: ") + a.name + " has " + std::to_string(a.count) +
                       " entries, the staged step's has 0");
  }
  for (size_t i = 0; i < fit.size(); ++i) {
    if (fit[i].count > arrays_[i].count || (fit[i].count == 0) != (arrays_[i].count == 0))
      throw ShapeError(std::string("restage: ") + fit[i].name + " has " + std::to_string(fit[i].count) +
                       " entries, the staged step's has " + std::to_string(arrays_[i].count));
    if (arrays_[i].in_order && !fit[i].in_order)
      throw ShapeError(std::string("restage: ") + fit[i].name + " is out of order, the staged step's was in order");
  }
  const auto& table = batch.block_table;
  if (maxima_) return step;  // no sequence takes more columns than there are; an engine's table may have more
  if (table.extent<Request>() > table_rows_ || table.extent<Page>() > table_columns_)
    throw ShapeError("restage: block_table is " + std::to_string(table.extent<Request>()) + " x " +
                     std::to_string(table.extent<Page>()) + ", the staged step's is " + std::to_string(table_rows_) +
                     " x " + std::to_string(table_columns_));
  return step;
}

void StagedLists::write(const Fitted& step, const Batch& batch, std::byte* to) const {
  for (size_t i = 0; i < arrays_.size(); ++i) {
    const Array& a = step.arrays[i];
    std::byte* const at = to + arrays_[i].offset;
    const size_t used = a.count * a.element, room = arrays_[i].count * arrays_[i].element;
    if (used > 0) std::memcpy(at, a.data, used);
    if (a.rows) std::fill(reinterpret_cast<int32_t*>(at + used), reinterpret_cast<int32_t*>(at + room), step.spare);
    else std::memset(at + used, static_cast<int>(a.padding), room - used);
  }
  int32_t* const table = reinterpret_cast<int32_t*>(to + table_offset_);
  const auto& from = batch.block_table;
  const int64_t rows = maxima_ ? std::min(batch.requests(), table_rows_) : from.extent<Request>(),
                columns = std::min(from.extent<Page>(), table_columns_);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t p = 0; p < columns; ++p) table[r * table_stride_ + p] = from(r, p);
}

size_t StagedLists::offset_of(ListKey key, size_t count) const {
  const auto at = std::find_if(arrays_.begin(), arrays_.end(), [&](const Array& a) { return a.key == key; });
  if (at != arrays_.end() && at->count == count) return at->offset;
  throw ShapeError("layer: " + (at == arrays_.end() ? "a list" : std::string(at->name)) + " has " +
                   std::to_string(count) + " elements, the staged step's has " +
                   std::to_string(at == arrays_.end() ? 0 : at->count));
}

size_t StagedLists::offset_of(const View<const int32_t, Request, Page>& table) const {
  if (table.extent<Request>() == table_rows_ && table.extent<Page>() == table_columns_ &&
      table.stride<Request>() == table_stride_)
    return table_offset_;
  const auto size = [](int64_t rows, int64_t columns, int64_t stride) {
    return std::to_string(rows) + " x " + std::to_string(columns) + ", rows " + std::to_string(stride) + " apart";
  };
  throw ShapeError("layer: block_table is " +
                   size(table.extent<Request>(), table.extent<Page>(), table.stride<Request>()) +
                   ", the staged step's is " + size(table_rows_, table_columns_, table_stride_));
}

}  // namespace mla::layer
