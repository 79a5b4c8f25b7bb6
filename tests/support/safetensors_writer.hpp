// Writes safetensors files for tests, well-formed or not.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace mla::test {

/// A folder that goes with the object.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "mla-test-XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::filesystem::path& file, std::string_view text) {
  std::ofstream(file, std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
}

/// Length, header text as given, then that many data bytes.
inline std::string raw_safetensors(std::string_view header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string s(8, '\0');
  std::memcpy(s.data(), &length, 8);
  s += header;
  s.append(data_bytes, '\x11');
  return s;
}

class SafetensorsWriter {
 public:
  void add(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape,
           std::string_view bytes) {
    header_.append(header_.empty() ? "{\"" : ",\"").append(name).append("\":{\"dtype\":\"").append(dtype);
    header_.append("\",\"shape\":[");
    for (size_t i = 0; i < shape.size(); ++i) header_.append(i == 0 ? "" : ",").append(std::to_string(shape[i]));
    header_.append("],\"data_offsets\":[").append(std::to_string(data_.size())).append(",");
    data_ += bytes;
    header_.append(std::to_string(data_.size())).append("]}");
  }
  template <class T>
  void add(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape,
           const std::vector<T>& values) {
    add(name, dtype, shape, std::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)));
  }
  std::string bytes() const {
    const std::string header = (header_.empty() ? "{" : header_) + "}";
    return raw_safetensors(header, 0) + data_;
  }
  void write(const std::filesystem::path& file) const { write_file(file, bytes()); }

 private:
  std::string header_, data_;
};

}  // namespace mla::test
