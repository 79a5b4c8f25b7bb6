// A strict reader. The header is attacker-controlled text, so it is parsed here, by hand: a general JSON parser would
// accept duplicate keys silently, and every number below becomes an offset into the file.
//
// Tensors are read, not mapped: a mapped file that another process shortens is a bus error wherever it is touched next.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "core/named_buffer.hpp"
#include "mla/error.hpp"
#include "mla/weights.hpp"
#include "model/text.hpp"

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

namespace mla {
namespace {

constexpr uint64_t kMostHeader = 100'000'000;

struct DtypeSize {
  std::string_view name;
  int64_t bits;
};
constexpr DtypeSize kDtypes[] = {{"F64", 64},    {"F32", 32},    {"F16", 16},        {"BF16", 16},       {"C64", 64},
                                 {"I64", 64},    {"I32", 32},    {"I16", 16},        {"I8", 8},          {"U64", 64},
                                 {"U32", 32},    {"U16", 16},    {"U8", 8},          {"BOOL", 8},        {"F8_E4M3", 8},
                                 {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6},
                                 {"F6_E3M2", 6}, {"F4", 4}};

class HeaderParser {
 public:
  HeaderParser(std::string_view text, std::string where) : text_(text), where_(std::move(where)) {}

  void parse(std::vector<SafetensorsEntry>& entries, std::unordered_map<std::string, std::string>& metadata) {
    std::unordered_set<std::string> seen;
    object([&](std::string key) {
      if (!seen.insert(key).second) fail("key '" + key + "' occurs twice");
      if (key == "__metadata__") {
        object([&](std::string name) {
          std::string value = string();
          if (!metadata.emplace(name, std::move(value)).second) fail("__metadata__ key '" + name + "' occurs twice");
        });
      } else {
        entries.push_back(tensor(std::move(key)));
      }
    });
    // Writers pad the header with spaces to align the data.
    space();
    if (at_ != text_.size()) fail("header has text after its object at byte " + std::to_string(at_));
  }

  [[noreturn]] void fail(const std::string& why) const { refuse(where_, why); }

 private:
  SafetensorsEntry tensor(std::string name) {
    SafetensorsEntry e;
    e.name = std::move(name);
    bool dtype = false, shape = false, offsets = false;
    auto once = [&](bool& seen, const std::string& key) {
      if (seen) fail("tensor '" + e.name + "': key '" + key + "' occurs twice");
      seen = true;
    };
    object([&](const std::string& key) {
      if (key == "dtype") {
        once(dtype, key);
        e.dtype = string();
      } else if (key == "shape") {
        once(shape, key);
        array([&](uint64_t n) {
          if (n > static_cast<uint64_t>(INT64_MAX))
            fail("tensor '" + e.name + "': extent " + std::to_string(n) + " is too large");
          if (e.shape.size() == 16) fail("tensor '" + e.name + "': more than 16 dimensions");
          e.shape.push_back(static_cast<int64_t>(n));
        });
      } else if (key == "data_offsets") {
        once(offsets, key);
        int count = 0;
        array([&](uint64_t n) {
          if (count == 0) e.begin = n;
          if (count == 1) e.end = n;
          ++count;
        });
        if (count != 2)
          fail("tensor '" + e.name + "': data_offsets has " + std::to_string(count) + " numbers, 2 are needed");
      } else {
        fail("tensor '" + e.name + "': unknown key '" + key + "'");
      }
    });
    if (!dtype) fail("tensor '" + e.name + "': dtype is missing");
    if (!shape) fail("tensor '" + e.name + "': shape is missing");
    if (!offsets) fail("tensor '" + e.name + "': data_offsets is missing");
    return e;
  }

  template <class F>
  void object(F&& member) {
    expect('{');
    if (peek() == '}') {
      ++at_;
      return;
    }
    for (;;) {
      std::string key = string();
      expect(':');
      member(std::move(key));
      if (peek() == ',') {
        ++at_;
        continue;
      }
      expect('}');
      return;
    }
  }

  template <class F>
  void array(F&& element) {
    expect('[');
    if (peek() == ']') {
      ++at_;
      return;
    }
    for (;;) {
      element(number());
      if (peek() == ',') {
        ++at_;
        continue;
      }
      expect(']');
      return;
    }
  }

