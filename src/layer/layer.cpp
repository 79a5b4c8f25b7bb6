// Runs a plan's steps. No policy: what runs, over which rows and in which order was decided when the plan was made.
#include "mla/layer.hpp"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/clear.hpp"
#include "core/even_ranges.hpp"
#include "layer/bind.hpp"
#include "layer/call.hpp"
#include "layer/check.hpp"
#include "layer/kernels.hpp"
#include "layer/selection.hpp"
#include "mla/communicator.hpp"
#include "mla/error.hpp"
#include "ops/require.hpp"

namespace mla {
namespace layer {
namespace {

void write_zeros(Stream& stream, const AnyMutableView<Token, Head, In>& y) {
  ops::require_dense<In>("layer", "out", y);
  const int64_t tokens = y.extent<Token>(), heads = y.extent<Head>(), width = y.extent<In>();
  if (tokens == 0 || heads == 0 || width == 0) return;
  const int64_t apart = y.stride<Token>(), run = y.stride<Head>() == width ? heads * width : width;
  if (tokens > 1 && apart < run)
    throw ShapeError("layer: out Token has stride " + std::to_string(apart) + ", a row takes " + std::to_string(run));
  const auto bytes = [&](int64_t elements) { return static_cast<size_t>(elements) * size_of(y.dtype()); };
  for (int64_t h = 0; h < heads; h += run / width)
    clear(stream, y.at(0, h, 0), bytes(run), tokens, bytes(std::max(apart, run)));
}

// A call of one of the forms: its memory named, its steps run, or noted by a survey.
class Walk {
 public:
  Walk(Stream& stream, const LayerContext& context) : stream_(&stream), c_(context), bind_(context) {
    check(context, stream.device(), stream.workers());
    if (c_.staged && !c_.staged->serves(stream, plan_, c_.batch))
      throw ShapeError(
          "layer: staged is of another plan, batch or stream: stage this one on this stream (StagedStep::stage)");
  }
  Walk(Survey& survey, const LayerContext& context) : survey_(&survey), c_(context), bind_(context) {
    check(context, context.plan.device.device, context.plan.device.threads);
  }

  void forward(AnyView<Token, Hidden> hidden, AnyMutableView<Token, Hidden> out) {
    check_block(c_, hidden, out);
    if (stream_) check_tables(c_, stream_->device()), check_ranks(c_, true);
    if (stream_ && !c_.weights.indexer) require_chosen(*stream_, c_);
    bind_.read(Memory::hidden, hidden);
    bind_.write(Memory::hidden_out, out);
    // Fully absorbed weights have no heads.
    if (!plan_.options.absorbed) {
      bind_rows();
      bind_.write(Memory::heads, heads());
    }
    run(c_.weights.indexer ? kForward | kIndexer : kForward);
  }

  void attend(AnyView<Token, Head, QueryKey> q, AnyView<Token, Latent> kv_c, AnyView<Token, Rope> k_pe,
              AnyMutableView<Token, Head, Value> out) {
    check_attention(c_, q, kv_c, k_pe, out);
    if (stream_) check_ranks(c_, false);
    if (stream_) require_chosen(*stream_, c_);
    bind_inputs(q, kv_c, k_pe);
    // f32 is never a rounded f32: not by what else is in the batch, and a quantised output has the same heads.
    const bool direct = out.dtype() == Dtype::f32 || out.dtype() == plan_.head_dtype();
    bind_.write(Memory::heads, direct ? out : heads());
    bind_.write(Memory::heads_out, out);
    run(direct ? kAttend : kAttend | kNarrowed);
  }

  void attend(AnyView<Token, Head, QueryKey> q, AnyView<Token, Latent> kv_c, AnyView<Token, Rope> k_pe,
              const QuantizedView& out) {
    check_attention(c_, q, kv_c, k_pe, out);
    if (stream_) check_ranks(c_, false);
    if (stream_) require_chosen(*stream_, c_);
    bind_inputs(q, kv_c, k_pe);
    bind_.write(Memory::heads, heads());
    bind_.write(out);
    run(kAttend);
  }

