#include "backend/cuda/backend.hpp"

#include <algorithm>
#include <string>

#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/generic/attention/cache_attention.hpp"
#include "backend/cuda/gpu_model.hpp"
#include "backend/cuda/sm90/ops.hpp"

namespace mla::cuda {

std::string_view target() { return "sm_80 and newer, sm_90a kernels on Hopper"; }

backend::GpuModel model_of(const Queue& queue) {
  return {.hopper = queue.hopper(), .multiprocessors = queue.multiprocessors()};
}

namespace {

// f32 rows by kernels that write no codes, then the codes of all rows: a row whose last part another call brings has
// codes that are not final until then.
void quantise_after(Stream& stream, const ops::AttendExpandedArgs& a,
                    void (*run)(Stream&, const ops::AttendExpandedArgs&)) {
  const int64_t rows = a.out.extent<Token>(), heads = a.out.extent<Head>(), value = a.out.extent<Value>();
  for (const ExpandedItem& i : a.items)
    if (i.q_count > 0 && static_cast<int64_t>(i.q_begin) + i.q_count > rows)
      throw UnsupportedError("attend_expanded: out has " + std::to_string(rows) + " rows, an item's end at " +
                             std::to_string(static_cast<int64_t>(i.q_begin) + i.q_count) +
                             "; cuda needs f32 rows of an output that its attention does not quantise by itself");
  if (heads > 1 && a.out.stride<Head>() != value)
    throw UnsupportedError("attend_expanded: out Head has stride " + std::to_string(a.out.stride<Head>()) +
                           "; cuda quantises rows of heads that follow one another");
  ops::AttendExpandedArgs plain = a;
  plain.quantized = {};
  run(stream, plain);
  const bool final = std::any_of(a.items.begin(), a.items.end(), [](const ExpandedItem& i) { return i.last; });
  if (final)
    quantize(stream,
             {.x = {a.out.dtype(), a.out.data(), {rows, heads * value}, {a.out.stride<Token>(), 1}}, .y = a.quantized});
}

}  // namespace

// Hopper's kernels where they serve the call, the generic ones everywhere else.
void attend_latent(Stream& stream, const ops::AttendLatentArgs& a) {
  if (sm90::serves(model_of(stream.queue()), a)) sm90::attend_latent(stream.queue(), a);
  else generic::attend_latent(stream, a);
}
void schedule_latent(Stream& stream, const ops::ScheduleLatentArgs& a) {
  if (model_of(stream.queue()).hopper) sm90::schedule_latent(stream.queue(), a);
}
void attend_expanded(Stream& stream, const ops::AttendExpandedArgs& a) {
  const bool hopper = sm90::serves(model_of(stream.queue()), a);
  const auto run = hopper
                       ? [](Stream& s, const ops::AttendExpandedArgs& args) { sm90::attend_expanded(s.queue(), args); }
                       : generic::attend_expanded;
  if (!a.quantized || (hopper && sm90::writes_codes(a))) return run(stream, a);
  quantise_after(stream, a, run);
}
void expand(Stream& stream, const ops::ExpandArgs& a) {
  if (sm90::serves(model_of(stream.queue()), a)) sm90::expand(stream.queue(), a);
  else generic::expand(stream, a);
}
void attend_sparse(Stream& stream, const ops::AttendSparseArgs& a) {
  if (sm90::serves(model_of(stream.queue()), a)) sm90::attend_sparse(stream.queue(), a);
  else generic::attend_lists(stream.queue(), a);
}

namespace {
constexpr std::string_view kGeneric = "cuda/generic";

template <class Args>
std::string name_of(const backend::GpuModel& gpu, const Args& a) {
  return sm90::serves(gpu, a) ? "cuda/sm90, " + sm90::kernel(gpu, a) : std::string(kGeneric);
}
}  // namespace

const backend::KernelNames kernel_names{.usual = kGeneric,
                                        .project = project_kernel,
                                        .expand = name_of<ops::ExpandArgs>,
                                        .attend_expanded = name_of<ops::AttendExpandedArgs>,
                                        .attend_latent = name_of<ops::AttendLatentArgs>,
                                        .attend_sparse = name_of<ops::AttendSparseArgs>,
                                        .index_score = index_score_kernel,
                                        .select_topk = select_topk_kernel};

size_t scratch_per_worker(const backend::ScratchShape&) { return kScratch; }

CostModel cost_model(Dtype compute, int64_t heads) {
  CostModel rates = default_cost_model({DeviceKind::cuda});
  // What Hopper's attention takes longer over rows of e4m3 than of bf16: converting them, which reading hides for few
  // heads.
  if (compute == Dtype::bf16 && heads > 16) rates.fp8_elements = heads <= 64 ? 6.8e12 : 4.6e12;
  return rates;
}

}  // namespace mla::cuda
