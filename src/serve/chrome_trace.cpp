#include "serve/chrome_trace.hpp"

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <ostream>

namespace mla::serve {
namespace {

using nlohmann::json;

enum Track : int { kSteps = 1, kSampled = 2 };

// Events one a line, as they come: a long run's do not fit into memory twice.
class Writer {
 public:
  Writer(std::ostream& out, double origin) : out_(out), origin_(origin) {}

  void event(const json& e) {
    out_ << (first_ ? "\n" : ",\n") << e.dump(-1, ' ', false, json::error_handler_t::replace);
    first_ = false;
  }
  void name(const char* what, int track, const std::string& text) {
    event({{"ph", "M"}, {"pid", 1}, {"tid", track}, {"name", what}, {"args", {{"name", text}}}});
  }
  // Both ends are rounded to nanoseconds, so that what lies within a span still does when written.
  void span(const std::string& name, const char* category, Track track, double start, double end, json args) {
    const double from = ticks(start), to = ticks(end);
    event({{"ph", "X"},
           {"pid", 1},
           {"tid", static_cast<int>(track)},
           {"name", name},
           {"cat", category},
           {"ts", from / 1e3},
           {"dur", (to - from) / 1e3},
           {"args", std::move(args)}});
  }
  void counter(const char* name, double at, json values) {
    event({{"ph", "C"}, {"pid", 1}, {"name", name}, {"ts", ticks(at) / 1e3}, {"args", std::move(values)}});
  }

 private:
  double ticks(double seconds) const { return std::round((seconds - origin_) * 1e9); }
  std::ostream& out_;
  double origin_;
  bool first_ = true;
};

}  // namespace

void write_chrome_trace(std::ostream& out, const std::string& title, const Options& o, const Result& r) {
  const bool gpu = o.device.kind == DeviceKind::cuda;
  Writer w(out, r.series.empty() ? 0 : r.series.front().wall_start);
  out << "{\"displayTimeUnit\":\"ms\",\"otherData\":"
      << json{{"title", title}, {"op_calls_left_out", r.spans_left_out}}.dump(-1, ' ', false,
                                                                              json::error_handler_t::replace)
      << ",\"traceEvents\":[";
  w.name("process_name", 0, title);
  w.name("thread_name", kSteps, "steps");
  if (gpu) w.name("thread_name", kSampled, "one layer, op by op, sampled");
  size_t at = 0;
  for (size_t i = 0; i < r.series.size(); ++i) {
    const StepRecord& s = r.series[i];
    w.span("step " + std::to_string(i), "step", kSteps, s.wall_start, s.wall_end,
           {{"requests", s.requests},
            {"prefill_tokens", s.prefill_tokens},
            {"decode_tokens", s.decode_tokens},
            {"context_tokens", s.context_tokens},
            {"prefix_hit_tokens", s.hit_tokens},
            {"finished_requests", s.finished},
            {"measured_ms", 1e3 * s.seconds},
            {"simulated_start_s", s.start}});
    w.span("plan", "plan", kSteps, s.wall_start, s.wall_start + s.plan_seconds, json::object());
    w.counter("cache pages", s.wall_start, {{"used", s.pages}, {"free", r.pages - s.pages}});
    w.counter("tokens a step", s.wall_start, {{"prefill", s.prefill_tokens}, {"decode", s.decode_tokens}});
    while (at < r.spans.size() && r.spans[at].step == static_cast<int64_t>(i)) {
      const Span& first = r.spans[at];
      size_t end = at;
      while (end < r.spans.size() && r.spans[end].step == first.step && r.spans[end].layer == first.layer) ++end;
      const Track track = gpu ? kSampled : kSteps;
      w.span("layer " + std::to_string(first.layer), "layer", track, first.start,
             r.spans[end - 1].start + r.spans[end - 1].seconds, {{"layer", first.layer}});
      for (; at < end; ++at) {
        const Span& c = r.spans[at];
        w.span(std::string(c.op), "op", track, c.start, c.start + c.seconds,
               {{"layer", c.layer}, {"bytes", c.bytes}, {"flops", c.flops}});
      }
    }
  }
  out << "\n]}\n";
}

}  // namespace mla::serve
