// Ops that the GPU does not have yet.
#include <string>

#include "backend/cuda/backend.hpp"
#include "mla/error.hpp"

namespace mla::cuda {

void merge(Stream&, const ops::MergeArgs&) { throw UnsupportedError("cuda has no merge yet"); }
void merge_splits(Stream&, const ops::MergeSplitsArgs&) { throw UnsupportedError("cuda has no merge_splits yet"); }
void quantize(Stream&, const ops::QuantizeArgs&) { throw UnsupportedError("cuda has no quantize yet"); }
void quantize_padding(Stream&, const ops::QuantizePaddingArgs&) { throw UnsupportedError("cuda has no quantize_padding yet"); }
void map_to_slots(Stream&, const ops::MapToSlotsArgs&) { throw UnsupportedError("cuda has no map_to_slots yet"); }
void map_to_workspace(Stream&, const ops::MapToWorkspaceArgs&) { throw UnsupportedError("cuda has no map_to_workspace yet"); }
void index_append(Stream&, const ops::IndexAppendArgs&) { throw UnsupportedError("cuda has no index_append yet"); }
void index_gather(Stream&, const ops::IndexGatherArgs&) { throw UnsupportedError("cuda has no index_gather yet"); }
void index_query(Stream&, const ops::IndexQueryArgs&) { throw UnsupportedError("cuda has no index_query yet"); }
void hadamard(Stream&, const ops::HadamardArgs&) { throw UnsupportedError("cuda has no hadamard yet"); }

}  // namespace mla::cuda
