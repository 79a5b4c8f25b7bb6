#include "backend/cpu/project/kernel.hpp"

#include <map>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <thread>
#include <tuple>

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

// Memory objects are bound to their data at every call, so each call in flight needs its own. They are made here, once, because making
// one allocates: a set for each thread that may be inside at the same time, claimed by a flag.
struct PanelKernel::State {
  struct Call {
    dnnl::memory x, w, y, scratchpad;
    Buffer scratch;
    dnnl::stream stream;
  };
  struct Shape {
    dnnl::matmul primitive;
    std::vector<Call> calls;
  };

  int64_t in, out;
  memory::desc weights;
  std::array<Shape, kRowBlocks.size()> shapes;
  size_t sets = 0;
  std::unique_ptr<std::atomic<bool>[]> taken;
};

PanelKernel::PanelKernel(std::unique_ptr<State> state) : state_(std::move(state)) {}
PanelKernel::~PanelKernel() = default;

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
    s->sets = std::max(16u, 2 * std::thread::hardware_concurrency());
    s->taken = std::make_unique<std::atomic<bool>[]>(s->sets);
    const auto type = operands == Dtype::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    // The invariant block chooses the layout; the others take it as it is.
    s->weights = memory::desc({in, out}, type, memory::format_tag::any);
    auto make = [&](size_t block) {
      const memory::desc x({kRowBlocks[block], in}, type, memory::format_tag::ab);
      const memory::desc y({kRowBlocks[block], out}, memory::data_type::f32, memory::format_tag::ab);
      const dnnl::matmul::primitive_desc pd(dnnl::matmul::desc(x, s->weights, y), attributes, engine());
      s->weights = pd.weights_desc();
      State::Shape& shape = s->shapes[block];
      shape.primitive = dnnl::matmul(pd);
      for (size_t i = 0; i < s->sets; ++i) {
        Buffer scratch(pd.scratchpad_desc().get_size());
        void* p = scratch.data();
        shape.calls.push_back({memory(x, engine(), nullptr), memory(s->weights, engine(), nullptr), memory(y, engine(), nullptr),
                               memory(pd.scratchpad_desc(), engine(), p), std::move(scratch), dnnl::stream(engine())});
      }
    };
    static_assert(kRowBlocks[2] == kInvariantRows);
    for (size_t block : {2, 0, 1, 3}) make(block);
    slot = std::unique_ptr<const PanelKernel>(new PanelKernel(std::move(s)));
  } catch (const dnnl::error& e) {
    throw DeviceError("project: oneDNN refused a product of in " + std::to_string(in) + ", out " + std::to_string(out) + ", " +
                      std::string(to_string(operands)) + ": " + e.what());
  }
  return *slot;
}

size_t PanelKernel::packed_bytes() const { return state_->weights.get_size(); }

void PanelKernel::pack(const float* weights, std::byte* packed) const {
  const SerialOpenMp serial;
  dnnl::stream stream(engine());
  memory from({{state_->in, state_->out}, memory::data_type::f32, memory::format_tag::ba}, engine(), const_cast<float*>(weights));
  memory to(state_->weights, engine(), packed);
  dnnl::reorder(from, to).execute(stream, from, to);
  stream.wait();
}

void PanelKernel::run(size_t block, const void* x, const std::byte* packed, float* y, int hint) const {
  State& s = *state_;
  size_t set = static_cast<size_t>(hint) % s.sets;
  while (s.taken[set].exchange(true, std::memory_order_acquire)) {
    set = (set + 1) % s.sets;
    if (set == static_cast<size_t>(hint) % s.sets) std::this_thread::yield();
  }
  State::Call& call = s.shapes[block].calls[set];
  call.x.set_data_handle(const_cast<void*>(x));
  call.w.set_data_handle(const_cast<std::byte*>(packed));
  call.y.set_data_handle(y);
  const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, call.x.get()},
                                  {DNNL_ARG_WEIGHTS, call.w.get()},
                                  {DNNL_ARG_DST, call.y.get()},
                                  {DNNL_ARG_SCRATCHPAD, call.scratchpad.get()}};
  const dnnl_status_t status = dnnl_primitive_execute(s.shapes[block].primitive.get(), call.stream.get(), 4, args);
  s.taken[set].store(false, std::memory_order_release);
  if (status != dnnl_success)
    throw DeviceError("project: oneDNN failed with status " + std::to_string(status) + " at rows " + std::to_string(kRowBlocks[block]) +
                      ", in " + std::to_string(s.in) + ", out " + std::to_string(s.out));
}

}  // namespace mla::cpu
