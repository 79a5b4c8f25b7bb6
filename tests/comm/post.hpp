// A caller's own transport: letters between threads, each to be fetched by its receiver.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mla/communicator.hpp"

namespace mla::test {

class Post {
 public:
  explicit Post(int ranks) : boxes_(static_cast<size_t>(ranks) * ranks), gone_(ranks), ranks_(ranks) {}

  static std::vector<Communicator> communicators(int ranks) {
    const auto post = std::make_shared<Post>(ranks);
    std::vector<Communicator> all;
    for (int r = 0; r < ranks; ++r) all.emplace_back(r, ranks, std::make_unique<Desk>(post, r));
    return all;
  }

 private:
  using Letter = std::vector<std::byte>;

  struct Desk final : Transport {
    Desk(std::shared_ptr<Post> p, int r) : post(std::move(p)), rank(r) {}
    ~Desk() override {
      const std::lock_guard lock(post->mutex_);
      post->gone_[rank] = true;
      post->wake_.notify_all();
    }
    void exchange(const Exchange& messages) override { post->exchange(rank, messages); }
    void abort(int whose, std::string_view reason) noexcept override {
      const std::lock_guard lock(post->mutex_);
      if (post->aborted_ < 0) post->aborted_ = whose, post->reason_ = reason;
      post->wake_.notify_all();
    }
    std::shared_ptr<Post> post;
    int rank;
  };

  void exchange(int rank, const Exchange& m) {
    std::unique_lock lock(mutex_);
    for (int to = 0; to < ranks_; ++to) {
      if (m.send[to].bytes == 0) continue;
      const auto* data = static_cast<const std::byte*>(m.send[to].data);
      boxes_[rank * ranks_ + to].emplace_back(data, data + m.send[to].bytes);
    }
    wake_.notify_all();
    for (int from = 0; from < ranks_; ++from) {
      if (m.receive[from].bytes == 0) continue;
      std::deque<Letter>& box = boxes_[from * ranks_ + rank];
      const bool in_time =
          wake_.wait_until(lock, m.deadline, [&] { return !box.empty() || aborted_ >= 0 || gone_[from]; });
      if (box.empty()) {
        if (aborted_ >= 0) throw RankError(aborted_, "", reason_);
        throw RankError(from, "", std::string("rank ") + std::to_string(from) + (in_time ? " has gone" : " is late"));
      }
      if (box.front().size() != m.receive[from].bytes) throw std::runtime_error("a letter of another size");
      std::memcpy(m.receive[from].data, box.front().data(), box.front().size());
      box.pop_front();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::deque<Letter>> boxes_;  // [from][to]
  std::vector<bool> gone_;
  std::string reason_;
  int aborted_ = -1;
  int ranks_;
};

}  // namespace mla::test
