#include "mla/staged_step.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/gpu.hpp"
#include "core/named_buffer.hpp"
#include "mla/error.hpp"
#include "plan/lists.hpp"

namespace mla {
namespace {

struct Array : planning::HostList {
  ListKey key;
  bool in_order = false;  // counts up from 0: calls were made with a slice in its place
};

// Every list that the step reads; the block table apart.
std::vector<Array> arrays_of(const Plan& plan, const Batch& batch) {
  std::vector<Array> all;
  all.reserve(plan.lists.size());
  for (const ListKey key : plan.lists) {
    Array a{planning::host_list(plan, batch, key), key};
    const int32_t* row = a.rows ? static_cast<const int32_t*>(a.data) : nullptr;
    a.in_order = a.rows;
    for (size_t i = 0; a.in_order && i < a.count; ++i) a.in_order = row[i] == static_cast<int32_t>(i);
    all.push_back(a);
  }
  return all;
}

size_t up(size_t n) { return (n + 63) / 64 * 64; }

}  // namespace

struct StagedStep::State {
  Stream stream;
  std::vector<Array> arrays;  // of the step that calls were made with
  int64_t table_rows = 0, table_columns = 0, table_stride = 0;
  size_t bytes = 0;
  Buffer device;
  struct Pinned {
    std::byte* data = nullptr;
    size_t bytes = 0;
    gpu::Mark copied;
  } pinned[2];
  int next = 0;

  explicit State(const Stream& s) : stream(s) {}
  ~State() {
    gpu::withdraw(stream.queue(), this);
    for (Pinned& p : pinned) give_back(p);
  }
  static void give_back(Pinned& p) noexcept {
    if (!p.data) return;
    try {
      p.copied.wait();
    } catch (const Error&) {  // the device failed: there is no copy to wait for
    }
    gpu::release_pinned(p.data);
    p.data = nullptr;
  }

  size_t table_bytes() const {
    return table_rows == 0 || table_columns == 0
               ? 0
               : static_cast<size_t>((table_rows - 1) * table_stride + table_columns) * sizeof(int32_t);
  }

  void lay_out(const Plan& plan, const Batch& batch) {
    arrays = arrays_of(plan, batch);
    table_rows = batch.block_table.extent<Request>();
    table_columns = batch.block_table.extent<Page>();
    table_stride = batch.block_table.stride<Request>();
    bytes = up(table_bytes()) + 64;
    for (const Array& a : arrays) bytes += up(a.count * a.element);
    if (device.size() < bytes) {
      stream.synchronize();  // calls under way still read the old one
      device = named_buffer("arrays of a staged step", bytes + bytes / 4, stream.device());
    }
    gpu::withdraw(stream.queue(), this);
    std::vector<gpu::HostRange> ranges;
    const std::byte* at = device.data();
    for (const Array& a : arrays) {
      if (a.count > 0) ranges.push_back({a.data, a.count * a.element, at});
      at += up(a.count * a.element);
    }
    if (table_bytes() > 0) ranges.push_back({batch.block_table.data(), table_bytes(), at});
    gpu::publish(stream.queue(), this, ranges);
  }

  // The lists of a later step in the places of the staged one's; those that it does not read are empty.
  std::vector<Array> fitted(const Plan& plan, const Batch& batch) const {
    std::vector<Array> fit;
    for (const Array& a : arrays)
      fit.push_back({{.name = a.name, .element = a.element, .padding = a.padding}, a.key, a.in_order});
    for (const Array& a : arrays_of(plan, batch)) {
      const auto same = [&](const Array& staged) { return staged.key == a.key; };
      const auto place = std::find_if(fit.begin(), fit.end(), same);
      if (place != fit.end()) *place = a;
      else if (a.count > 0)
        throw ShapeError(std::string("restage: ") + a.name + " has " + std::to_string(a.count) +
                         " entries, the staged step's has 0");
    }
    for (size_t i = 0; i < fit.size(); ++i) {
      if (fit[i].count > arrays[i].count || (fit[i].count == 0) != (arrays[i].count == 0))
        throw ShapeError(std::string("restage: ") + fit[i].name + " has " + std::to_string(fit[i].count) +
                         " entries, the staged step's has " + std::to_string(arrays[i].count));
      if (arrays[i].in_order && !fit[i].in_order)
        throw ShapeError(std::string("restage: ") + fit[i].name + " is out of order, the staged step's was in order");
    }
    const auto& table = batch.block_table;
    if (table.extent<Request>() > table_rows || table.extent<Page>() > table_columns)
      throw ShapeError("restage: block_table is " + std::to_string(table.extent<Request>()) + " x " +
                       std::to_string(table.extent<Page>()) + ", the staged step's is " + std::to_string(table_rows) +
                       " x " + std::to_string(table_columns));
    return fit;
  }

  void send(const std::vector<Array>& now, const Batch& batch) {
    Pinned& host = pinned[next];
    next ^= 1;
    if (host.bytes < bytes) {
      give_back(host);
      host.bytes = 0;
      host.data = gpu::allocate_pinned(bytes + bytes / 4);
      host.bytes = bytes + bytes / 4;
    }
    host.copied.wait();
    std::byte* at = host.data;
    for (size_t i = 0; i < now.size(); ++i) {
      const size_t used = now[i].count * now[i].element, room = arrays[i].count * arrays[i].element;
      if (used > 0) std::memcpy(at, now[i].data, used);
      std::memset(at + used, static_cast<int>(now[i].padding), room - used);
      at += up(room);
    }
    int32_t* table = reinterpret_cast<int32_t*>(at);
    for (int64_t r = 0; r < batch.block_table.extent<Request>(); ++r)
      for (int64_t p = 0; p < batch.block_table.extent<Page>(); ++p)
        table[r * table_stride + p] = batch.block_table(r, p);
    copy(stream, device.data(), host.data, bytes);
    gpu::changed(stream.queue());
    host.copied.set(stream.queue());
  }
};

StagedStep::StagedStep(Stream& stream) {
  if (stream.device().kind == DeviceKind::cuda) state_ = std::make_unique<State>(stream);
}
StagedStep::~StagedStep() = default;

void StagedStep::stage(const Plan& plan, const Batch& batch) {
  if (!state_) return;
  state_->lay_out(plan, batch);
  state_->send(state_->arrays, batch);
}

void StagedStep::restage(const Plan& plan, const Batch& batch) {
  if (!state_) return;
  state_->send(state_->fitted(plan, batch), batch);
}

}  // namespace mla
