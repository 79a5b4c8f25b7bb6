#include "mla/staged_step.hpp"

#include <cstring>
#include <string>
#include <vector>

#include "core/gpu.hpp"
#include "core/named_buffer.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

struct Array {
  const char* name;
  const void* data;
  size_t count, element;
  std::byte padding{0};   // of elements that a later step does not have
  bool in_order = false;  // counts up from 0: calls were made with a slice in its place
};

// Every array that an op of this step may read, in a fixed order; the block table apart.
std::vector<Array> arrays_of(const Plan& plan, const Batch& batch) {
  std::vector<Array> all;
  auto add = [&](const char* name, const auto& list, std::byte padding = std::byte{0}) {
    all.push_back({name, list.data(), list.size(), sizeof(*list.data()), padding});
  };
  auto add_rows = [&](const char* name, const std::vector<int32_t>& list) {
    add(name, list);
    Array& a = all.back();
    a.in_order = true;
    for (size_t i = 0; a.in_order && i < list.size(); ++i) a.in_order = list[i] == static_cast<int32_t>(i);
  };
  add("slot_mapping", batch.slot_mapping, std::byte{0xff});
  add("seq_lens", batch.seq_lens);
  add("positions", plan.positions);
  add_rows("latent_tokens", plan.latent_tokens);
  add("latent_items", plan.latent_items);
  add("splits", plan.splits);
  add_rows("expanded_tokens", plan.expanded_tokens);
  add("suffix_items", plan.suffix_items);
  for (const ContextChunk& c : plan.chunks) {
    add("context pieces", c.pieces);
    add("context items", c.items);
  }
  add("sparse_requests", plan.sparse_requests);
  add("sparse_positions", plan.sparse_positions);
  add("gathered_starts", plan.gathered_starts);
  add("gathered_counts", plan.gathered_counts);
  for (const SparseGroup& g : plan.sparse_groups) {
    add("sparse items", g.work.items);
    add("sparse splits", g.work.splits);
    add("sparse pieces", g.pieces);
  }
  add("index rows", plan.index_schedule.all);
  for (const IndexTile& t : plan.index_schedule.selected) add("index tile", t.rows);
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

  void require_fits(const std::vector<Array>& now, const Batch& batch) const {
    if (now.size() != arrays.size())
      throw ShapeError("restage: the step has " + std::to_string(now.size()) + " arrays, the staged one has " +
                       std::to_string(arrays.size()));
    for (size_t i = 0; i < now.size(); ++i) {
      if (now[i].count > arrays[i].count || (now[i].count == 0) != (arrays[i].count == 0))
        throw ShapeError(std::string("restage: ") + now[i].name + " has " + std::to_string(now[i].count) +
                         " entries, the staged step's has " + std::to_string(arrays[i].count));
      if (arrays[i].in_order && !now[i].in_order)
        throw ShapeError(std::string("restage: ") + now[i].name + " is out of order, the staged step's was in order");
    }
    const auto& table = batch.block_table;
    if (table.extent<Request>() > table_rows || table.extent<Page>() > table_columns)
      throw ShapeError("restage: block_table is " + std::to_string(table.extent<Request>()) + " x " +
                       std::to_string(table.extent<Page>()) + ", the staged step's is " + std::to_string(table_rows) +
                       " x " + std::to_string(table_columns));
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
  const std::vector<Array> now = arrays_of(plan, batch);
  state_->require_fits(now, batch);
  state_->send(now, batch);
}

}  // namespace mla
