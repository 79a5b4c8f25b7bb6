// A batch and its plan as Python holds them: values of their own, so that arrays changed or freed later cannot reach a
// planned step.
#pragma once

#include <memory>
#include <vector>

#include "mla/batch.hpp"
#include "mla/device.hpp"
#include "mla/plan.hpp"

namespace mla::python {

struct BatchArrays {
  std::vector<int32_t> query_start_loc, seq_lens, block_table, slot_mapping, prompt_lens;
  int64_t table_columns = 0;

  Batch view() const {
    return {query_start_loc,
            seq_lens,
            {block_table.data(), {static_cast<int64_t>(seq_lens.size()), table_columns}},
            slot_mapping,
            prompt_lens};
  }
};

struct Step {
  std::shared_ptr<const BatchArrays> batch;
  Plan plan;
  int64_t pages = 0;  ///< of the cache that the block table was checked against
  Buffer selection;   ///< passed on between the layers of the step
};

// Python's objects hold these, not what they point to: nanobind's own conversion of a shared_ptr allocates where
// nothing may be thrown, and ends the process when it cannot.
struct PyBatch {
  std::shared_ptr<const BatchArrays> arrays;
};
struct PyPlan {
  std::shared_ptr<Step> step;
};

}  // namespace mla::python
