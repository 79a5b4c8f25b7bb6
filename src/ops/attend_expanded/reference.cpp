#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/attend_expanded/op.hpp"

namespace mla::ops {

void reference(const AttendExpandedArgs& a, View<double, Token, Head, Value> out, View<double, Token, Head> lse) {
  const int64_t nope = a.k_nope.extent<Nope>(), rope = a.k_pe.extent<Rope>(), width = a.v.extent<Value>();
  for (const ExpandedItem& item : a.items)
    for (int64_t i = 0; i < item.q_count; ++i)
      for (int64_t h = 0; h < a.q.extent<Head>(); ++h) {
        const int64_t row = item.q_begin + i, count = std::min<int64_t>(item.k_count, i + item.visible + 1);
        std::vector<double> p;
        double m = -std::numeric_limits<double>::infinity(), sum = 0;
        for (int64_t j = 0; j < count; ++j) {
          double s = 0;
          for (int64_t d = 0; d < nope; ++d)
            s += static_cast<double>(a.q(row, h, d)) * a.k_nope(item.k_begin + j, h, d);
          for (int64_t d = 0; d < rope; ++d)
            s += static_cast<double>(a.q(row, h, nope + d)) * a.k_pe(item.k_begin + j, d);
          p.push_back(s * a.scale);
          m = std::max(m, p.back());
        }
        for (double& e : p) sum += (e = std::exp(e - m));
        for (int64_t d = 0; d < width; ++d) {
          double x = 0;
          for (int64_t j = 0; j < count; ++j) x += p[j] * a.v(item.k_begin + j, h, d);
          out(row, h, d) = count > 0 ? x / sum : 0.0;
        }
        lse(row, h) = m + std::log(sum);
      }
}

}  // namespace mla::ops
