// A step's choice of keys, in memory that layers share: who made it, and for which step.
#pragma once

#include "mla/layer.hpp"

namespace mla::layer {

/// The memory holds no choice from here on, and this step's.
void begin_choice(Stream& stream, const LayerContext& context);
void end_choice(Stream& stream, const LayerContext& context);
/// BatchError unless the choice there was made for this step's sparse rows.
void require_chosen(Stream& stream, const LayerContext& context);

}  // namespace mla::layer
