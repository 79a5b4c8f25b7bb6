// Carriers over a caller's transport.
#pragma once

#include "comm/carrier.hpp"

namespace mla {

/// InputError for a rank outside the group or no transport.
std::unique_ptr<Carrier> carry_by(int rank, int ranks, std::unique_ptr<Transport> transport);

}  // namespace mla
