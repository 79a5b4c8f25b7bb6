#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/run.hpp"
#include "cases/compare.hpp"
#include "cases/padded.hpp"
#include "cases/scratch.hpp"

namespace mla::cases {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Who shares a scale of e4m3 operands.
enum class Share : uint8_t { all, head, rows };

/// Scales of one operand: [groups, Head], of which a tensor's or a head's are one group. Groups of no item are NaN.
struct OperandScales {
  std::vector<float> x;
  Share share = Share::all;
  int64_t heads = 0;
  void fill(Random& random, Share of, int64_t groups, int64_t head_count, float typical, const auto& used) {
    share = of, heads = head_count;
    x.assign(static_cast<size_t>(groups * heads), poison());
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t h = 0; h < heads; ++h)
        if (used(g)) x[g * heads + h] = typical * (0.5f + static_cast<float>(random.uniform()));
  }
  View<const float, Group, Head> view() const {
    return {x.data(),
            {static_cast<int64_t>(x.size()) / std::max<int64_t>(heads, 1), heads},
            {share == Share::rows ? heads : 0, share == Share::all ? 0 : 1}};
  }
};

/// Keys and values as the layer makes them: [rows, Head, nope | value] and [rows, Rope]. Rows of no item are NaN. Of
/// e4m3, values may lie with the keys innermost.
struct Keys {
  Dtype dtype = Dtype::f32;
  int64_t rows = 0, heads = 0, nope = 0, rope = 0, value = 0;
  std::vector<std::byte> kv, k_pe;
  std::vector<ExpandedItem> items;
  // Of masked items: [tokens, words], rows `words` + 1 apart. Bits of no item's keys are set.
  std::vector<uint32_t> mask;
  int64_t words = 0;
  // Of e4m3 operands.
  OperandScales k_scale, v_scale;
  std::vector<ops::ScaleRows> scale_rows;  // one an item where scales are of rows
  std::vector<fp8_e4m3> turned;            // [Head, value, pitch]: the values of kv
  int64_t pitch = 0;
  bool codes() const { return dtype == Dtype::fp8_e4m3; }
  void turn(int64_t gap) {
    pitch = (rows + 15) / 16 * 16 + gap;
    turned.assign(static_cast<size_t>(heads * value * pitch), fp8_e4m3{0xff});
    const auto* from = reinterpret_cast<const fp8_e4m3*>(kv.data());
    for (int64_t j = 0; j < rows; ++j)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < value; ++d)
          turned[(h * value + d) * pitch + j] = from[(j * heads + h) * (nope + value) + nope + d];
  }

  /// NaN and infinities in some keys and values; the nope element huge_at of the items in `huge` meets huge queries.
  void plant(Random& random, int64_t huge_at, const std::vector<int32_t>& huge) {
    auto odd = [&](std::vector<std::byte>& x, int64_t row, int64_t width) {
      if (width > 0 && random.integer(0, 15) == 0)
        store_float(dtype, x.data(), row * width + random.integer(0, width - 1), odd_number(random, !codes()));
    };
    for (const ExpandedItem& i : items)
      for (int64_t j = i.k_begin; j < i.k_begin + i.k_count; ++j) {
        const bool meets = std::find(huge.begin(), huge.end(), i.q_begin) != huge.end();
        for (int64_t h = 0; meets && h < heads; ++h)
          store_float(dtype, kv.data(), (j * heads + h) * (nope + value) + huge_at,
                      random.integer(0, 1) == 0 ? kHugeKey : -kHugeKey);
        if (meets) continue;  // a product past f32 beside an infinity: the order would decide
        odd(kv, j, heads * (nope + value));
        odd(k_pe, j, rope);
      }
  }
  void fill(Random& random) {
    constexpr std::byte kPoison{0xff};
    kv.assign(static_cast<size_t>(rows * heads * (nope + value)) * size_of(dtype), kPoison);
    k_pe.assign(static_cast<size_t>(rows * rope) * size_of(dtype), kPoison);
    const float size = codes() ? 40.0f : 1.0f;  // of 448
    auto fill_row = [&](std::vector<std::byte>& x, int64_t row, int64_t width) {
      for (int64_t i = row * width; i < (row + 1) * width; ++i) store_float(dtype, x.data(), i, size * random.normal());
    };
    for (const ExpandedItem& i : items)
      for (int64_t j = i.k_begin; j < i.k_begin + i.k_count; ++j) {
        fill_row(kv, j, heads * (nope + value));
        fill_row(k_pe, j, rope);
      }
  }
  /// Masks most of the items. Of their keys a row sees topk or, with 0, none, all, a run or any number.
  void select(Random& random, int64_t tokens, int64_t topk) {
    int64_t columns = 0;
    for (ExpandedItem& i : items) {
      i.masked = random.integer(0, 4) > 0;
      i.mask_begin = static_cast<int32_t>(random.integer(0, 70));
      columns = std::max<int64_t>(columns, i.mask_begin + i.k_count);
    }
    words = (columns + 31) / 32 + random.integer(0, 1);
    mask.assign(static_cast<size_t>(tokens * (words + 1)), ~uint32_t{0});
    for (const ExpandedItem& i : items)
      for (int64_t t = i.q_begin; t < i.q_begin + i.q_count; ++t) {
        const double share = topk > 0
                                 ? static_cast<double>(topk) / i.k_count
                                 : std::initializer_list<double>{0, 1, 1, 0.03, 0.5, 0.9}.begin()[random.integer(0, 5)];
        const int64_t from = topk == 0 && random.integer(0, 2) == 0 ? random.integer(0, i.k_count) : 0;
        for (int64_t j = 0; j < i.k_count; ++j) {
          const int64_t c = i.mask_begin + j;
          if (j < from || random.uniform() >= share) mask[t * (words + 1) + c / 32] &= ~(uint32_t{1} << c % 32);
        }
      }
  }
  void describe(ops::AttendExpandedArgs& a) const {
    const int64_t width = nope + value;
    a.k_nope = {dtype, kv.data(), {rows, heads, nope}, {heads * width, width, 1}};
    a.v = {
        dtype, kv.data() + static_cast<size_t>(nope) * size_of(dtype), {rows, heads, value}, {heads * width, width, 1}};
    a.k_pe = {dtype, k_pe.data(), {rows, rope}};
    a.items = items;
    a.mask = {};
    if (!mask.empty()) a.mask = {mask.data(), {static_cast<int64_t>(mask.size()) / (words + 1), words}, {words + 1, 1}};
    if (!codes()) return;
    if (!turned.empty()) a.v = {dtype, turned.data(), {rows, heads, value}, {1, value * pitch, pitch}};
    a.scales.k = k_scale.view();
    a.scales.v = v_scale.view();
    a.scales.rows = scale_rows;
  }
};

