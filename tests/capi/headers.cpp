#include "mla/c/mla.h"

extern "C" size_t mla_test_struct_sizes_cpp() {
  return mla_model_fields_default().struct_size + mla_prepare_options_default().struct_size +
         mla_cache_spec_default().struct_size + mla_index_cache_spec_default().struct_size +
         mla_page_options_default().struct_size + mla_output_spec_default().struct_size +
         mla_plan_options_default().struct_size + mla_sharding_default().struct_size;
}
