// A step's lists and its block table as one block of bytes, laid out for the step that calls are made with: those of
// smaller steps take their places there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "plan/lists.hpp"

namespace mla::layer {

class StagedLists {
 public:
  struct Array : planning::HostList {
    ListKey key;
    bool in_order = false;  ///< counts up from 0: calls were made with a slice in its place
    size_t offset = 0;      ///< of its place in the block
  };
  /// A step's arrays in their places; it borrows their memory. A row list's missing entries name `spare`, the first row
  /// that the step does not have: what is written for them lies behind its tokens.
  struct Fitted {
    std::vector<Array> arrays;
    int32_t spare = 0;
  };

  void lay_out(const Plan& plan, const Batch& batch);
  /// That step's own: of a step of maxima without a batch, whose item lists are there for launches to be sized by,
  /// items of no rows.
  Fitted own() const;
  /// ShapeError naming what does not fit.
  Fitted fit(const Plan& plan, const Batch& batch) const;
  /// Of all places.
  size_t bytes() const { return bytes_; }
  /// `to` holds bytes().
  void write(const Fitted& step, const Batch& batch, std::byte* to) const;

  /// Where a list of the step that it was laid out for lies in the block: ShapeError where the step has none of that
  /// many elements.
  size_t offset_of(ListKey key, size_t count) const;
  size_t offset_of(const View<const int32_t, Request, Page>& table) const;

 private:
  static std::vector<Array> arrays_of(const Plan& plan, const Batch& batch);
  size_t table_bytes() const;

  std::vector<Array> arrays_;
  int64_t table_rows_ = 0, table_columns_ = 0, table_stride_ = 0;
  std::optional<StepMaxima> maxima_;  // of the step that calls were made with
  bool idle_ = false;                 // it is one of maxima, without a request
  size_t table_offset_ = 0, bytes_ = 0;
};

}  // namespace mla::layer
