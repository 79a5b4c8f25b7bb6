#include "backend/cpu/project/kernel.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "backend/cpu/project/serial.hpp"
#include "mla/device.hpp"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

using dnnl::memory;

const dnnl::engine& engine() {
  static const dnnl::engine e(dnnl::engine::kind::cpu, 0);
  return e;
}

}  // namespace

// Memory objects are bound to their data at every call, so each call in flight needs its own. They are made here, once,
// because making one allocates: a set for each thread that may be inside at the same time, claimed by a flag. Weights
// are bound when they are packed: oneDNN clears a layout's padding at every binding, which must not happen under
// another thread's product.
struct PanelKernel::State {
  struct Operands {
    memory x, y, scratchpad;
  };
  struct Set {
    dnnl::stream stream;
    Buffer scratch;
    std::array<Operands, kRowBlocks.size()> blocks;
    std::atomic<bool> taken{false};
  };

  int64_t in, out;
  memory::data_type type;
  memory::desc weights;
  std::array<dnnl::matmul, kRowBlocks.size()> products;
  std::vector<Set> sets;
  bool uniform = false;

  Set& claim(int hint) {
    const size_t first = static_cast<size_t>(hint) % sets.size();
    for (size_t i = first;;) {
      if (!sets[i].taken.exchange(true, std::memory_order_acquire)) return sets[i];
      i = (i + 1) % sets.size();
      if (i == first) std::this_thread::yield();
    }
  }
};

PanelKernel::PanelKernel(std::unique_ptr<State> state) : state_(std::move(state)) {}
PanelKernel::~PanelKernel() = default;

namespace {

// The order of a kernel's additions depends on its shape, never on its data; so one row of random numbers, put at every
// position of every block, shows whether all of them add in the same order.
bool same_order_everywhere(const PanelKernel& kernel, int64_t in, int64_t out, Dtype operands) {
  uint32_t state = 1;
  auto random = [&] {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  };
  std::vector<float> weights(static_cast<size_t>(in * out));
  for (float& w : weights) w = random();
  Buffer packed(kernel.packed_bytes());
  const memory panel = kernel.pack(weights.data(), packed.data());

  const int64_t most = kRowBlocks.back(), row_bytes = in * static_cast<int64_t>(size_of(operands));
  std::vector<std::byte> x(static_cast<size_t>(most * row_bytes));
  for (int64_t i = 0; i < in; ++i) store_float(operands, x.data(), i, random());
  for (int64_t r = 1; r < most; ++r) std::memcpy(x.data() + r * row_bytes, x.data(), static_cast<size_t>(row_bytes));

  std::vector<float> alone(static_cast<size_t>(out)), y(static_cast<size_t>(most * out));
  kernel.run(0, x.data(), panel, alone.data(), 0);
  for (size_t block = 0; block < kRowBlocks.size(); ++block) {
    kernel.run(block, x.data(), panel, y.data(), 0);
    for (int64_t r = 0; r < kRowBlocks[block]; ++r)
      if (std::memcmp(y.data() + r * out, alone.data(), alone.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

}  // namespace

const PanelKernel& PanelKernel::get(int64_t in, int64_t out, Dtype operands) {
  static std::mutex mutex;
  static std::map<std::tuple<int64_t, int64_t, Dtype>, std::unique_ptr<const PanelKernel>> kernels;
  std::lock_guard lock(mutex);
  auto& slot = kernels[{in, out, operands}];
  if (slot) return *slot;

  const SerialOpenMp serial;
  try {
    auto s = std::make_unique<State>();
    s->in = in;
    s->out = out;
    s->sets = std::vector<State::Set>(std::max(16u, 2 * std::thread::hardware_concurrency()));
    for (State::Set& set : s->sets) set.stream = dnnl::stream(engine());
    const auto type = operands == Dtype::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    s->weights = memory::desc({in, out}, type, memory::format_tag::any);
    // The largest block chooses the layout; the others take it as it is.
    for (size_t block = kRowBlocks.size(); block-- > 0;) {
      const memory::desc x({kRowBlocks[block], in}, type, memory::format_tag::ab);
      const memory::desc y({kRowBlocks[block], out}, memory::data_type::f32, memory::format_tag::ab);
      const dnnl::matmul::primitive_desc pd(dnnl::matmul::desc(x, s->weights, y), attributes, engine());
      s->weights = pd.weights_desc();
      s->products[block] = dnnl::matmul(pd);
      const memory::desc scratchpad = pd.scratchpad_desc();
      for (State::Set& set : s->sets) {
        // The largest block's comes first and serves the others when it suffices.
        if (set.scratch.size() < scratchpad.get_size()) set.scratch = Buffer(scratchpad.get_size());
        set.blocks[block] = {memory(x, engine(), nullptr), memory(y, engine(), nullptr),
                             memory(scratchpad, engine(), nullptr)};
      }
    }
    for (State::Set& set : s->sets)
      for (State::Operands& o : set.blocks) o.scratchpad.set_data_handle(set.scratch.data());
    std::unique_ptr<PanelKernel> kernel(new PanelKernel(std::move(s)));
    kernel->state_->uniform = same_order_everywhere(*kernel, in, out, operands);
    slot = std::move(kernel);
  } catch (const dnnl::error& e) {
    throw DeviceError("project: oneDNN refused a product of in " + std::to_string(in) + ", out " + std::to_string(out) +
                      ", " + std::string(to_string(operands)) + ": " + e.what());
  }
  return *slot;
}

size_t PanelKernel::packed_bytes() const { return state_->weights.get_size(); }

bool PanelKernel::uniform() const { return state_->uniform; }

dnnl::memory PanelKernel::pack(const float* weights, std::byte* packed) const {
  const SerialOpenMp serial;
  dnnl::stream stream(engine());
  memory from({{state_->in, state_->out}, memory::data_type::f32, memory::format_tag::ba}, engine(),
              const_cast<float*>(weights));
  memory to(state_->weights, engine(), packed);
  dnnl::reorder(from, to).execute(stream, from, to);
  stream.wait();
  return to;
}

void PanelKernel::run(size_t block, const void* x, const dnnl::memory& packed, float* y, int slot) const {
  const SerialOpenMp serial;
  State::Set& set = state_->claim(slot);
  State::Operands& o = set.blocks[block];
  // The C interface: the C++ one takes its arguments in a map.
  const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, o.x.get()},
                                  {DNNL_ARG_WEIGHTS, packed.get()},
                                  {DNNL_ARG_DST, o.y.get()},
                                  {DNNL_ARG_SCRATCHPAD, o.scratchpad.get()}};
  dnnl_status_t status = dnnl_memory_set_data_handle(o.x.get(), const_cast<void*>(x));
  if (status == dnnl_success) status = dnnl_memory_set_data_handle(o.y.get(), y);
  if (status == dnnl_success) status = dnnl_primitive_execute(state_->products[block].get(), set.stream.get(), 4, args);
  set.taken.store(false, std::memory_order_release);
  if (status != dnnl_success)
    throw DeviceError("project: oneDNN failed with status " + std::to_string(status) + " at rows " +
                      std::to_string(kRowBlocks[block]) + ", in " + std::to_string(state_->in) + ", out " +
                      std::to_string(state_->out));
}

bool bf16_products() {
  const auto has = static_cast<unsigned>(dnnl::get_effective_cpu_isa()),
             needs = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (has & needs) == needs;
}

}  // namespace mla::cpu
