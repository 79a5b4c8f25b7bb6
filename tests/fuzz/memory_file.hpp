// A file in memory: readers want paths.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "fuzz/fuzz.hpp"

namespace mla::fuzz {

class MemoryFile {
 public:
  MemoryFile() : fd_(memfd_create("fuzz", 0)), path_("/proc/self/fd/" + std::to_string(fd_)) { FUZZ_CHECK(fd_ >= 0); }
  /// One with a name, of a folder that lies in memory or not.
  explicit MemoryFile(const std::filesystem::path& path)
      : fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)), path_(path) {
    FUZZ_CHECK(fd_ >= 0);
  }
  ~MemoryFile() { ::close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  void write(const void* data, size_t size) {
    FUZZ_CHECK(pwrite(fd_, data, size, 0) == static_cast<ssize_t>(size));
    FUZZ_CHECK(size >= size_ || ftruncate(fd_, static_cast<off_t>(size)) == 0);
    size_ = size;
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  int fd_;
  size_t size_ = 0;
  std::filesystem::path path_;
};

}  // namespace mla::fuzz
