// hadamard: rotates indexer queries and keys by the orthonormal Walsh-Hadamard matrix in Sylvester's order, in place:
// y_i = n^-0.5 sum over j of (-1)^popcount(i & j) x_j, n = IndexDim, a power of two. Products of a rotated query with a
// rotated key are those of the unrotated ones; large elements are spread over the row before it is quantised.
#pragma once

#include "mla/view.hpp"
#include "ops/cost.hpp"

namespace mla::ops {

struct HadamardArgs {
  View<float, Token, IndexHead, IndexDim> q;  ///< may be empty (null); IndexDim dense
  View<float, Token, IndexDim> k;             ///< may be empty (null); IndexDim dense
};

void check(const HadamardArgs& a);
bool writes_nothing(const HadamardArgs& a);
Cost cost(const HadamardArgs& a);
/// float64, out of place.
void reference(const HadamardArgs& a, View<double, Token, IndexHead, IndexDim> q, View<double, Token, IndexDim> k);

}  // namespace mla::ops