/// The op with no thought for speed, in the precisions it may use: f32 sums; with bf16 keys, queries and probabilities
/// in bf16; with e4m3 operands their values and probabilities in bf16, or probabilities in e4m3, 2^7 at the largest.
template <bool e4m3_probabilities>
void plain(const ops::AttendExpandedArgs& a, View<float, Token, Head, Value> out, View<float, Token, Head> lse) {
  const int64_t nope = a.k_nope.extent<Nope>(), rope = a.k_pe.extent<Rope>(), width = a.v.extent<Value>();
  const bool codes = a.k_nope.dtype() == Dtype::fp8_e4m3;
  const auto narrow = [](float x) { return to_float(to_bf16(x)); };
  const auto rounded = [&](float x) {  // a query or, times its scale, a key or value
    return a.k_nope.dtype() == Dtype::bf16 || (codes && !e4m3_probabilities) ? narrow(x) : x;
  };
  const auto probability = [&](float x) {
    if (codes && e4m3_probabilities) return to_float(to_fp8_e4m3(x * 0x1p7f)) * 0x1p-7f;
    return codes || a.k_nope.dtype() == Dtype::bf16 ? narrow(x) : x;
  };
  const auto scale_of = [&](const View<const float, Group, Head>& x, int64_t first, int64_t row, int64_t h) {
    return x ? x(a.scales.rows.empty() ? 0 : first + row / ops::ExpandedScales::kRows, h) : 1.0f;
  };
  std::vector<float> p;
  for (size_t t = 0; t < a.items.size(); ++t) {
    const ExpandedItem& item = a.items[t];
    const ops::ScaleRows first = a.scales.rows.empty() ? ops::ScaleRows{} : a.scales.rows[t];
    for (int64_t i = 0; i < item.q_count; ++i)
      for (int64_t h = 0; h < a.q.extent<Head>(); ++h) {
        const int64_t row = item.q_begin + i, count = std::clamp<int64_t>(i + item.visible + 1, 0, item.k_count);
        const float q_scale = scale_of(a.scales.q, first.q, i, h);
        float m = -kInf, sum = 0;
        p.clear();
        for (int64_t j = 0; j < count; ++j) {
          const int64_t column = item.mask_begin + j;
          if (item.masked && !(a.mask(row, column / 32) >> column % 32 & 1)) {
            p.push_back(-kInf);
            continue;
          }
          const float k_scale = scale_of(a.scales.k, first.k, j, h);
          float s = 0;
          for (int64_t d = 0; d < nope; ++d)
            s += rounded(a.q(row, h, d) * q_scale) * rounded(a.k_nope(item.k_begin + j, h, d) * k_scale);
          for (int64_t d = 0; d < rope; ++d)
            s += rounded(a.q(row, h, nope + d) * q_scale) * rounded(a.k_pe(item.k_begin + j, d) * k_scale);
          p.push_back(s * a.scale);
          m = std::max(m, p.back());
        }
        const bool some = m > -kInf;
        for (float& e : p) sum += (e = some ? std::exp(e - m) : 0.0f);
        for (int64_t d = 0; d < width; ++d) {
          float x = 0;
          for (int64_t j = 0; j < count; ++j)
            if (p[j] > 0)  // not of a hidden key, whatever its value
              x += probability(p[j]) * rounded(a.v(item.k_begin + j, h, d) * scale_of(a.scales.v, first.k, j, h));
          out(row, h, d) = some ? x / sum : 0.0f;
        }
        lse(row, h) = some ? m + std::log(sum) : m;
      }
  }
}

