#include "core/one_line.hpp"

namespace mla {
namespace {

unsigned byte_at(std::string_view s, size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : 0u; }
bool continues(unsigned byte) { return (byte & 0xc0) == 0x80; }

// Bytes of the character at i; 0 unless it is UTF-8 and can be shown within a line.
size_t shown(std::string_view s, size_t i) {
  const unsigned a = byte_at(s, i), b = byte_at(s, i + 1), c = byte_at(s, i + 2);
  if (a < 0x80) return a >= 0x20 && a != 0x7f ? 1 : 0;
  if (a < 0xc2 || a > 0xf4 || !continues(b)) return 0;
  if (a < 0xe0) return a == 0xc2 && b < 0xa0 ? 0 : 2;  // U+0080 to U+009f are controls
  if (!continues(c)) return 0;
  if (a < 0xf0) {
    const bool overlong = a == 0xe0 && b < 0xa0, surrogate = a == 0xed && b >= 0xa0;
    const bool separator = a == 0xe2 && b == 0x80 && (c == 0xa8 || c == 0xa9);  // of lines, of paragraphs
    return overlong || surrogate || separator ? 0 : 3;
  }
  if ((a == 0xf0 && b < 0x90) || (a == 0xf4 && b >= 0x90)) return 0;
  return continues(byte_at(s, i + 3)) ? 4 : 0;
}

// Whether all is ASCII that can be shown, as most messages are.
bool plain(std::string_view text) {
  int sign = 0;  // below 0 for any other byte: one comparison for all of them
  for (const char c : text) sign |= (static_cast<unsigned char>(c) - 0x20) | (0x7e - static_cast<unsigned char>(c));
  return sign >= 0;
}

std::string escaped(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string line;
  line.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    if (const size_t n = shown(text, i)) {
      line.append(text, i, n);
      i += n;
      continue;
    }
    const unsigned c = byte_at(text, i++);
    line += {'\\', 'x', kHex[c >> 4], kHex[c & 15]};
  }
  return line;
}

}  // namespace

std::string one_line(std::string_view text) {
  // What is shown of either end: the rest is neither escaped nor copied, however long it is.
  constexpr size_t kMark = 40, kEnd = (kLongestLine - kMark) / 2;
  if (text.size() <= kLongestLine) {
    if (plain(text)) return std::string(text);
    std::string line = escaped(text);
    if (line.size() <= kLongestLine) return line;
  }
  size_t head = 0, tail = text.size();  // [head, tail) is left out
  for (size_t used = 0;;) {
    const size_t n = shown(text, head), wide = n ? n : 4;
    if (used + wide > kEnd) break;
    used += wide;
    head += n ? n : 1;
  }
  for (size_t used = 0;;) {
    size_t begin = tail - 1;
    while (tail - begin < 4 && continues(byte_at(text, begin))) --begin;
    size_t n = shown(text, begin);
    if (n != tail - begin) begin = tail - 1, n = 0;
    const size_t wide = n ? n : 4;
    if (used + wide > kEnd) break;
    used += wide;
    tail = begin;
  }
  return escaped(text.substr(0, head)) + " ... (" + std::to_string(tail - head) + " bytes left out) ... " +
         escaped(text.substr(tail));
}

}  // namespace mla
