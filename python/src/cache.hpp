// Caches as Python holds them: memory of their own, or the caller's.
#pragma once

#include <memory>
#include <optional>

#include "mla/cache.hpp"
#include "mla/index_cache.hpp"
#include "tensor.hpp"

namespace mla::python {

struct PyCache {
  CacheView view;
  Device device;
  Buffer own;
  std::optional<Tensor> memory;  ///< the caller's, held
};

struct PyIndexCache {
  IndexCacheView view;
  Device device;
  Buffer own;
  std::optional<Tensor> memory;
};

}  // namespace mla::python