  void select(View<const int32_t, Token, Topk> positions) {
    check_choice(c_, positions);
    bind_.read(Memory::positions, positions);
    run(kSelect);
  }

 private:
  // Queries and the step's latent rows in the workspace.
  void bind_rows() {
    const ModelConfig& m = plan_.model;
    const int64_t t = plan_.tokens;
    const AnyMutableView<Token, Entry> kv(act_, bind_.region("kv"), {t, m.entry()});
    bind_.write(Memory::q,
                AnyMutableView<Token, Head, QueryKey>(act_, bind_.region("query"), {t, m.heads, m.query_key()}));
    bind_.write(Memory::kv_c, AnyMutableView<Token, Latent>(act_, kv.data(), {t, m.latent}, kv.strides()));
    bind_.write(Memory::k_pe, AnyMutableView<Token, Rope>(act_, kv.at(0, m.latent), {t, m.rope}, kv.strides()));
  }
  void bind_inputs(const AnyView<Token, Head, QueryKey>& q, const AnyView<Token, Latent>& kv_c,
                   const AnyView<Token, Rope>& k_pe) {
    const bool cast = plan_.casts_inputs();
    bind_.read(cast ? Memory::given_q : Memory::q, q);
    bind_.read(cast ? Memory::given_kv_c : Memory::kv_c, kv_c);
    bind_.read(cast ? Memory::given_k_pe : Memory::k_pe, k_pe);
    if (cast) bind_rows();
  }
  AnyMutableView<Token, Head, Value> heads() const {
    return {plan_.head_dtype(), bind_.region("heads"), {plan_.head_rows, plan_.model.heads, plan_.model.value}};
  }

