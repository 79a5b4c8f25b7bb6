#include <chrono>

#include "capi/objects.hpp"
#include "capi/tensor.hpp"

using namespace mla;
using namespace mla::capi;

namespace {

class CallersTransport final : public Transport {
 public:
  explicit CallersTransport(const mla_transport& t) : t_(t) {}
  ~CallersTransport() override {
    if (owns_user_ && t_.release) t_.release(t_.user);
  }
  void own_user() { owns_user_ = true; }

  void exchange(const Exchange& e) override {
    const size_t n = e.send.size();
    std::vector<const void*> send(n);
    std::vector<void*> receive(n);
    std::vector<size_t> send_bytes(n), receive_bytes(n);
    for (size_t r = 0; r < n; ++r) {
      send[r] = e.send[r].data, send_bytes[r] = e.send[r].bytes;
      receive[r] = e.receive[r].data, receive_bytes[r] = e.receive[r].bytes;
    }
    const std::string step(e.step);
    const mla_exchange messages{
        .struct_size = sizeof(mla_exchange),
        .step = step.c_str(),
        .seconds = std::chrono::duration<double>(e.deadline - std::chrono::steady_clock::now()).count(),
        .ranks = static_cast<int64_t>(n),
        .send = send.data(),
        .send_bytes = send_bytes.data(),
        .receive = receive.data(),
        .receive_bytes = receive_bytes.data()};
    if (const int32_t status = t_.exchange(t_.user, &messages); status != 0)
      throw DeviceError("transport exchange gave " + std::to_string(status) + " for step '" + step + "'");
  }
  void abort(int rank, std::string_view reason) noexcept override {
    try {
      t_.abort(t_.user, rank, std::string(reason).c_str());
    } catch (...) {  // no memory for the text
      t_.abort(t_.user, rank, "");
    }
  }

 private:
  mla_transport t_;
  bool owns_user_ = false;  // not before the caller has its communicator
};

void adopt_communicator(Communicator made, mla_communicator** communicator) {
  auto handle = std::make_shared<mla_communicator>(std::move(made));
  put(communicator, std::move(handle));
}

}  // namespace

mla_status mla_head_share(int64_t heads, int32_t rank, int32_t ranks, int64_t* begin, int64_t* count) {
  return guarded("mla_head_share", [&] {
    const HeadRange share = head_share(heads, rank, ranks);
    required("begin", begin) = share.begin;
    required("count", count) = share.count;
  });
}

mla_status mla_model_part(const mla_model* model, int64_t head_begin, int64_t head_count, mla_model** part) {
  return guarded("mla_model_part", [&] {
    expect_handle("part", part);
    auto made = std::make_shared<mla_model>();
    made->config = part_of(get("model", model)->config, {head_begin, head_count});
    put(part, std::move(made));
  });
}

mla_status mla_communicator_create_threads(int32_t ranks, mla_communicator** communicators) {
  return guarded("mla_communicator_create_threads", [&] {
    required("communicators", communicators);
    for (int32_t r = 0; r < std::min(ranks, 1024); ++r) communicators[r] = nullptr;
    std::vector<Communicator> all = thread_communicators(ranks);
    try {
      for (int32_t r = 0; r < ranks; ++r) adopt_communicator(std::move(all[static_cast<size_t>(r)]), communicators + r);
    } catch (...) {
      for (int32_t r = 0; r < ranks; ++r) {
        if (communicators[r]) remove(communicators[r]);
        communicators[r] = nullptr;
      }
      throw;
    }
  });
}

mla_status mla_communicator_create(int32_t rank, int32_t ranks, const mla_transport* transport,
                                   mla_communicator** communicator) {
  return guarded("mla_communicator_create", [&] {
    expect_handle("communicator", communicator);
    mla_transport t = read_struct("transport", transport);
    if (!t.exchange) throw HandleError("transport exchange is NULL");
    if (!t.abort) throw HandleError("transport abort is NULL");
    if (rank < 0 || ranks < 1 || rank >= ranks)
      throw InputError("rank is " + std::to_string(rank) + " of " + std::to_string(ranks) + ", no such rank");
    auto own = std::make_unique<CallersTransport>(t);
    CallersTransport& kept = *own;
    adopt_communicator(Communicator(rank, ranks, std::move(own)), communicator);
    kept.own_user();
  });
}

mla_status mla_communicator_connect(mla_communicator* communicator, DLDevice device, int32_t link, size_t staging_bytes,
                                    double seconds) {
  return guarded("mla_communicator_connect", [&] {
    Communicator& group = get("communicator", communicator)->communicator;
    if (!(seconds >= 0 && seconds <= 86400))
      throw InputError("seconds is " + std::to_string(seconds) + ", allowed 0 to 86400");
    group.connect(read_device(device), read_enum("link", link, GpuLink::nccl),
                  staging_bytes > 0 ? staging_bytes : size_t{64} << 20,
                  std::chrono::nanoseconds(static_cast<int64_t>((seconds > 0 ? seconds : 60) * 1e9)));
  });
}

mla_status mla_communicator_abort(mla_communicator* communicator, const char* reason) {
  return guarded("mla_communicator_abort",
                 [&] { get("communicator", communicator)->communicator.abort(&required("reason", reason)); });
}

mla_status mla_communicator_destroy(mla_communicator* communicator) {
  return destroy("mla_communicator_destroy", "communicator", communicator);
}