  uint64_t number() {
    peek();
    const size_t start = at_;
    uint64_t n = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      const uint64_t digit = static_cast<uint64_t>(text_[at_] - '0');
      if (n > (UINT64_MAX - digit) / 10) fail("number at byte " + std::to_string(start) + " passes 64 bits");
      n = n * 10 + digit;
      ++at_;
    }
    if (at_ == start) fail("a non-negative integer is needed at byte " + std::to_string(start));
    if (text_[start] == '0' && at_ - start > 1) fail("number at byte " + std::to_string(start) + " has a leading zero");
    return n;
  }

  std::string string() {
    expect('"');
    std::string s;
    for (;;) {
      const size_t start = at_;
      while (at_ < text_.size() && plain(text_[at_])) ++at_;
      s += text_.substr(start, at_ - start);
      if (at_ == text_.size()) fail("string without end");
      const unsigned char c = static_cast<unsigned char>(text_[at_++]);
      if (c == '"') return s;
      if (c < 0x20) fail("control character in a string at byte " + std::to_string(at_ - 1));
      if (c == '\\') escape(s);
      else utf8(c, s);
    }
  }
  // Of a string: stands for itself.
  static bool plain(char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte >= 0x20 && byte < 0x80 && c != '"' && c != '\\';
  }

  void escape(std::string& s) {
    if (at_ == text_.size()) fail("string without end");
    const char c = text_[at_++];
    switch (c) {
      case '"':
      case '\\':
      case '/': s += c; return;
      case 'b': s += '\b'; return;
      case 'f': s += '\f'; return;
      case 'n': s += '\n'; return;
      case 'r': s += '\r'; return;
      case 't': s += '\t'; return;
      case 'u': break;
      default: fail("unknown escape in a string at byte " + std::to_string(at_ - 1));
    }
    uint32_t code = hex4();
    if (code >= 0xd800 && code < 0xdc00) {
      if (text_.substr(at_, 2) != "\\u") fail("half a surrogate pair at byte " + std::to_string(at_));
      at_ += 2;
      const uint32_t low = hex4();
      if (low < 0xdc00 || low > 0xdfff) fail("half a surrogate pair at byte " + std::to_string(at_));
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code >= 0xdc00 && code < 0xe000) {
      fail("half a surrogate pair at byte " + std::to_string(at_));
    }
    if (code < 0x80) {
      s += static_cast<char>(code);
    } else if (code < 0x800) {
      s += static_cast<char>(0xc0 | (code >> 6));
      s += static_cast<char>(0x80 | (code & 63));
    } else if (code < 0x10000) {
      s += static_cast<char>(0xe0 | (code >> 12));
      s += static_cast<char>(0x80 | ((code >> 6) & 63));
      s += static_cast<char>(0x80 | (code & 63));
    } else {
      s += static_cast<char>(0xf0 | (code >> 18));
      s += static_cast<char>(0x80 | ((code >> 12) & 63));
      s += static_cast<char>(0x80 | ((code >> 6) & 63));
      s += static_cast<char>(0x80 | (code & 63));
    }
  }

  uint32_t hex4() {
    uint32_t code = 0;
    for (int i = 0; i < 4; ++i) {
      if (at_ == text_.size()) fail("string without end");
      const char c = text_[at_++];
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) fail("bad \\u escape at byte " + std::to_string(at_ - 1));
      code = code * 16 + static_cast<uint32_t>(digit);
    }
    return code;
  }

  void utf8(unsigned char lead, std::string& s) {
    const int more = lead >= 0xf0 && lead <= 0xf4  ? 3
                     : lead >= 0xe0 && lead < 0xf0 ? 2
                     : lead >= 0xc2 && lead < 0xe0 ? 1
                                                   : 0;
    const size_t start = at_ - 1;
    uint32_t code = lead & (0x3fu >> more);
    for (int i = 0; i < more; ++i) {
      const unsigned char c = at_ < text_.size() ? static_cast<unsigned char>(text_[at_]) : 0;
      if ((c & 0xc0) != 0x80) fail("bad UTF-8 at byte " + std::to_string(start));
      code = (code << 6) | (c & 63u);
      ++at_;
    }
    const bool overlong = (more == 2 && code < 0x800) || (more == 3 && code < 0x10000);
    if (more == 0 || overlong || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
      fail("bad UTF-8 at byte " + std::to_string(start));
    s += text_.substr(start, at_ - start);
  }

  void space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r'))
      ++at_;
  }
  char peek() {
    space();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  void expect(char c) {
    if (peek() != c) fail("'" + std::string(1, c) + "' is needed in the header at byte " + std::to_string(at_));
    ++at_;
  }

  std::string_view text_;
  std::string where_;
  size_t at_ = 0;
};

}  // namespace

