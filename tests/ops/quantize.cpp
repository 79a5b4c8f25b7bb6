// Quantised outputs, bit for bit against a plain computation in two steps: the op itself on every instruction set, and
// the two ops that quantise the heads they finish.
#include <gtest/gtest.h>

#include <bit>
#include <cfloat>

#include "backend/backend.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/run.hpp"
#include "cases/case.hpp"
#include "cases/compare.hpp"
#include "core/quantised_weights.hpp"
#include "support/quantised.hpp"

namespace mla {
namespace {

using test::QuantisedMemory;

using cases::random_values;

OutputSpec with_scales(OutputSpec spec) {
  spec.scale = 0.0123f;
  spec.global_scale = 448.0f * 6.0f / 4.5f;
  return spec;
}

void expect_same(const QuantisedMemory& got, const QuantisedMemory& right, const std::string& what) {
  EXPECT_TRUE(got.codes == right.codes) << what << ": codes";
  EXPECT_TRUE(got.scales == right.scales) << what << ": scales";
}

class Quantize : public testing::Test {
 protected:
  void expect_two_steps(const OutputSpec& spec, std::span<const float> x, int64_t rows, int64_t tokens,
                        const std::string& what) {
    const int64_t width = rows > 0 ? static_cast<int64_t>(x.size()) / rows : 40;
    QuantisedMemory got(spec, tokens, width), right(spec, tokens, width);
    const ops::QuantizeArgs args{.x = View<const float, Token, HeadValue>(x.data(), {rows, width}), .y = got.view()};
    test::two_step(x, rows, right.view());
    ops::run(stream_, args);
    expect_same(got, right, what);
    QuantisedMemory reference(spec, tokens, width);
    ops::reference(args, reference.view());
    expect_same(reference, right, what + ", reference");
  }
  ThreadPool pool_{3};
  Stream stream_{pool_};
};

TEST_F(Quantize, EqualsTwoPlainSteps) {
  cases::Random random(11);
  for (const OutputSpec& named : output_specs()) {
    if (named.kind == OutputKind::none) continue;
    const OutputSpec spec = with_scales(named);
    for (int i = 0; i < 30; ++i) {
      const int64_t rows = random.integer(0, 3) ? random.integer(0, 9) : random.integer(120, 140),
                    width = random.integer(0, 1) ? random.integer(1, 20) * 64 : random.integer(1, 700);
      const float stddev = static_cast<float>(std::exp(random.normal() * 4));
      expect_two_steps(spec, random_values(rows * width, random.next(), stddev), rows, rows + random.integer(0, 5),
                       to_string(spec) + " of " + std::to_string(rows) + " x " + std::to_string(width));
    }
  }
}

TEST_F(Quantize, EdgesOfAGroup) {
  constexpr float kInf = INFINITY;
  const std::vector<std::pair<const char*, std::vector<float>>> groups{
      {"zeros", {0.0f, -0.0f, 0.0f}},
      {"all NaN", {NAN, -NAN}},
      {"NaN beside numbers", {NAN, 1.0f, -2.0f, -NAN, 0.3f}},
      {"infinities", {kInf, -kInf, 1.0f, FLT_MAX, 1e36f}},
      {"largest", {FLT_MAX, -FLT_MAX, 1e38f}},
      {"subnormal", {1e-45f, -3e-42f, 0.0f}},
      {"below 1e-10", {1e-11f, -9e-11f, 3e-13f}},
      {"around 1e-10", {1e-10f, 1.0000001e-10f, -5e-11f}},
      {"448 times a power of two", {448.0f, 1.0f, -224.0f, 0.875f}},
      {"just above", {448.00003f, 1.0f}},
      {"just below", {447.99997f, 1.0f}}};
  for (const OutputSpec& named : output_specs()) {
    if (named.kind == OutputKind::none) continue;
    for (const auto& [what, values] : groups) {
      std::vector<float> x(3 * 256);
      for (size_t i = 0; i < x.size(); ++i) x[i] = values[i % values.size()];
      for (float global_scale : {597.3f, 1e-30f, 1e30f}) {
        OutputSpec spec = with_scales(named);
        spec.global_scale = global_scale;
        expect_two_steps(spec, x, 3, 3, to_string(spec) + " of " + what);
      }
    }
  }
}

// What the header says of edges, in numbers.
TEST_F(Quantize, EdgesByHand) {
  const OutputSpec spec{.kind = OutputKind::fp8_groups};
  std::vector<float> x(128);
  QuantisedMemory memory(spec, 1, 128);
  const ops::QuantizeArgs args{.x = View<const float, Token, HeadValue>(x.data(), {1, 128}), .y = memory.view()};
  auto code = [&](int64_t i) { return static_cast<int>(memory.codes[i]); };
  auto scale = [&] {
    float s;
    std::memcpy(&s, memory.scales.data(), 4);
    return s;
  };
  ops::run(stream_, args);
  EXPECT_EQ(scale(), 1e-10f / 448.0f);
  EXPECT_EQ(code(5), 0);
  x[5] = NAN, x[6] = 1.0f, x[7] = -0.5f;
  ops::run(stream_, args);
  EXPECT_EQ(scale(), 1.0f / 448.0f);
  EXPECT_EQ(code(5), 0x7f);
  EXPECT_EQ(code(6), 0x7e);
  EXPECT_EQ(code(7), 0x80 | 0x76);  // -224
  x[8] = -INFINITY;
  ops::run(stream_, args);
  EXPECT_EQ(scale(), FLT_MAX / 448.0f);
  EXPECT_EQ(code(6), 0);
  EXPECT_EQ(code(8), 0xfe);
}

TEST_F(Quantize, Mxfp4ByHand) {
  std::vector<float> x(64);
  QuantisedMemory memory({.kind = OutputKind::mxfp4}, 1, 64);
  const auto run = [&](std::initializer_list<float> first) {
    std::fill(x.begin(), x.end(), 0.0f);
    std::copy(first.begin(), first.end(), x.begin());
    ops::run(stream_,
             ops::QuantizeArgs{.x = View<const float, Token, HeadValue>(x.data(), {1, 64}), .y = memory.view()});
  };
  auto byte = [&](int64_t i) { return static_cast<int>(memory.codes[i]); };
  auto scale = [&](int64_t group) { return static_cast<int>(memory.scales[group]); };
  run({1.0f, -0.5f, 7.99f, 3.0f, 0.25f, -0.25f, 5.0f, 2.5f});  // 4 <= amax < 8: scale 1
  EXPECT_EQ(scale(0), 127);
  EXPECT_EQ(byte(0), 0x92);  // the first element in the low nibble: 1, -0.5
  EXPECT_EQ(byte(1), 0x57);  // 7.99 saturates at 6; 3
  EXPECT_EQ(byte(2), 0x80);  // ties go to the even code: 0.25 to 0, -0.25 to -0
  EXPECT_EQ(byte(3), 0x46);  // 5 to 4, 2.5 to 2
  EXPECT_EQ(scale(1), 0);    // zeros: 2^-127
  EXPECT_EQ(byte(16), 0);
  EXPECT_EQ(scale(2), 0);  // padding
  run({8.0f, 12.0f, -15.0f});
  EXPECT_EQ(scale(0), 128);
  EXPECT_EQ(byte(0), 0x76);
  EXPECT_EQ(byte(1), 0x0f);
  run({FLT_MAX, 0x1p127f});
  EXPECT_EQ(scale(0), 252);  // 2^125
  EXPECT_EQ(byte(0), 0x67);
  run({0x1p-125f, 0x1p-126f, -0x1p-127f, 0x1p-128f, 0x1p-129f});  // 4, 2, 1, 0.5 and 0.25 of the least scale
  EXPECT_EQ(scale(0), 0);
  EXPECT_EQ(byte(0), 0x46);
  EXPECT_EQ(byte(1), 0x1a);
  EXPECT_EQ(byte(2), 0);
  run({0x1p-124f});
  EXPECT_EQ(scale(0), 1);
  for (float odd : {NAN, -INFINITY}) {
    run({1.0f, odd, 3.0f});
    EXPECT_EQ(scale(0), 255) << odd;
    EXPECT_EQ(byte(0), 0) << odd;
    EXPECT_EQ(byte(1), 0) << odd;
    EXPECT_EQ(scale(1), 0) << odd;
  }
}

TEST_F(Quantize, Bf16RowsAndFarApart) {
  for (const OutputSpec& named : output_specs()) {
    if (named.kind == OutputKind::none) continue;
    const OutputSpec spec = with_scales(named);
    const int64_t rows = 5, width = 2100, stride = width + 9;
    std::vector<bf16> stored(rows * stride, bf16{0xffff});
    std::vector<float> x = random_values(rows * width, 3);
    for (int64_t i = 0; i < rows * width; ++i) {
      stored[i / width * stride + i % width] = to_bf16(x[i]);
      x[i] = to_float(to_bf16(x[i]));
    }
    QuantisedMemory got(spec, rows, width), right(spec, rows, width);
    test::two_step(x, rows, right.view());
    ops::run(stream_,
             ops::QuantizeArgs{.x = {Dtype::bf16, stored.data(), {rows, width}, {stride, 1}}, .y = got.view()});
    expect_same(got, right, to_string(spec));
  }
}

TEST_F(Quantize, OnEveryTarget) {
  struct Unrestricted {
    ~Unrestricted() { cpu::restrict_target(""); }
  } unrestricted;
  for (const std::string_view target : cpu::targets()) {
    try {
      cpu::restrict_target(target);
    } catch (const UnsupportedError&) {
      continue;  // not this CPU's
    }
    for (const cases::Params& p : cases::quantize.sweep(5)) {
      auto c = cases::quantize.make(p);
      c->run(stream_);
      const cases::Verdict v = c->verify();
      EXPECT_TRUE(v.ok) << target << " " << cases::describe(p, "quantize") << ": " << v.detail;
    }
  }
}

template <class Args>
std::string refusal(Stream& stream, const Args& args) {
  try {
    ops::run(stream, args);
  } catch (const Error& e) {
    EXPECT_EQ(std::string_view(e.what()).find('\n'), std::string_view::npos);
    return e.what();
  }
  return "accepted";
}

TEST_F(Quantize, ArgumentsThatDoNotFit) {
  const std::vector<float> x(4 * 256, 1.0f);
  QuantisedMemory memory({.kind = OutputKind::fp8_groups}, 4, 256);
  auto with = [&](auto change) {
    ops::QuantizeArgs a{.x = View<const float, Token, HeadValue>(x.data(), {4, 256}), .y = memory.view()};
    change(a);
    return refusal(stream_, a);
  };
  using A = ops::QuantizeArgs;
  EXPECT_EQ(with([](A&) {}), "accepted");
  EXPECT_EQ(with([](A& a) { a.y.spec = {}; }), "quantize: output none is not a quantised one");
  EXPECT_EQ(with([](A& a) { a.y.width = 255; }), "quantize: output width is 255, Head * Value is 256");
  EXPECT_EQ(with([](A& a) { a.y.tokens = 3; }), "quantize: output fp8_128 has room for 3 tokens, there are 4");
  EXPECT_EQ(with([](A& a) { a.y.row_stride = 200; }),
            "quantize: output fp8_128 has row stride 200, a row takes 256 bytes");
  EXPECT_EQ(with([](A& a) { a.y.data = nullptr; }), "quantize: output fp8_128 has no data");
  EXPECT_EQ(with([](A& a) { a.y.scales = nullptr; }), "quantize: output fp8_128 has no scales");
  EXPECT_EQ(with([](A& a) { a.y.scales += 2; }),
            "quantize: output fp8_128 has scales at an address that is 2 past a multiple of 4");
  EXPECT_EQ(with([](A& a) { a.y.spec.group = 96; }), "output: group is 96; 64 and 128 are supported");
  EXPECT_EQ(with([&](A& a) { a.x = {Dtype::f16, x.data(), {4, 256}}; }), "quantize: x is f16, allowed: f32 bf16");
  EXPECT_EQ(with([&](A& a) {
              a.x = View<const float, Token, HeadValue>(x.data(), {2, 256}, {512, 2});
            }),
            "quantize: x HeadValue has stride 2, 1 is needed");
  EXPECT_EQ(refusal(stream_, ops::QuantizePaddingArgs{memory.view(), 5}),
            "quantize_padding: output fp8_128 has room for 4 tokens, there are 5");
}

// A product whose rows go to a quantised output, against the same product to f32.
struct Product {
  int64_t heads, in, out, rows;
};
struct Kind {
  WeightFormat format;
  Dtype dtype;
};

TEST_F(Quantize, ProjectQuantisesWhatItFinishes) {
  for (const Product& p : {Product{3, 40, 128, 70}, Product{2, 33, 256, 5}, Product{5, 24, 20, 9},
                           Product{2, 48, 640, 3}, Product{4, 16, 64, 130}, Product{1, 30, 48, 2}})
    for (const Kind& kind : {Kind{WeightFormat::plain, Dtype::f32}, Kind{WeightFormat::plain, Dtype::bf16},
                             Kind{WeightFormat::fp8, Dtype::bf16}, Kind{WeightFormat::mxfp4, Dtype::f32}}) {
      const int64_t width = p.heads * p.out, tokens = p.rows + 4;
      const std::vector<float> values = random_values(width * p.in, 1);
      const backend::Backend& backend = backend::backend({});
      const auto weights =
          kind.format == WeightFormat::plain
              ? backend.pack(values, p.heads, p.out, p.in, kind.dtype, {})
              : backend.pack_quantised(quantise(values, p.heads, p.out, p.in, kind.format), kind.dtype, {});
      const size_t per_worker = backend.scratch_per_worker({.heads = p.heads, .hidden = p.in});
      Buffer scratch(per_worker * static_cast<size_t>(pool_.threads()));
      const std::vector<float> x = random_values(p.rows * p.heads * p.in, 2);
      std::vector<float> y(tokens * width, cases::poison());
      std::vector<int32_t> y_rows;  // backwards, the first rows of the output unused
      for (int64_t i = 0; i < p.rows; ++i) y_rows.push_back(static_cast<int32_t>(tokens - 1 - i));
      ops::ProjectArgs args{.x = View<const float, Token, Head, In>(x.data(), {p.rows, p.heads, p.in}),
                            .weights = weights.get(),
                            .y = View<float, Token, Head, Out>(y.data(), {tokens, p.heads, p.out}),
                            .y_rows = y_rows,
                            .rows = p.rows,
                            .scratch = {scratch.data(), per_worker}};
      ops::run(stream_, args);
      args.y = {};
      for (const OutputSpec& named : output_specs()) {
        if (named.kind == OutputKind::none) continue;
        const OutputSpec spec = with_scales(named);
        QuantisedMemory got(spec, tokens, width), all(spec, tokens, width), right(spec, tokens, width);
        args.quantized = got.view();
        if (!spec.groups_within(p.out)) {
          EXPECT_EQ(refusal(stream_, args), "project: output " + to_string(spec) + " has groups of " +
                                                std::to_string(spec.group_size()) + " that span heads of " +
                                                std::to_string(p.out) + "; quantize takes whole rows");
          continue;
        }
        ops::run(stream_, args);
        // Every row of the output, as if all were in use; then only those that are.
        test::two_step(y, tokens, all.view());
        for (int32_t t : y_rows) {
          std::copy_n(all.view().codes(t), spec.row_bytes(width), right.view().codes(t));
          for (int64_t g = 0; g < spec.groups(width); ++g) {
            const bool word = spec.kind == OutputKind::fp8_groups && spec.form != ScaleForm::packed_ue8m0;
            std::copy_n(all.view().scale(t, g), word ? 4 : 1, right.view().scale(t, g));
          }
        }
        expect_same(got, right, to_string(spec) + " of heads of " + std::to_string(p.out));
      }
    }
}

TEST_F(Quantize, AttendExpandedQuantisesARowsLastPart) {
  constexpr int64_t kHeads = 2, kNope = 12, kRope = 4, kTokens = 48;
  cases::Random random(5);
  for (int64_t value : {20, 64, 128})
    for (const OutputSpec& named : output_specs()) {
      if (named.kind == OutputKind::none || !named.groups_within(value)) continue;
      const OutputSpec spec = with_scales(named);
      const std::vector<float> q = random_values(kTokens * kHeads * (kNope + kRope), random.next()),
                               k = random_values(64 * kHeads * kNope, random.next()),
                               k_pe = random_values(64 * kRope, random.next()),
                               v = random_values(64 * kHeads * value, random.next());
      // Four requests: without context; with; one whose rows see nothing of either part; one of another step's rows.
      // Masks of the first two's last parts, from bit 3 on.
      std::vector<ExpandedItem> fresh{
          {0, 20, 0, 20, 0, true, true, 3}, {20, 15, 20, 15, 0, false}, {35, 4, 0, 0, 0, false}},
          context{{20, 15, 0, 40, ExpandedItem::everything(), true, true, 3}, {35, 4, 3, 0, 0, true}};
      std::vector<uint32_t> mask(2 * kTokens);
      for (uint32_t& word : mask) word = static_cast<uint32_t>(random.next());
      const size_t per_worker =
          backend::backend({}).scratch_per_worker({.heads = kHeads, .rope = kRope, .nope = kNope, .value = value});
      Buffer scratch(per_worker * static_cast<size_t>(pool_.threads()));
      auto run = [&](std::span<float> out, std::span<float> lse, const QuantizedView& quantized) {
        const int64_t rows = static_cast<int64_t>(out.size()) / (kHeads * value);
        ops::AttendExpandedArgs a{.q = {q.data(), {kTokens, kHeads, kNope + kRope}},
                                  .k_nope = View<const float, Key, Head, Nope>(k.data(), {64, kHeads, kNope}),
                                  .k_pe = View<const float, Key, Rope>(k_pe.data(), {64, kRope}),
                                  .v = View<const float, Key, Head, Value>(v.data(), {64, kHeads, value}),
                                  .items = fresh,
                                  .mask = {mask.data(), {kTokens, 2}},
                                  .scale = 0.25f,
                                  .out = {out.data(), {rows, kHeads, value}},
                                  .lse = {lse.data(), {kTokens, kHeads}},
                                  .quantized = quantized,
                                  .scratch = {scratch.data(), per_worker}};
        ops::run(stream_, a);
        a.items = context;
        a.accumulate = true;
        ops::run(stream_, a);
      };
      std::vector<float> out(kTokens * kHeads * value, cases::poison()), other = out, lse(kTokens * kHeads),
                                                                         other_lse = lse;
      run(out, lse, {});
      QuantisedMemory got(spec, kTokens + 1, kHeads * value), right(spec, kTokens + 1, kHeads * value);
      run(other, other_lse, got.view());
      ops::run(stream_, ops::QuantizePaddingArgs{got.view(), 39});
      test::two_step(out, 39, right.view());
      expect_same(got, right, to_string(spec) + " of heads of " + std::to_string(value));
      EXPECT_EQ(lse, other_lse);
      // Rows of the first request never touched f32.
      for (int64_t i = 0; i < 20 * kHeads * value; ++i)
        ASSERT_EQ(std::bit_cast<uint32_t>(other[i]), std::bit_cast<uint32_t>(cases::poison())) << i;
      // And so a first call needs no f32 rows when all of its items are last parts.
      context.clear();
      fresh.resize(1);
      std::vector<float> none;
      QuantisedMemory again(spec, kTokens + 1, kHeads * value);
      run(none, other_lse, again.view());
      EXPECT_TRUE(
          std::equal(again.codes.begin(), again.codes.begin() + spec.row_bytes(kHeads * value), got.codes.begin()));
      fresh[0].last = false;
      EXPECT_THROW(run(none, other_lse, again.view()), ShapeError);
    }
}

TEST_F(Quantize, AttendExpandedRefusesWhatItCannotQuantise) {
  const std::vector<float> x(4096, 0.5f);
  std::vector<float> out(4096), lse(64);
  QuantisedMemory memory({.kind = OutputKind::fp8_groups}, 4, 2 * 64);
  Buffer scratch(1 << 20);
  const ExpandedItem item{0, 4, 0, 4, 0, true};
  ops::AttendExpandedArgs a{.q = {x.data(), {4, 2, 8}},
                            .k_nope = View<const float, Key, Head, Nope>(x.data(), {4, 2, 8}),
                            .k_pe = View<const float, Key, Rope>(x.data(), {4, 0}),
                            .v = View<const float, Key, Head, Value>(x.data(), {4, 2, 64}),
                            .items = {&item, 1},
                            .out = {out.data(), {4, 2, 64}},
                            .lse = {lse.data(), {4, 2}},
                            .quantized = memory.view(),
                            .scratch = {scratch.data(), size_t{1} << 20}};
  EXPECT_EQ(refusal(stream_, a),
            "attend_expanded: output fp8_128 has groups of 128 that span heads of 64; quantize takes whole rows");
  a.quantized.spec.group = 64;
  a.quantized.tokens = 3;
  EXPECT_EQ(refusal(stream_, a), "attend_expanded: item q_count is 4, allowed 0 to 3");
  a.quantized.width = 64;
  EXPECT_EQ(refusal(stream_, a), "attend_expanded: output width is 64, Head * Value is 128");
}

}  // namespace
}  // namespace mla
