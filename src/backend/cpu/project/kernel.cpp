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
    memory weights;  // PanelLayout::rows
    std::array<Operands, kRowBlocks.size()> blocks;
    std::atomic<bool> taken{false};
  };

  int64_t in, out;
  memory::data_type type;
  memory::desc weights;
  std::array<dnnl::matmul, kRowBlocks.size()> products;
  std::vector<Set> sets;
  std::array<bool, kRowBlocks.size()> block_uniform{};
  bool uniform = true;

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

// The order of a kernel's additions depends on its shape, never on its data; so one row of random numbers, put at every
// position of every block, shows which of them add in the same order.
void PanelKernel::find_uniform(Dtype operands, PanelLayout layout) {
  State& s = *state_;
  uint32_t state = 1;
  auto random = [&] {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  };
  std::vector<float> weights(static_cast<size_t>(s.in * s.out));
  for (float& w : weights) w = random();
  Buffer packed(packed_bytes());
  memory panel;
  if (layout == PanelLayout::packed) panel = pack(weights.data(), packed.data());
  else
    for (int64_t i = 0; i < s.in * s.out; ++i) store_float(operands, packed.data(), i, weights[i]);
  auto multiply = [&](size_t block, const void* x, float* y) {
    layout == PanelLayout::packed ? run(block, x, panel, y, 0) : run(block, x, packed.data(), y, 0);
  };

  const size_t most = static_cast<size_t>(kRowBlocks.back()), row_bytes = static_cast<size_t>(s.in) * size_of(operands);
  std::vector<std::byte> x(most * row_bytes);
  for (int64_t i = 0; i < s.in; ++i) store_float(operands, x.data(), i, random());
  for (size_t r = 1; r < most; ++r) std::memcpy(x.data() + r * row_bytes, x.data(), row_bytes);

  const size_t out = static_cast<size_t>(s.out);
  std::vector<float> alone(out), y(most * out);
  multiply(0, x.data(), alone.data());
  auto same = [&](const float* a, const float* b) { return std::memcmp(a, b, out * sizeof(float)) == 0; };
  for (size_t block = 0; block < kRowBlocks.size(); ++block) {
    multiply(block, x.data(), y.data());
    s.block_uniform[block] = true;
    for (size_t r = 1; r < static_cast<size_t>(kRowBlocks[block]); ++r)
      s.block_uniform[block] = s.block_uniform[block] && same(&y[r * out], y.data());
    s.uniform = s.uniform && s.block_uniform[block] && same(y.data(), alone.data());
  }
}

const PanelKernel& PanelKernel::get(int64_t in, int64_t out, Dtype operands, PanelLayout layout) {
  static std::mutex mutex;
  static std::map<std::tuple<int64_t, int64_t, Dtype, PanelLayout>, std::unique_ptr<const PanelKernel>> kernels;
  std::lock_guard lock(mutex);
  auto& slot = kernels[{in, out, operands, layout}];
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
    s->weights =
        memory::desc({in, out}, type, layout == PanelLayout::packed ? memory::format_tag::any : memory::format_tag::ab);
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
    if (layout == PanelLayout::rows)
      for (State::Set& set : s->sets) set.weights = memory(s->weights, engine(), nullptr);
    for (State::Set& set : s->sets)
      for (State::Operands& o : set.blocks) o.scratchpad.set_data_handle(set.scratch.data());
    std::unique_ptr<PanelKernel> kernel(new PanelKernel(std::move(s)));
    kernel->find_uniform(operands, layout);
    slot = std::move(kernel);
  } catch (const dnnl::error& e) {
    throw DeviceError("project: oneDNN refused a product of in " + std::to_string(in) + ", out " + std::to_string(out) +
                      ", " + std::string(to_string(operands)) + ": " + e.what());
  }
  return *slot;
}

size_t PanelKernel::packed_bytes() const { return state_->weights.get_size(); }

bool PanelKernel::uniform() const { return state_->uniform; }
bool PanelKernel::uniform(size_t block) const { return state_->block_uniform[block]; }

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
  execute(block, x, packed.get(), nullptr, y, slot);
}

void PanelKernel::run(size_t block, const void* x, const void* weights, float* y, int slot) const {
  execute(block, x, nullptr, weights, y, slot);
}

// Weights come packed, or as rows that are bound here: the plain layout has no padding that binding would clear.
void PanelKernel::execute(size_t block, const void* x, dnnl_memory_t packed, const void* rows, float* y,
                          int slot) const {
  const SerialOpenMp serial;
  State::Set& set = state_->claim(slot);
  State::Operands& o = set.blocks[block];
  // The C interface: the C++ one takes its arguments in a map.
  const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, o.x.get()},
                                  {DNNL_ARG_WEIGHTS, rows ? set.weights.get() : packed},
                                  {DNNL_ARG_DST, o.y.get()},
                                  {DNNL_ARG_SCRATCHPAD, o.scratchpad.get()}};
  dnnl_status_t status = dnnl_memory_set_data_handle(o.x.get(), const_cast<void*>(x));
  if (status == dnnl_success) status = dnnl_memory_set_data_handle(o.y.get(), y);
  if (status == dnnl_success && rows) status = dnnl_memory_set_data_handle(set.weights.get(), const_cast<void*>(rows));
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
