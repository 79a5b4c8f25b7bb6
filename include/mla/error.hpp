// Typed errors. Every message gives the offending value, the limit it broke and the place, on one line: whatever text
// of others it quotes, control characters are escaped and it is cut at 1000 bytes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace mla {

/// Base of everything libmla throws on bad input or a failing device.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what);
};

/// Extents, strides or dtypes of an argument do not fit the call.
class ShapeError : public Error {
 public:
  using Error::Error;
};

/// A valid request for something this library (or this backend) does not do; the text names it.
class UnsupportedError : public Error {
 public:
  using Error::Error;
};

/// A batch description that contradicts itself (query starts, lengths, tables, slots).
class BatchError : public Error {
 public:
  using Error::Error;
};

/// A malformed or incomplete checkpoint or config: names file, tensor or key, and reason.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

/// Any other unusable input: a trace line, an option, a file. Names file, line and reason.
class InputError : public Error {
 public:
  using Error::Error;
};

/// The page pool cannot serve the request; the pool is as it was before the call.
class OutOfPages : public Error {
 public:
  OutOfPages(int64_t wanted, int64_t available, int64_t total);
  int64_t wanted() const { return wanted_; }
  int64_t available() const { return available_; }

 private:
  int64_t wanted_, available_;
};

/// A device or the operating system refused: memory, threads, a driver.
class DeviceError : public Error {
 public:
  using Error::Error;
};

}  // namespace mla
