// What a tensor may be: dtype, device, rank, strides, offsets. norm stands for all ops.
#include <limits>

#include "call.hpp"

namespace capi {
namespace {

struct Norm {
  Stream stream;
  Tensor<float> x{{3, 8}}, weight{{8}, 2.0f}, y{{3, 8}};
  mla_norm_args args = make<mla_norm_args>();
  Norm() {
    x.random(1);
    args.x = x;
    args.weight = weight;
    args.y = y;
  }
  mla_status run() { return mla_norm(stream, &args); }
  float expected(const float* row, int i) const {
    float sum = 0;
    for (int j = 0; j < 8; ++j) sum += row[j] * row[j];
    return 2.0f * row[i] / std::sqrt(sum / 8);
  }
};

TEST(CTensors, DenseWithAndWithoutStrides) {
  Norm n;
  ASSERT_OK(n.run());
  for (int i = 0; i < 24; ++i) EXPECT_NEAR(n.y[i], n.expected(&n.x[i / 8 * 8], i % 8), 1e-5f);
  const std::vector<float> first = n.y.data;
  int64_t strides[] = {8, 1};
  (*n.x).strides = strides;
  ASSERT_OK(n.run());
  EXPECT_EQ(first, n.y.data);
}

TEST(CTensors, StridedRowsAndOffsetsAreHonoured) {
  Norm n;
  Tensor<float> wide({3, 20}, 99.0f);
  for (int r = 0; r < 3; ++r)
    for (int i = 0; i < 8; ++i) wide[r * 20 + 5 + i] = n.x[r * 8 + i];
  ASSERT_OK(n.run());
  const std::vector<float> first = n.y.data;
  int64_t shape[] = {3, 8}, strides[] = {20, 1};
  DLTensor part = *wide;
  part.shape = shape;
  part.strides = strides;
  part.byte_offset = 5 * sizeof(float);
  n.args.x = &part;
  n.args.y = &part;  // in place, too
  ASSERT_OK(n.run());
  for (int i = 0; i < 24; ++i) EXPECT_EQ(wide[i / 8 * 20 + 5 + i % 8], first[i]);
  for (int r = 0; r < 3; ++r)
    for (int i : {0, 4, 13, 19}) EXPECT_EQ(wide[r * 20 + i], 99.0f);
}

TEST(CTensors, Bf16) {
  Stream stream;
  Tensor<float> x({1, 1, 3});
  Tensor<uint16_t> y({1, 1, 3});
  x.data = {1.0f, -0.15625f, 3.0e38f};
  mla_cast_args args = make<mla_cast_args>();
  args.x = x;
  args.y = y;
  args.scale = 1;
  ASSERT_OK(mla_cast(stream, &args));
  EXPECT_EQ(y.data, (std::vector<uint16_t>{0x3f80, 0xbe20, 0x7f62}));
  args.x = y;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_cast(stream, &args), "mla_cast: x dtype is bfloat16, allowed: float32");
}

TEST(CTensors, WrongDtypesAreNamed) {
  Norm n;
  (*n.x).dtype = {kDLFloat, 16, 1};
  EXPECT_EQ(MLA_ERROR_SHAPE, n.run());
  EXPECT_STREQ(mla_last_error(), "mla_norm: x dtype is float16, allowed: float32");
  (*n.x).dtype = {kDLFloat, 32, 4};
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "x dtype is float32x4");
  (*n.x).dtype = {6, 8, 1};
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "x dtype is type 6 of 8");
  (*n.x).dtype = {kDLFloat, 64, 1};
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "x dtype is float64");
  (*n.x).dtype = Type<uint8_t>::value;
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "x dtype is uint8");
}

TEST(CTensors, WrongDevicesAreNamed) {
  Norm n;
  (*n.y).device = {kDLCUDA, 1};
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "mla_norm: y is on cuda:1, the call is on cpu");
  (*n.y).device = {static_cast<DLDeviceType>(8), 0};
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "y is on device type 8");
  (*n.y).device = {kDLCUDAHost, 0};  // pinned memory is the CPU's as well
  EXPECT_OK(n.run());
}

