// What a system says of a file after it was opened: nothing yet, a part, an error, less than there was. This program's
// own calls come here first.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <string_view>

#include "mla/error.hpp"
#include "mla/weights.hpp"
#include "model/json.hpp"
#include "support/safetensors_writer.hpp"

namespace {

/// What the calls of this thread meet while it is there.
struct System {
  int stat_error = 0;                                ///< of a look at an open file
  int path_error = 0;                                ///< of a look at a path that ends so
  int after = 0;                                     ///< reads that are as ever
  int interrupted = 0;                               ///< reads after those that a signal ends
  int read_error = 0;                                ///< of each read after those; 0 for none
  size_t most = std::numeric_limits<size_t>::max();  ///< bytes that a read gives; 0: the file has ended
  int reads = 0;                                     ///< that were asked for
};
thread_local System* here = nullptr;

// The bytes to ask for, or -1 with errno set.
ssize_t asked(size_t bytes) {
  if (!here) return static_cast<ssize_t>(bytes);
  ++here->reads;
  if (here->after-- > 0) return static_cast<ssize_t>(bytes);
  const bool signal = here->interrupted-- > 0;
  errno = signal ? EINTR : here->read_error;
  return errno != 0 ? -1 : static_cast<ssize_t>(std::min(bytes, here->most));
}

constexpr std::string_view kUnseen = "unseen.safetensors";

}  // namespace

extern "C" int stat(const char* path, struct stat* to) noexcept {
  if (here && here->path_error != 0 && std::string_view(path).ends_with(kUnseen)) {
    errno = here->path_error;
    return -1;
  }
  return static_cast<int>(syscall(SYS_newfstatat, AT_FDCWD, path, to, 0));
}
extern "C" int fstat(int fd, struct stat* to) noexcept {
  if (here && here->stat_error != 0) {
    errno = here->stat_error;
    return -1;
  }
  return static_cast<int>(syscall(SYS_fstat, fd, to));
}
extern "C" ssize_t read(int fd, void* to, size_t bytes) {
  const ssize_t n = asked(bytes);
  return n < 0 ? n : syscall(SYS_read, fd, to, n);
}
extern "C" ssize_t pread(int fd, void* to, size_t bytes, off_t at) {
  const ssize_t n = asked(bytes);
  return n < 0 ? n : syscall(SYS_pread64, fd, to, n, at);
}

namespace mla {
namespace {

class SystemCalls : public testing::Test {
 protected:
  SystemCalls() {
    test::write_file(text_, kText);
    test::SafetensorsWriter w;
    w.add("a", "F32", {4}, kValues);
    w.write(tensors_);
  }
  /// What `use` says of a file while the system does that; "read" when nothing.
  template <class F>
  static std::string said(const std::filesystem::path& file, System system, F&& use) {
    here = &system;
    std::string why = "read";
    try {
      use();
    } catch (const CheckpointError& e) {
      why = e.what();
    }
    here = nullptr;
    const std::string where = file.string() + ": ";
    EXPECT_EQ(why == "read" || why.starts_with(where), true) << why;
    return why == "read" ? why : why.substr(where.size());
  }
  std::string said_of_text(const System& system) const {
    return said(text_, system, [&] { EXPECT_EQ(read_text(text_), kText); });
  }
  std::string said_of_tensors(const System& system) const {
    return said(tensors_, system, [&] { EXPECT_EQ(Safetensors(tensors_).tensor("a").to_f32(), kValues); });
  }

  const std::string kText = R"({"a":[1,2,3]})";
  const std::vector<float> kValues{1, 2, -3, 4};
  test::TempFolder folder_;
  const std::filesystem::path text_ = folder_ / "f.json", tensors_ = folder_ / "f.safetensors";
};

TEST_F(SystemCalls, ReadsGoOnUntilAllIsThere) {
  for (int after : {0, 1, 2}) {
    EXPECT_EQ(said_of_text({.after = after, .interrupted = 3}), "read");
    EXPECT_EQ(said_of_tensors({.after = after, .interrupted = 3}), "read");
  }
  for (size_t most : {1, 5, 7}) {
    EXPECT_EQ(said_of_text({.interrupted = 1, .most = most}), "read");
    EXPECT_EQ(said_of_tensors({.interrupted = 1, .most = most}), "read");
  }
}

TEST_F(SystemCalls, ErrorsSayWhatTheSystemSays) {
  EXPECT_EQ(said_of_text({.stat_error = EIO}), "cannot be examined: Input/output error");
  EXPECT_EQ(said_of_tensors({.stat_error = EIO}), "cannot be examined: Input/output error");
  EXPECT_EQ(said_of_text({.read_error = EIO}), "cannot be read to its end: Input/output error");
  EXPECT_EQ(said_of_text({.interrupted = 2, .read_error = ESTALE}), "cannot be read to its end: Stale file handle");
  // The length of the header, the header, a tensor.
  EXPECT_EQ(said_of_tensors({.read_error = EIO}), "the header's length cannot be read: Input/output error");
  EXPECT_EQ(said_of_tensors({.after = 1, .read_error = EIO}), "the header cannot be read: Input/output error");
  EXPECT_EQ(said_of_tensors({.after = 2, .read_error = EIO}), "tensor 'a' cannot be read: Input/output error");
  EXPECT_EQ(said_of_tensors({.after = 2, .interrupted = 1, .read_error = ESTALE}),
            "tensor 'a' cannot be read: Stale file handle");
}

// Between the look at its size and the last byte.
TEST_F(SystemCalls, FilesThatBecomeShorter) {
  EXPECT_EQ(said_of_text({.most = 0}), "cannot be read to its end: it became shorter");
  EXPECT_EQ(said_of_tensors({.most = 0}),
            "the header's length has 0 bytes left of 8: the file was shortened after it was opened");
  EXPECT_EQ(said_of_tensors({.after = 2, .most = 0}),
            "tensor 'a' has 0 bytes left of 16: the file was shortened after it was opened");
}

// Which file a shard is cannot be seen: it is read all the same, and opened again under another name.
TEST_F(SystemCalls, ShardsThatCannotBeLookedAt) {
  test::write_file(folder_ / "config.json",
                   R"({"hidden_size":48,"num_hidden_layers":1,"num_attention_heads":3,"kv_lora_rank":40,)"
                   R"("qk_nope_head_dim":24,"qk_rope_head_dim":8,"v_head_dim":20})");
  test::SafetensorsWriter w;
  w.add("a", "F32", {4}, kValues);
  w.add("b", "F32", {4}, kValues);
  w.write(folder_ / kUnseen);
  test::write_file(folder_ / "model.safetensors.index.json",
                   R"({"weight_map":{"a":"unseen.safetensors","b":"./unseen.safetensors"}})");
  EXPECT_EQ(said(folder_.path(), {.path_error = EIO},
                 [&] {
                   const Checkpoint c(folder_.path());
                   EXPECT_EQ(c.file_of("a"), folder_ / kUnseen);
                   EXPECT_EQ(c.file_of("b"), folder_ / "./unseen.safetensors");
                 }),
            "read");
}

}  // namespace
}  // namespace mla