struct Safetensors::File {
  std::filesystem::path path;
  int fd = -1;
  uint64_t size = 0;
  uint64_t data = 0;  // first byte of the data section
  std::vector<SafetensorsEntry> entries;
  std::unordered_map<std::string_view, size_t> by_name;
  std::unordered_map<std::string, std::string> metadata;
  mutable std::atomic<uint64_t> read_bytes{0};  // of tensors

  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd >= 0) ::close(fd);
  }

  [[noreturn]] void fail(const std::string& why) const { refuse(path.string(), why); }

  void open() {
    fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO would wait for a writer
    if (fd < 0) fail(std::string("cannot be opened: ") + std::strerror(errno));
    struct stat info {};
    if (fstat(fd, &info) != 0) fail(std::string("cannot be examined: ") + std::strerror(errno));
    if (!S_ISREG(info.st_mode)) fail("not a regular file");
    size = static_cast<uint64_t>(info.st_size);
    if (size < 8) fail("not a safetensors file: has " + std::to_string(size) + " bytes, a header length alone takes 8");
  }

  /// `before`: bytes of `what` that lie in front of these, `whole`: all that it has.
  void read(uint64_t at, void* to, size_t bytes, const std::string& what, uint64_t before, uint64_t whole) const {
    constexpr size_t kMostAtOnce = size_t{1} << 30;  // Linux reads at most 2 GB a call
    for (size_t done = 0; done < bytes;) {
      const ssize_t n = pread(fd, static_cast<std::byte*>(to) + done, std::min(bytes - done, kMostAtOnce),
                              static_cast<off_t>(at + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail(what + " cannot be read: " + std::strerror(errno));
      if (n == 0)
        fail(what + " has " + std::to_string(before + done) + " bytes left of " + std::to_string(whole) +
             ": the file was shortened after it was opened");
      done += static_cast<size_t>(n);
    }
  }
  void read(uint64_t at, void* to, size_t bytes, const std::string& what) const { read(at, to, bytes, what, 0, bytes); }

  void read(const SafetensorsEntry& e, uint64_t from, void* to, size_t bytes) const {
    read(data + e.begin + from, to, bytes, "tensor '" + e.name + "'", from, e.end - e.begin);
    read_bytes.fetch_add(bytes, std::memory_order_relaxed);
  }

  void parse() {
    uint64_t header = 0;
    read(0, &header, 8, "the header's length");
    if (header > kMostHeader)
      fail("not a safetensors file: its first 8 bytes would be the length of a header of " + std::to_string(header) +
           " bytes, at most " + std::to_string(kMostHeader));
    if (header > size - 8)
      fail("header of " + std::to_string(header) + " bytes ends past the file's " + std::to_string(size));
    data = 8 + header;
    std::string text(header, '\0');
    read(8, text.data(), text.size(), "the header");
    HeaderParser(text, path.string()).parse(entries, metadata);
    std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
      return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
    });
    uint64_t end = 0;
    for (size_t i = 0; i < entries.size(); ++i) {
      const SafetensorsEntry& e = entries[i];
      check(e);
      if (e.begin != end)
        fail("tensor '" + e.name + "': begins at " + std::to_string(e.begin) +
             (e.begin > end ? ", a gap after " : ", inside the tensor that ends at ") + std::to_string(end));
      end = e.end;
      by_name.emplace(e.name, i);
    }
    if (end != size - data)
      fail("tensors end at " + std::to_string(end) + ", the data at " + std::to_string(size - data));
  }

  void check(const SafetensorsEntry& e) const {
    const auto* dtype =
        std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const DtypeSize& d) { return d.name == e.dtype; });
    if (dtype == std::end(kDtypes)) fail("tensor '" + e.name + "': unknown dtype '" + e.dtype + "'");
    // An empty tensor's other extents must multiply too: its size is asked for like any other's.
    int64_t bits = dtype->bits;
    for (int64_t extent : e.shape)
      if (extent != 0 && __builtin_mul_overflow(bits, extent, &bits))
        fail("tensor '" + e.name + "': shape passes 64 bits");
    if (std::count(e.shape.begin(), e.shape.end(), 0)) bits = 0;
    if (bits % 8 != 0) fail("tensor '" + e.name + "': has " + std::to_string(bits) + " bits, not whole bytes");
    const uint64_t bytes = static_cast<uint64_t>(bits) / 8;
    if (e.end < e.begin)
      fail("tensor '" + e.name + "': ends at " + std::to_string(e.end) + " before it begins at " +
           std::to_string(e.begin));
    if (e.end > size - data)
      fail("tensor '" + e.name + "': ends at " + std::to_string(e.end) + ", past the data's " +
           std::to_string(size - data) + " bytes");
    if (e.end - e.begin != bytes)
      fail("tensor '" + e.name + "': has " + std::to_string(e.end - e.begin) + " bytes, its shape needs " +
           std::to_string(bytes));
  }
};