// New tokens among themselves (causal, or all of them); with a context, its keys are then merged in by a second,
// accumulating call. Ragged: lengths vary, down to no queries, no keys and no context, and keys differ in number from
// queries (rows aligned at the end, so that some see nothing). A row of NaN follows every item. Masked: most items of
// either call, from any column on.
class AttendExpandedCase final : public Case {
 public:
  explicit AttendExpandedCase(const Params& p)
      : heads_(p.heads), value_(p.value), on_gpu_(p.device.kind != DeviceKind::cpu) {
    Random random(p.seed);
    auto length = [&](int64_t most) { return static_cast<int32_t>(p.ragged ? random.integer(0, most) : most); };
    int32_t tokens = 0;
    for (Keys* k : {&fresh_, &context_})
      *k = {.dtype = p.dtype, .heads = p.heads, .nope = p.nope, .rope = p.rope, .value = p.value};
    for (int64_t r = 0; r < p.requests; ++r) {
      const int32_t queries = length(p.query_len), keys = p.ragged ? length(p.query_len) : queries,
                    past = length(p.context);
      fresh_.items.push_back({.q_begin = tokens,
                              .q_count = queries,
                              .k_begin = static_cast<int32_t>(fresh_.rows),
                              .k_count = keys,
                              .visible = p.causal ? keys - queries : ExpandedItem::everything()});
      if (past > 0)
        context_.items.push_back({.q_begin = tokens,
                                  .q_count = queries,
                                  .k_begin = static_cast<int32_t>(context_.rows),
                                  .k_count = past,
                                  .visible = ExpandedItem::everything()});
      tokens += queries + 1;
      fresh_.rows += keys + 1;
      context_.rows += past + 1;
      for (Keys* k : {&fresh_, &context_})
        if (turned_values(p)) k->rows = (k->rows + 15) / 16 * 16;
    }
    fresh_.fill(random);
    context_.fill(random);
    const Dtype queries = p.dtype == Dtype::fp8_e4m3 ? p.dtype : p.activations;
    q_ = {queries, {tokens, heads_, p.nope + p.rope}, p.dtype == Dtype::fp8_e4m3 ? 16 : 3};
    out_ = {p.activations, {tokens, heads_, value_}};
    lse_ = {Dtype::f32, {tokens, heads_}};
    q_.fill_normal(random, p.dtype == Dtype::fp8_e4m3 ? 80.0f : 2.0f);
    Random selection(p.seed + 2);
    for (Keys* k : {&fresh_, &context_})
      if (p.masked && !k->items.empty()) k->select(selection, tokens, p.ragged ? 0 : p.topk);
    used_.assign(static_cast<size_t>(tokens), false);
    for (const ExpandedItem& i : fresh_.items) std::fill_n(used_.begin() + i.q_begin, i.q_count, true);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; !used_[t] && h < heads_; ++h)
        for (int64_t d = 0; d < p.nope + p.rope; ++d) store_float(queries, q_.any().at(t, h, d), 0, poison());
    if (p.nonfinite) plant(p);
    if (p.dtype == Dtype::fp8_e4m3) scale_codes(p, random);
    args_ = {.q = q_.any(),
             .scale = 1.0f / std::sqrt(static_cast<float>(p.nope + p.rope)),
             .out = out_.any(),
             .lse = lse_.view()};
    if (p.dtype == Dtype::fp8_e4m3) {
      args_.scales.q = q_scale_.view();
      args_.sums = p.seed % 5 == 0 ? ops::ExpandedSums::raw : ops::ExpandedSums::precise;
    }
    fresh_.describe(args_);
    context_args_ = args_;
    context_.describe(context_args_);
    context_args_.accumulate = true;
    per_worker_ = backend::backend(p.device).scratch_per_worker(
        {.heads = p.heads, .rope = p.rope, .nope = p.nope, .value = p.value});
    if (!p.nonfinite) return;
    Params clean = p;
    clean.nonfinite = false;
    clean_ = std::make_unique<AttendExpandedCase>(clean);
  }

  void run(Stream& stream) override {
    args_.scratch = context_args_.scratch = scratch_.get(stream, per_worker_);
    ops::run(stream, args_);
    if (!context_args_.items.empty()) ops::run(stream, context_args_);
    if (clean_) clean_->run(stream);
  }

  Verdict verify() override {
    const int64_t tokens = static_cast<int64_t>(used_.size());
    // Large cases are judged on evenly spaced rows of each item, the first and the last among them.
    const int64_t stride = 1 + static_cast<int64_t>(cost().flops * 0x1p-29);
    std::vector<bool> judged(used_.size(), false);
    const Rows fresh = rows_of(fresh_, stride), context = rows_of(context_, stride);
    for (const ExpandedItem& i : fresh.items) judged[i.q_begin] = true;
    std::vector<double> exact_out, exact_lse;
    std::vector<float> plain_out, plain_lse;
    judge<double>(&ops::reference, fresh, context, judged, exact_out, exact_lse);
    judge<float>(on_gpu_ ? plain<true> : plain<false>, fresh, context, judged, plain_out, plain_lse);
    std::vector<float> got_out, got_lse;
    bool intact = out_.intact() && lse_.intact();
    auto untouched = [](const void* x, size_t bytes) {
      const auto* at = static_cast<const std::byte*>(x);
      return std::all_of(at, at + bytes, [](std::byte b) { return b == std::byte{0xff}; });
    };
    const auto got = out_.any();
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < heads_; ++h) {
        const float& lse = lse_.view()(t, h);
        if (judged[t]) {
          for (int64_t d = 0; d < value_; ++d) got_out.push_back(load_float(got.dtype(), got.at(t, h, d), 0));
          got_lse.push_back(lse);
        } else if (!used_[t]) {
          intact = intact && untouched(&lse, sizeof lse) &&
                   untouched(got.at(t, h, 0), static_cast<size_t>(value_) * size_of(got.dtype()));
        }
      }
    // Keys that overflow with huge queries have large scores with others, and a rounding of a score moves its
    // probability by the score's magnitude times that.
    double magnitude = 1;
    for (double lse : exact_lse)
      if (clean_ && std::isfinite(lse)) magnitude = std::max(magnitude, std::abs(lse));
    const double unit = fresh_.dtype != Dtype::f32 ? 0x1p-9 : magnitude * 0x1p-24;
    const double out_unit = got.dtype() == Dtype::bf16 ? 0x1p-9 : unit;
    Verdict out = compare(got_out, exact_out, plain_out, out_unit), lse = compare(got_lse, exact_lse, plain_lse, unit);
    if (clean_) {
      std::vector<double> clean_exact, clean_exact_lse;
      clean_->judge<double>(&ops::reference, fresh, context, judged, clean_exact, clean_exact_lse);
      std::vector<float> clean_got, clean_lse;
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t h = 0; judged[t] && h < heads_; ++h) {
          for (int64_t d = 0; d < value_; ++d)
            clean_got.push_back(load_float(got.dtype(), clean_->out_.any().at(t, h, d), 0));
          clean_lse.push_back(clean_->lse_.view()(t, h));
        }
      out = unless_moved(out, value_, got_out, exact_out, clean_got, clean_exact);
      lse = unless_moved(lse, 1, got_lse, exact_lse, clean_lse, clean_exact_lse);
    }
    return unless_touched(out.ok ? lse : out, intact, "out or lse");
  }

  ops::Cost cost() const override {
    ops::Cost c = ops::cost(args_);
    if (!context_args_.items.empty()) c += ops::cost(context_args_);
    return c;
  }

 private:
  void plant(const Params& p) {
    Random plants(p.seed + 1);
    const int64_t huge_at = plants.integer(0, p.nope - 1);
    std::vector<int32_t> huge;
    for (const ExpandedItem& i : fresh_.items) {
      const bool meets = !fresh_.codes() && plants.integer(0, 3) == 0;
      if (meets) huge.push_back(i.q_begin);
      for (int64_t t = i.q_begin; t < i.q_begin + i.q_count; ++t)
        for (int64_t h = 0; h < heads_; ++h) {
          auto set = [&](int64_t d, float x) { store_float(q_.any().dtype(), q_.any().at(t, h, d), 0, x); };
          if (meets && plants.integer(0, 1) == 0) set(huge_at, kHugeQuery);
          else if (!meets && plants.integer(0, 15) == 0)
            set(plants.integer(0, p.nope + p.rope - 1), odd_number(plants, !fresh_.codes()));
        }
    }
    for (Keys* k : {&fresh_, &context_}) k->plant(plants, huge_at, huge);
  }

  static bool turned_values(const Params& p) { return p.dtype == Dtype::fp8_e4m3 && p.seed % 2 == 0; }

  /// Scales of every kind, and values turned in every second case.
  void scale_codes(const Params& p, Random& random) {
    const auto share = [&] { return static_cast<Share>(p.seed / 2 % 3); };
    const auto groups = [](int64_t rows) {
      return (rows + ops::ExpandedScales::kRows - 1) / ops::ExpandedScales::kRows;
    };
    const bool rows = share() == Share::rows;
    std::vector<bool> used_q;
    const auto take = [&](std::vector<bool>& used, int64_t count) {
      const auto first = static_cast<int32_t>(used.size());
      used.insert(used.end(), static_cast<size_t>(groups(count)), true);
      used.push_back(false);
      return first;
    };
    std::vector<int32_t> first_q;  // by fresh item
    for (const ExpandedItem& i : fresh_.items) first_q.push_back(take(used_q, i.q_count));
    const float typical = 1.0f / 40;
    if (!rows) used_q.assign(1, true);
    q_scale_.fill(random, share(), static_cast<int64_t>(used_q.size()), heads_, typical,
                  [&](int64_t g) { return used_q[g]; });
    for (Keys* k : {&fresh_, &context_}) {
      std::vector<bool> used_k;
      for (const ExpandedItem& i : k->items) {
        size_t of = 0;
        while (fresh_.items[of].q_begin != i.q_begin) ++of;
        if (rows) k->scale_rows.push_back({first_q[of], take(used_k, i.k_count)});
      }
      if (!rows) used_k.assign(1, true);
      if (used_k.empty()) used_k.assign(1, false);
      for (OperandScales* x : {&k->k_scale, &k->v_scale})
        x->fill(random, share(), static_cast<int64_t>(used_k.size()), heads_, typical,
                [&](int64_t g) { return used_k[g]; });
      if (turned_values(p)) k->turn(p.seed % 4 == 0 ? 0 : 16);
    }
  }

  /// Items of one row each, with their scales.
  struct Rows {
    std::vector<ExpandedItem> items;
    std::vector<ops::ScaleRows> scales;
  };
  /// Each stride-th query row of every item and its last, as items of their own.
  static Rows rows_of(const Keys& keys, int64_t stride) {
    Rows rows;
    for (size_t t = 0; t < keys.items.size(); ++t) {
      const ExpandedItem& item = keys.items[t];
      for (int32_t i = 0; i < item.q_count; ++i) {
        if (i % stride != 0 && i != item.q_count - 1) continue;
        rows.items.push_back({.q_begin = item.q_begin + i,
                              .q_count = 1,
                              .k_begin = item.k_begin,
                              .k_count = item.k_count,
                              .visible = item.visible + i,
                              .masked = item.masked,
                              .mask_begin = item.mask_begin});
        if (keys.scale_rows.empty()) continue;
        ops::ScaleRows scales = keys.scale_rows[t];
        scales.q += i / static_cast<int32_t>(ops::ExpandedScales::kRows);
        rows.scales.push_back(scales);
      }
    }
    return rows;
  }

  /// Both calls through `op`, joined; only the judged rows.
  template <class T>
  void judge(void (*op)(const ops::AttendExpandedArgs&, View<T, Token, Head, Value>, View<T, Token, Head>),
             const Rows& fresh, const Rows& context, const std::vector<bool>& judged, std::vector<T>& out,
             std::vector<T>& lse) const {
    const int64_t tokens = static_cast<int64_t>(judged.size());
    // The plain result lies in `out` after either call.
    auto stored = [&](T x) -> T {
      return std::is_same_v<T, float> && args_.out.dtype() == Dtype::bf16 ? to_float(to_bf16(static_cast<float>(x)))
                                                                          : x;
    };
    std::vector<T> o[2], l[2];
    for (int part : {0, 1}) {
      o[part].resize(static_cast<size_t>(tokens * heads_ * value_));
      l[part].assign(static_cast<size_t>(tokens * heads_), -std::numeric_limits<T>::infinity());
      ops::AttendExpandedArgs args = part ? context_args_ : args_;
      args.items = part ? context.items : fresh.items;
      args.scales.rows = part ? context.scales : fresh.scales;
      op(args, {o[part].data(), {tokens, heads_, value_}}, {l[part].data(), {tokens, heads_}});
    }
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = t * heads_; judged[t] && i < (t + 1) * heads_; ++i) {
        const T m = std::max(l[0][i], l[1][i]);
        if (std::isnan(l[0][i]) || std::isnan(l[1][i])) {  // either part's NaN is the row's
          const T nan = std::numeric_limits<T>::quiet_NaN();
          lse.push_back(nan);
          out.insert(out.end(), value_, nan);
          continue;
        }
        const bool empty = m == -std::numeric_limits<T>::infinity();
        const T a = empty ? 0 : std::exp(l[0][i] - m), b = empty ? 0 : std::exp(l[1][i] - m), sum = empty ? 1 : a + b;
        lse.push_back(m + std::log(sum));
        for (int64_t d = 0; d < value_; ++d)
          out.push_back(stored((a * stored(o[0][i * value_ + d]) + b * o[1][i * value_ + d]) / sum));
      }
  }

  int64_t heads_, value_;
  Keys fresh_, context_;
  Padded<Token, Head, QueryKey> q_;
  Padded<Token, Head, Value> out_;
  Padded<Token, Head> lse_;
  std::vector<bool> used_;  // rows of some item
  OperandScales q_scale_;   // of e4m3 operands
  bool on_gpu_ = false;
  ops::AttendExpandedArgs args_, context_args_;
  size_t per_worker_ = 0;
  CaseScratch scratch_;
  std::unique_ptr<AttendExpandedCase> clean_;  // the same without what is planted
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  struct Dims {
    int64_t nope, rope, value;
  };
  for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3}) {
    auto add = [&](Dims d, Params p) {
      p.nope = d.nope, p.rope = d.rope, p.value = d.value, p.dtype = dtype, p.seed = ++seed;
      cases.push_back(p);
    };
    // Dimensions: the tuned ones, the golden ones, no rope, odd ones.
    for (Dims d :
         {Dims{128, 64, 128}, Dims{192, 64, 256}, Dims{24, 8, 20}, Dims{40, 0, 33}, Dims{5, 2, 7}, Dims{1, 0, 1}})
      for (bool causal : {true, false})
        add(d, {.requests = 4, .query_len = 40, .context = 30, .ragged = true, .heads = 3, .causal = causal});
    // Lengths around register tiles, row tiles and key blocks.
    for (int64_t n : {1, 15, 16, 17, 32, 33, 95, 96, 97, 130})
      for (bool causal : {true, false})
        add({16, 8, 12}, {.requests = 2, .query_len = n, .context = n / 2, .heads = 2, .causal = causal});
    add({16, 8, 12}, {.requests = 1, .query_len = 600, .context = 0, .heads = 1});
    add({16, 8, 12}, {.requests = 3, .query_len = 1, .context = 400, .heads = 2});
    add({16, 8, 12}, {.requests = 0, .heads = 2});
    Random random(seed);
    // After the other parameters, whatever a compiler evaluates first.
    auto draw = [&](Dims most, Params p) {
      const int64_t nope = random.integer(1, most.nope), rope = random.integer(0, most.rope);
      add({nope, rope, random.integer(1, most.value)}, p);
    };
    for (int i = 0; i < 10; ++i)
      draw({70, 40, 70}, {.requests = random.integer(1, 8),
                          .query_len = random.integer(1, 60),
                          .context = random.integer(0, 150),
                          .ragged = random.integer(0, 3) > 0,
                          .heads = random.integer(1, 4),
                          .causal = random.integer(0, 2) > 0});
    // Batches of any shape: lengths from none to several groups of tiles.
    for (int i = 0; i < 100; ++i)
      draw({8, 4, 8}, {.requests = random.integer(0, 6),
                       .query_len = random.integer(0, 7) == 0 ? random.integer(200, 600) : random.integer(1, 60),
                       .context = random.integer(0, 2) == 0 ? random.integer(1, 110) : 0,
                       .ragged = random.integer(0, 5) > 0,
                       .heads = random.integer(1, 3),
                       .causal = random.integer(0, 2) > 0});
    // NaN and infinities, in tiles whose rows see different keys and in blocks that all of them see.
    for (int i = 0; i < 40; ++i)
      draw({20, 8, 40}, {.requests = 3,
                         .query_len = i % 3 == 0 ? random.integer(60, 130) : random.integer(1, 30),
                         .context = i % 2 == 0 ? random.integer(1, 110) : 0,
                         .ragged = i % 4 > 0,
                         .heads = random.integer(1, 3),
                         .causal = i % 5 > 0,
                         .nonfinite = true});
    // Masks: fewer keys than there are, then any number of them; the same with NaN and infinities.
    for (int64_t n : {1, 31, 33, 97, 130})
      for (bool causal : {true, false})
        add({16, 8, 12}, {.requests = 2,
                          .query_len = n,
                          .context = 2 * n,
                          .heads = 2,
                          .causal = causal,
                          .topk = (n + 1) / 2,
                          .masked = true});
    for (int i = 0; i < 60; ++i)
      draw({20, 8, 40}, {.requests = random.integer(1, 4),
                         .query_len = i % 10 == 0 ? random.integer(200, 600) : random.integer(1, 90),
                         .context = i % 2 == 0 ? random.integer(1, 300) : 0,
                         .ragged = true,
                         .heads = random.integer(1, 3),
                         .causal = i % 3 > 0,
                         .masked = true,
                         .nonfinite = i % 3 == 0});
  }
  return cases;
}

}  // namespace

const CaseType attend_expanded{
    "attend_expanded", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<AttendExpandedCase>(p); },
    sweep};

}  // namespace mla::cases
