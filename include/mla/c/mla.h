// All of libmla's C interface. base.h states the rules that it keeps.
#ifndef MLA_C_MLA_H
#define MLA_C_MLA_H

#include "mla/c/base.h"
#include "mla/c/cache.h"
#include "mla/c/device.h"
#include "mla/c/layer.h"
#include "mla/c/model.h"
#include "mla/c/ops.h"
#include "mla/c/plan.h"
#include "mla/c/quant.h"
#include "mla/c/ranks.h"
#include "mla/c/weights.h"

#endif  // MLA_C_MLA_H