TEST(CTensors, WrongShapesAreNamed) {
  Norm n;
  (*n.x).ndim = 1;
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "x has 1 dimensions, needed: [Token, In]");
  (*n.x).ndim = -1;
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "x has -1 dimensions");
  (*n.x).ndim = 2;
  (*n.x).shape[0] = -2;
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "x Token is -2");
  (*n.x).shape[0] = 2;
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "mla_norm: y Token is 3, x Token is 2");
  (*n.x).shape[0] = std::numeric_limits<int64_t>::max();
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "x has more than 2^59 elements");
  (*n.x).shape[0] = 3;
  int64_t* shape = (*n.x).shape;
  (*n.x).shape = nullptr;
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "x has no shape");
  (*n.x).shape = shape;
  EXPECT_OK(n.run());
}

TEST(CTensors, WrongStridesAreNamed) {
  Norm n;
  int64_t strides[] = {8, 2};
  (*n.x).strides = strides;
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "x In has stride 2, 1 is needed");
  strides[0] = -8;
  strides[1] = 1;
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "x Token has stride -8, at least 0 is needed");
  strides[0] = std::numeric_limits<int64_t>::max() / 2;
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "which leaves 2^59 elements");
  strides[0] = 0;  // every row the same: to be read, not to be written
  EXPECT_OK(n.run());
  (*n.y).strides = strides;
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "y Token has stride 0, at least 1 is needed");
  strides[0] = 7;  // a row's last element would be the next one's first
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "y Token has stride 7, at least 8 is needed for elements that are written");
  strides[0] = 8;
  EXPECT_OK(n.run());
}

TEST(CTensors, MissingAndMisplacedMemoryIsNamed) {
  Norm n;
  n.args.weight = nullptr;
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "mla_norm: weight is missing");
  n.args.weight = n.weight;
  (*n.x).data = nullptr;
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "x has no data");
  (*n.x).data = n.x.data.data();
  (*n.x).byte_offset = 2;
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "x is at an address that is 2 past a multiple of 4");
  (*n.x).byte_offset = ~uint64_t{0};
  EXPECT_FAILS(MLA_ERROR_SHAPE, n.run(), "byte_offset");
}

TEST(CTensors, NoRowsNeedNoMemory) {
  Norm n;
  int64_t shape[] = {0, 8}, strides[] = {-5, 1};
  DLTensor none = *n.x;
  none.shape = shape;
  none.strides = strides;
  none.data = nullptr;
  n.args.x = n.args.y = &none;
  EXPECT_OK(n.run());
}

// Rows are merged by their lse also where heads have no width: no address of such a tensor is used, whatever it is.
TEST(CTensors, NoWidthNeedsNoMemory) {
  Stream stream;
  Tensor<float> lse({2, 3}, 1.0f), other_lse({2, 3}, 1.0f);
  int64_t shape[] = {2, 3, 0}, strides[] = {std::numeric_limits<int64_t>::max(), -7, 1};
  for (uintptr_t address : {0, 2}) {
    SCOPED_TRACE("address " + std::to_string(address));
    std::fill(lse.data.begin(), lse.data.end(), 1.0f);
    DLTensor none = *lse;
    none.ndim = 3;
    none.shape = shape;
    none.strides = strides;
    none.data = reinterpret_cast<void*>(address);
    mla_merge_args args = make<mla_merge_args>();
    args.out = args.other = &none;
    args.lse = lse;
    args.other_lse = other_lse;
    ASSERT_OK(mla_merge(stream, &args));
    for (float l : lse.data) EXPECT_NEAR(l, 1 + std::log(2.0f), 1e-6f);
  }
}

}  // namespace
}  // namespace capi