Safetensors::Safetensors(const std::filesystem::path& file) {
  auto f = std::make_shared<File>();
  f->path = file;
  f->open();
  f->parse();
  file_ = std::move(f);
}

const std::filesystem::path& Safetensors::file() const { return file_->path; }

std::span<const SafetensorsEntry> Safetensors::entries() const { return file_->entries; }

const SafetensorsEntry* Safetensors::find(std::string_view name) const {
  const auto it = file_->by_name.find(name);
  return it == file_->by_name.end() ? nullptr : &file_->entries[it->second];
}

const std::string* Safetensors::metadata(std::string_view key) const {
  const auto it = file_->metadata.find(std::string(key));
  return it == file_->metadata.end() ? nullptr : &it->second;
}

Buffer Safetensors::bytes(const SafetensorsEntry& e) const {
  Buffer b = named_buffer("tensor '" + e.name + "'", static_cast<size_t>(e.end - e.begin));
  file_->read(e, 0, b.data(), b.size());
  return b;
}

Buffer Safetensors::bytes(const SafetensorsEntry& e, const ByteRows& p) const {
  const uint64_t size = e.end - e.begin;
  if (p.row_bytes == 0 || size % p.row_bytes != 0)
    throw InputError("tensor '" + e.name + "' has " + std::to_string(size) + " bytes, not whole rows of " +
                     std::to_string(p.row_bytes));
  const uint64_t rows = size / p.row_bytes;
  if (p.rows > rows || p.row > rows - p.rows || p.size > p.row_bytes || p.first > p.row_bytes - p.size)
    throw InputError("tensor '" + e.name + "': rows from " + std::to_string(p.row) + " on, " + std::to_string(p.rows) +
                     " of " + std::to_string(rows) + ", and bytes from " + std::to_string(p.first) + " on, " +
                     std::to_string(p.size) + " of " + std::to_string(p.row_bytes) + ", are not all in it");
  Buffer b = named_buffer("rows of tensor '" + e.name + "'", static_cast<size_t>(p.rows * p.size));
  if (p.size == p.row_bytes) {
    file_->read(e, p.row * p.row_bytes, b.data(), b.size());
    return b;
  }
  // A call a row: one that went across the gaps would read the others' parts.
  for (uint64_t r = 0; r < p.rows; ++r)
    file_->read(e, (p.row + r) * p.row_bytes + p.first, b.data() + r * p.size, static_cast<size_t>(p.size));
  return b;
}

uint64_t Safetensors::bytes_read() const { return file_->read_bytes.load(std::memory_order_relaxed); }

HostTensor Safetensors::outline(std::string_view name) const {
  const SafetensorsEntry* e = find(name);
  if (!e) file_->fail("tensor '" + std::string(name) + "' is missing");
  HostTensor t;
  t.name = e->name;
  t.shape = e->shape;
  if (e->dtype == "F32") t.dtype = Dtype::f32;
  else if (e->dtype == "BF16") t.dtype = Dtype::bf16;
  else if (e->dtype == "F16") t.dtype = Dtype::f16;
  else if (e->dtype == "F8_E4M3") t.dtype = Dtype::fp8_e4m3;
  else file_->fail("tensor '" + e->name + "': dtype " + e->dtype + " is not one of F32 BF16 F16 F8_E4M3");
  return t;
}

HostTensor Safetensors::tensor(std::string_view name) const {
  HostTensor t = outline(name);
  const auto held = std::make_shared<const Buffer>(bytes(*find(name)));
  static constexpr std::byte kNothing{};
  t.data = held->size() > 0 ? held->data() : &kNothing;
  t.owner = held;
  return t;
}

}  // namespace mla
