// All of libmla's C++ interface.
#pragma once

#include "mla/batch.hpp"
#include "mla/cache.hpp"
#include "mla/device.hpp"
#include "mla/dim.hpp"
#include "mla/dtype.hpp"
#include "mla/error.hpp"
#include "mla/layer.hpp"
#include "mla/model.hpp"
#include "mla/pages.hpp"
#include "mla/plan.hpp"
#include "mla/quant.hpp"
#include "mla/quant_scales.hpp"
#include "mla/rotary.hpp"
#include "mla/view.hpp"
#include "mla/weights.hpp"
#include "mla/work.hpp"