  void run(Calls calls) {
    const Rejoined rejoined(*this);
    for (const Step& step : plan_.steps) {
      if (!step.calls.any_of(calls)) continue;
      bind_.use_lane(step.lane);
      // Under a profile steps follow one another, each with the device to itself.
      lane_ = stream_ && !c_.profile ? step.lane : int8_t{0};
      std::visit([&](const auto& work) { run(step.name, work); }, step.work);
    }
  }
  // A call that fails leaves nothing running beside what its stream does next.
  struct Rejoined {
    explicit Rejoined(Walk& w) : walk(w) {}
    ~Rejoined() {
      try {
        walk.lane_ = 0;
        for (int8_t lane = 1; lane < kLanes; ++lane)
          if (walk.runs_[lane]) walk.run("", steps::Wait{lane});
      } catch (const DeviceError&) {  // a device that fails says so at the next call
      }
    }
    Walk& walk;
  };
  void run(std::string_view, steps::Wait wait) {
    if (!stream_ || c_.profile) return;
    gpu::wait(stream(lane_).queue(), stream(wait.on).queue());
    runs_[lane_] = true, runs_[wait.on] = false;
  }
  Stream& stream(int lane) {
    if (lane == 0) return *stream_;
    std::optional<Stream>& s = lanes_[lane - 1];
    if (!s) s = stream_->lane(lane);
    return *s;
  }
  template <class Work>
  void run(std::string_view name, const Work& work) {
    if (survey_) survey_->note(name, bind_(work));
    else call(stream(lane_), c_.profile, name, bind_(work));
  }
  void run(std::string_view name, const steps::Project& s) {
    ops::ProjectArgs a = bind_(s);
    if (s.divided) {
      const std::vector<int64_t> at = even_ranges(s.rows, plan_.options.tensor_parallel);
      const int64_t begin = at[rank()], count = at[rank() + 1] - begin;
      a.x = a.x.slice<Token>(begin, count), a.y = a.y.slice<Token>(begin, count), a.rows = count;
    }
    if (survey_) survey_->note(name, a);
    else call(stream(lane_), c_.profile, name, a);
  }
  size_t rank() const { return survey_ ? 0 : static_cast<size_t>(c_.ranks->rank()); }
  // One of the ranks' calls, of which this rank sends so much.
  template <class Call>
  void collective(std::string_view name, int ranks, const ops::Cost& cost, Call&& call) {
    if (survey_) return survey_->note_collective(name, ranks, cost);
    timed(*stream_, c_.profile, name, cost,
          [&] { call(Collective{.step = name, .deadline = c_.deadline, .plan = plan_.digest}); });
  }
  void run(std::string_view name, const steps::AllReduce& sum) {
    const AnyMutableView<Token, In> x = bind_(sum);
    const double elements = static_cast<double>(x.size());
    const int ranks = plan_.options.tensor_parallel;
    collective(
        name, ranks, {elements * static_cast<double>(size_of(x.dtype())), elements * (ranks - 1)},
        [&](const Collective& call) { c_.ranks->all_reduce(*stream_, call, x.dtype(), x.data(), x.data(), x.size()); });
  }
  void run(std::string_view name, const steps::ReduceScatter& sum) {
    const AnyMutableView<Token, In> x = bind_(sum);
    const int ranks = plan_.options.tensor_parallel;
    const int64_t width = x.extent<In>(), rows = x.extent<Token>(), own = plan_.own_rows().count * width,
                  element = static_cast<int64_t>(size_of(x.dtype()));
    const std::vector<int64_t> at = even_ranges(rows, ranks);
    std::vector<int64_t> counts;
    for (size_t r = 0; r + 1 < at.size(); ++r) counts.push_back((at[r + 1] - at[r]) * width);
    collective(name, ranks, {static_cast<double>((x.size() - own) * element), static_cast<double>(own) * (ranks - 1)},
               [&](const Collective& call) {
                 std::byte* const to = static_cast<std::byte*>(x.data()) + plan_.own_rows().begin * width * element;
                 c_.ranks->reduce_scatter(*stream_, call, x.dtype(), x.data(), to, counts);
               });
  }
  void run(std::string_view name, const steps::AllGather& s) {
    const AnyMutableView<Token, Head, Out> y = bind_(s);
    const int ranks = plan_.options.tensor_parallel;
    const int64_t row = y.stride<Token>() * static_cast<int64_t>(size_of(y.dtype()));
    const std::vector<int64_t> at = even_ranges(y.extent<Token>(), ranks);
    std::vector<int64_t> bytes;
    for (size_t r = 0; r + 1 < at.size(); ++r) bytes.push_back((at[r + 1] - at[r]) * row);
    auto* all = static_cast<std::byte*>(y.data());
    collective(name, ranks, {static_cast<double>(bytes[rank()] * (ranks - 1)), 0}, [&](const Collective& call) {
      c_.ranks->all_gather(*stream_, call, all + at[rank()] * row, all, bytes);
    });
  }
  // Heads of a row by member of the group that shares a cache. The most of any rank's, for all groups must know alike
  // how large messages get.
  struct HeadParts {
    std::vector<int64_t> begin;
    std::span<const int64_t> count;
    int64_t most = 0;
  };
  HeadParts head_parts() const {
    const ContextParallel& c = plan_.options.context_parallel;
    HeadParts p{{}, c.group_heads(), *std::max_element(c.heads.begin(), c.heads.end())};
    int64_t at = 0;
    for (const int64_t n : p.count) p.begin.push_back(std::exchange(at, at + n));
    return p;
  }
  // A round of all ranks in which groups exchange each by itself: to the ranks of other groups nothing is sent. So a
  // fault ends them all at once and names its rank, and every transport and link serves it.
  class GroupMessages {
   public:
    explicit GroupMessages(const PlanOptions& o)
        : ranks_(static_cast<size_t>(o.tensor_parallel)), first_(static_cast<size_t>(o.context_parallel.first())) {}
    /// A part's places for each member; its messages are [0, members).
    void add_part() {
      send.resize(send.size() + ranks_);
      receive.resize(receive.size() + ranks_);
    }
    SendRows& to(size_t member) { return send[send.size() - ranks_ + first_ + member]; }
    ReceiveRows& from(size_t member) { return receive[receive.size() - ranks_ + first_ + member]; }
    std::vector<SendRows> send;
    std::vector<ReceiveRows> receive;

