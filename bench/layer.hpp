// A whole layer's step, as something to time and to check.
#pragma once

#include <memory>

#include "cases/case.hpp"
#include "mla/layer.hpp"
#include "mla/plan.hpp"

namespace mla::bench {

/// A model's first layer with random weights, shared by the cases that run it.
struct LayerModel {
  LayerModel(const ModelConfig& config, Dtype dtype, int64_t positions);
  ModelConfig config;
  LayerTensors tensors;
  LayerWeights weights;
  RotaryTable rotary;
};

struct LayerStep {
  int64_t requests = 1, query_len = 1, context = 0;
  CacheFormat format = CacheFormat::bf16;
  PlanOptions plan;
};

/// forward() of one step over a cache that holds the requests' contexts. `model` and `pool` must outlive the case.
std::unique_ptr<cases::Case> make_layer_case(const LayerModel& model, const LayerStep& step, ThreadPool& pool);

}  // namespace mla::bench
