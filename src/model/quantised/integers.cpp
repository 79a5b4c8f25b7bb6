#include "model/quantised/integers.hpp"

#include <algorithm>
#include <cstring>

#include "mla/error.hpp"

namespace mla {
namespace {

std::string listed(const std::vector<int64_t>& all) {
  std::string s;
  for (int64_t n : all) s += (s.empty() ? "" : ", ") + std::to_string(n);
  return s;
}

// All of it, whatever is wanted: all of it says what its numbers mean. False where no element is in a group:
// compressed-tensors' way to say that the order is the columns' own.
bool read_index(const StoredMatrix& m, std::string_view part, int64_t count, std::vector<int32_t>& of_column) {
  const auto memory = m.bytes(part);
  if (!memory) return true;
  of_column.resize(static_cast<size_t>(m.cols));
  std::memcpy(of_column.data(), memory->data(), memory->size());
  if (std::all_of(of_column.begin(), of_column.end(), [](int32_t g) { return g == -1; })) return false;
  for (size_t c = 0; c < of_column.size(); ++c)
    if (of_column[c] < 0 || of_column[c] >= count)
      m.fail(part, "is " + std::to_string(of_column[c]) + " at element " + std::to_string(c) + ", groups are 0 to " +
                       std::to_string(count - 1));
  return true;
}

// Neighbours that are a group, so that there are `count` of them.
int64_t size_of_groups(const StoredMatrix& m, std::string_view scales, int64_t count) {
  if (count == 1) return m.cols;
  int64_t found = 0;
  for (int64_t n : m.model.quantisation.group_sizes) {
    if (n < 1 || (m.cols + n - 1) / n != count || n == found) continue;
    if (found > 0)
      m.unsupported(scales, "has " + std::to_string(count) + " groups of " + std::to_string(m.cols) +
                                " columns, which groups of " + std::to_string(found) + " and of " + std::to_string(n) +
                                " come to: the config has both");
    found = n;
  }
  if (found == 0)
    m.fail(scales,
           "has " + std::to_string(count) + " groups of " + std::to_string(m.cols) +
               " columns, which no group_size of the config comes to (" +
               (m.model.quantisation.group_sizes.empty() ? "it has none" : listed(m.model.quantisation.group_sizes)) +
               ")");
  return found;
}

// From the groups of all columns.
Groups wanted_of(const StoredMatrix& m, const std::vector<int32_t>& of_column, int64_t count, std::string words) {
  Groups g{.of_column = {}, .first = 0, .count = count, .words = std::move(words)};
  if (!m.data) return g;
  const auto begin = of_column.begin() + m.wanted.col;
  g.of_column.assign(begin, begin + m.wanted.cols);
  const auto [least, most] = std::minmax_element(g.of_column.begin(), g.of_column.end());
  const int32_t first = *least;
  g.first = first;
  g.count = *most - first + 1;
  for (int32_t& group : g.of_column) group -= first;
  return g;
}

}  // namespace

int64_t bits_that_fit(int64_t words, int64_t count, std::initializer_list<int64_t> known) {
  int64_t found = 0;
  for (int64_t bits : known)
    if ((count * bits + 31) / 32 == words) found = found == 0 ? bits : -1;
  return std::max<int64_t>(found, 0);
}

void require_bits(const StoredMatrix& m, std::string_view part, int64_t bits) {
  const std::vector<int64_t>& said = m.model.quantisation.bits;
  if (!said.empty() && std::find(said.begin(), said.end(), bits) == said.end())
    m.unsupported(part, "holds integers of " + std::to_string(bits) + " bits, the config has " + listed(said));
}

Groups groups_of(const StoredMatrix& m, std::string_view index, std::string_view scales, int64_t count) {
  std::vector<int32_t> of_column;
  if (m.has(index)) {
    m.take(index, {"I32"}, {{m.cols}}, "the groups of columns");
    if (read_index(m, index, count, of_column))
      return wanted_of(m, of_column, count, std::to_string(count) + " groups in g_idx's order");
  }
  const int64_t size = size_of_groups(m, scales, count);
  if (m.data) of_column.resize(static_cast<size_t>(m.cols));
  for (size_t c = 0; c < of_column.size(); ++c) of_column[c] = static_cast<int32_t>(static_cast<int64_t>(c) / size);
  return wanted_of(m, of_column, count, size == m.cols ? "a scale for each row" : "groups of " + std::to_string(size));
}

}  // namespace mla