   private:
    size_t ranks_, first_;
  };
  void exchange(std::string_view name, double sent, int64_t most, const GroupMessages& m) {
    collective(name, static_cast<int>(plan_.options.context_parallel.sharding.ranks()), {sent, 0},
               [&](Collective call) {
                 call.most_bytes = most;
                 c_.ranks->exchange(*stream_, call, m.send, m.receive);
               });
  }
  // Queries as they lie: rows whose heads lie side by side, or all heads at one distance.
  static SendRows rows_of(const AnyView<Token, Head, Entry>& x) {
    ops::require_dense<Entry>("layer", "q", x);
    const int64_t element = static_cast<int64_t>(size_of(x.dtype())), rows = x.extent<Token>(), n = x.extent<Head>(),
                  width = x.extent<Entry>(), row = x.stride<Token>(), head = x.stride<Head>();
    if (n == 1 || head == width) return {x.data(), rows, n * width * element, row * element};
    if (rows == 1 || row == n * head) return {x.data(), rows * n, width * element, head * element};
    throw ShapeError("layer: q Head has stride " + std::to_string(head) + " and Token " + std::to_string(row) +
                     ": ranks that exchange heads send rows whose heads lie side by side (stride " +
                     std::to_string(width) + ") or all at one distance");
  }
  void run(std::string_view name, const steps::GatherQueries& s) {
    const HeadParts p = head_parts();
    const AnyView<Token, Head, Entry> x = bind_(s);
    const SendRows queries = rows_of(x);
    const int64_t rows = x.extent<Token>(), all = s.y.extent<Head>(), own = x.extent<Head>(),
                  head = x.extent<Entry>() * static_cast<int64_t>(size_of(x.dtype()));
    GroupMessages m(plan_.options);
    m.add_part();
    for (size_t r = 0; r < p.count.size(); ++r) {
      m.to(r) = queries;
      m.from(r) = {bind_.in_workspace(s.y) + p.begin[r] * head, rows, p.count[r] * head, all * head};
    }
    exchange(name, static_cast<double>(rows * own * head * (std::ssize(p.count) - 1)), rows * p.most * head, m);
  }
  void run(std::string_view name, const steps::ExchangeFound& s) {
    const HeadParts p = head_parts();
    const int64_t rows = s.found.extent<Token>(), all = s.found.extent<Head>(), own = s.got.extent<Head>();
    GroupMessages m(plan_.options);
    const auto part = [&](const auto& found, const auto& got, int64_t width) {
      const int64_t head = width * int64_t{sizeof(float)};
      m.add_part();
      for (size_t r = 0; r < p.count.size(); ++r) {
        m.to(r) = {bind_.in_workspace(found) + p.begin[r] * head, rows, p.count[r] * head, all * head};
        m.from(r) = {bind_.in_workspace(got) + static_cast<int64_t>(r) * rows * own * head, 1, rows * own * head, 0};
      }
      return head;
    };
    const int64_t head = part(s.found, s.got, s.found.extent<Value>()) + part(s.found_lse, s.got_lse, 1);
    exchange(name, static_cast<double>(rows * (all - own) * head), rows * p.most * head, m);
  }
  void run(std::string_view name, const steps::GatherRows& s) {
    const std::vector<int64_t>& held = plan_.chunks[static_cast<size_t>(s.chunk)].held_rows;
    const auto member = static_cast<size_t>(plan_.options.context_parallel.member());
    const int64_t row = s.rows.extent<Entry>();
    GroupMessages m(plan_.options);
    m.add_part();
    std::byte* at = bind_.in_workspace(s.rows);
    for (size_t r = 0; r < held.size(); at += held[r++] * row) {
      m.from(r) = {at, 1, held[r] * row, 0};
      if (r != member) continue;
      for (size_t other = 0; other < held.size(); ++other) m.to(other) = {at, 1, held[r] * row, 0};
    }
    exchange(name, static_cast<double>(held[member] * row * (std::ssize(held) - 1)),
             *std::max_element(held.begin(), held.end()) * row, m);
  }
  void run(std::string_view name, const steps::GatherCandidates& s) {
    const int64_t members = plan_.options.context_parallel.sharding.ranks(), rows = s.positions.extent<Token>(),
                  element = static_cast<int64_t>(size_of(s.scores.dtype)),
                  row = s.all_positions.extent<Key>() * element, sent = row / members,
                  own = s.positions.extent<Topk>() * element;
    GroupMessages m(plan_.options);
    const auto part = [&](const auto& from, const auto& to) {
      m.add_part();
      for (int64_t r = 0; r < members; ++r) {
        m.to(static_cast<size_t>(r)) = {bind_.in_workspace(from), rows, sent, own};
        m.from(static_cast<size_t>(r)) = {bind_.in_workspace(to) + r * sent, rows, sent, row};
      }
    };
    part(s.positions, s.all_positions);
    part(s.scores, s.all_scores);
    exchange(name, static_cast<double>(2 * rows * sent * (members - 1)), 2 * rows * sent, m);
  }
  void run(std::string_view, const steps::Zero& zero) {
    if (stream_) write_zeros(*stream_, bind_(zero));
  }
  void run(std::string_view, const steps::ScheduleLatent&) {}  // of no call
  void run(std::string_view, steps::BeginChoice) {
    if (stream_) begin_choice(*stream_, c_);
  }
  void run(std::string_view, steps::EndChoice) {
    if (stream_) end_choice(*stream_, c_);
  }

  Stream* stream_ = nullptr;  // of a walk that runs; else
  Survey* survey_ = nullptr;
  std::optional<Stream> lanes_[kLanes - 1];
  int8_t lane_ = 0;
  bool runs_[kLanes] = {};  // does a lane do what nobody waits for?
  const LayerContext& c_;
  const Plan& plan_ = c_.plan;
  const Dtype act_ = plan_.activations();
  Binder bind_;
};

}  // namespace

size_t survey_bytes(const Plan& p) {
  const int64_t widest = std::max({p.model.hidden, p.model.heads * p.model.query_key(), p.model.heads * p.model.value});
  return static_cast<size_t>(p.tokens) * static_cast<size_t>(widest) * sizeof(float);
}

void survey(Survey& survey, const LayerContext& context, std::byte* rows) {
  const Plan& p = context.plan;
  const ModelConfig& m = p.model;
  const int64_t t = p.tokens;
  Walk walk(survey, context);
  const Dtype dtype = p.inputs();
  if (p.serves_block()) return walk.forward({dtype, rows, {t, m.hidden}}, {dtype, rows, {t, m.hidden}});
  const AnyView<Token, Head, QueryKey> q(dtype, rows, {t, m.heads, m.query_key()});
  const AnyView<Token, Latent> kv_c(dtype, rows, {t, m.latent});
  const AnyView<Token, Rope> k_pe(dtype, rows, {t, m.rope});
  if (p.options.output.kind == OutputKind::none)
    return walk.attend(q, kv_c, k_pe, AnyMutableView<Token, Head, Value>(p.head_dtype(), rows, {t, m.heads, m.value}));
  const int64_t width = m.heads * m.value;
  const QuantizedView out{.spec = p.options.output,
                          .tokens = t,
                          .width = width,
                          .data = rows,
                          .row_stride = p.options.output.row_bytes(width),
                          .scales = rows};
  walk.attend(q, kv_c, k_pe, out);
}

}  // namespace layer

using layer::Walk;

void forward(Stream& stream, const LayerContext& context, AnyView<Token, Hidden> hidden,
             AnyMutableView<Token, Hidden> out) {
  Walk(stream, context).forward(hidden, out);
}

void attend(Stream& stream, const LayerContext& context, AnyView<Token, Head, QueryKey> q, AnyView<Token, Latent> kv_c,
            AnyView<Token, Rope> k_pe, AnyMutableView<Token, Head, Value> out) {
  Walk(stream, context).attend(q, kv_c, k_pe, out);
}

void attend(Stream& stream, const LayerContext& context, AnyView<Token, Head, QueryKey> q, AnyView<Token, Latent> kv_c,
            AnyView<Token, Rope> k_pe, const QuantizedView& out) {
  Walk(stream, context).attend(q, kv_c, k_pe, out);
}

void select(Stream& stream, const LayerContext& context, View<const int32_t, Token, Topk> positions) {
  Walk(stream, context).select(positions);
}

}  // namespace mla
