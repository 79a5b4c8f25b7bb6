"""mla.flash_mla's calls over sequences without a cache, against float64."""

import ml_dtypes
import numpy as np
import pytest
from reference import assert_near

import mla
from mla.flash_mla import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

# bf16: weights of the softmax rounded to 8 bits, values near 1, out to bf16.
ROUNDING = {"float32": 3e-5, "float16": 2e-3, "bfloat16": 2e-2}


def begins(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


def wanted_of(q, k, v, q_lengths, k_lengths, scale, causal):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf)
    q0 = k0 = 0
    for n, keys in zip(q_lengths, k_lengths, strict=True):
        for i in range(n):
            seen = min(keys, max(0, i + 1 + keys - n)) if causal else keys
            for h in range(heads if seen else 0):
                logits = k[k0 : k0 + seen, h // group] @ q[q0 + i, h] * scale
                largest = logits.max()
                weights = np.exp(logits - largest)
                lse[q0 + i, h] = largest + np.log(weights.sum())
                out[q0 + i, h] = weights @ v[k0 : k0 + seen, h // group] / weights.sum()
        q0, k0 = q0 + n, k0 + keys
    return out, lse


def inside(array, gaps):
    """The array as a view of a larger one: dimension i has gaps[i] more elements, all NaN."""
    whole = np.full([n + g for n, g in zip(array.shape, gaps, strict=True)], np.nan, array.dtype)
    view = whole[tuple(slice(0, n) for n in array.shape)]
    view[...] = array
    return view


def operands(
    rng, q_lengths, k_lengths, heads, kv_heads, head_dim, value_dim, dtype, gaps=(0, 0, 0)
):
    shapes = (
        (sum(q_lengths), heads, head_dim), (sum(k_lengths), kv_heads, head_dim),
        (sum(k_lengths), kv_heads, value_dim),
    )
    return [inside(rng.standard_normal(s).astype(np.dtype(dtype)), gaps) for s in shapes]


def check(
    rng, q_lengths, k_lengths, heads=3, kv_heads=3, head_dim=192, value_dim=128, dtype="float32",
    causal=False, scale=None, gaps=(0, 0, 0),
):
    q, k, v = operands(
        rng, q_lengths, k_lengths, heads, kv_heads, head_dim, value_dim, dtype, gaps
    )
    out, lse = flash_attn_varlen_func(
        q, k, v, begins(q_lengths), begins(k_lengths), max(q_lengths), max(k_lengths),
        softmax_scale=scale, causal=causal,
    )
    wanted = wanted_of(q, k, v, q_lengths, k_lengths, scale or head_dim**-0.5, causal)
    assert out.dtype == np.dtype(dtype) and lse.dtype == np.float32
    assert out.shape == (len(q), heads, value_dim) and lse.shape == (len(q), heads)
    assert lse.T.flags.c_contiguous
    assert_near(out, wanted[0], "out", ROUNDING[dtype])
    assert_near(lse, wanted[1], "lse", ROUNDING[dtype])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(
    "head_dim,value_dim", [(192, 128), (128, 128), (256, 256), (72, 40), (33, 5), (1, 1)]
)
def test_head_dims(rng, head_dim, value_dim, dtype, causal):
    check(
        rng, [17, 1, 40], [30, 5, 40], head_dim=head_dim, value_dim=value_dim, dtype=dtype,
        causal=causal,
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_ragged_batches(seed, causal):
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 9))
    q_lengths, k_lengths = (rng.integers(0, 70, batch).tolist() for _ in range(2))
    q_lengths[0] = max(1, q_lengths[0])
    check(rng, q_lengths, k_lengths, heads=2, kv_heads=2, causal=causal, scale=0.11)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("q_lengths,k_lengths", [
    ([5, 0, 3], [9, 7, 4]),  # no queries
    ([5, 4, 3], [9, 0, 4]),  # no keys
    ([5, 0, 3], [0, 0, 0]),
    ([9, 70, 3], [2, 65, 4]),  # causal rows before the first key
    ([1], [1]),
    ([130, 64], [64, 130]),
])
def test_causal_is_aligned_to_the_last_query_and_key(rng, q_lengths, k_lengths, dtype):
    check(rng, q_lengths, k_lengths, dtype=dtype, causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads,kv_heads", [(6, 1), (6, 2), (6, 3), (6, 6), (16, 2), (7, 1)])
def test_heads_that_share_keys(rng, heads, kv_heads, dtype, causal):
    check(rng, [9, 33], [20, 33], heads=heads, kv_heads=kv_heads, dtype=dtype, causal=causal)


@pytest.mark.parametrize("gaps", [(0, 0, 64), (0, 2, 0), (2, 1, 3), (1, 0, 8)])
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_views_of_larger_arrays(rng, kv_heads, dtype, gaps):
    check(rng, [9, 33], [20, 33], heads=4, kv_heads=kv_heads, dtype=dtype, causal=True, gaps=gaps)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_operands(rng, dtype):
    lengths, q_lengths = [20, 0, 33], [9, 4, 33]
    q, k, v = operands(rng, lengths, lengths, 3, 3, 192, 128, dtype)
    plain = flash_attn_varlen_func(
        q, k, v, begins(lengths), begins(lengths), 33, 33, 0.0, 0.1, True
    )
    packed = flash_attn_varlen_qkvpacked_func(
        np.concatenate([q, k, v], 2), begins(lengths), 33, 192, 0.0, 0.1, True
    )
    for a, b in zip(plain, packed, strict=True):
        np.testing.assert_array_equal(a, b)
    q = operands(rng, q_lengths, lengths, 6, 3, 192, 128, dtype)[0]
    rest = begins(q_lengths), begins(lengths), 33, 33
    plain = flash_attn_varlen_func(q, k, v, *rest, causal=True)
    packed = flash_attn_varlen_kvpacked_func(q, np.concatenate([k, v], 2), *rest, 192, causal=True)
    for a, b in zip(plain, packed, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
def test_equal_lengths_need_no_begins(rng, causal):
    """is_varlen=False: what cu_seqlens hold is not looked at."""
    q, k, v = operands(rng, [7] * 3, [11] * 3, 2, 2, 192, 128, "float32")
    absurd = np.array([-5, 2**31 - 1, 3, 0], np.int32)
    found = flash_attn_varlen_func(q, k, v, absurd, absurd, 7, 11, causal=causal, is_varlen=False)
    wanted = flash_attn_varlen_func(
        q, k, v, begins([7] * 3), begins([11] * 3), 7, 11, causal=causal
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_and_keys_of_no_sequence_are_not_read(rng, dtype):
    q, k, v = operands(rng, [3, 9, 20, 4], [5, 20, 30, 6], 2, 2, 192, 128, dtype)
    wanted = wanted_of(q[3:32], k[5:55], v[5:55], [9, 20], [20, 30], 192**-0.5, True)
    for x, first, last in ((q, 3, 32), (k, 5, 55), (v, 5, 55)):
        x[:first] = x[last:] = np.nan
    q_begins, k_begins = np.array([3, 12, 32], np.int32), np.array([5, 25, 55], np.int32)
    out, lse = flash_attn_varlen_func(q, k, v, q_begins, k_begins, 20, 30, causal=True)
    assert_near(out[3:32], wanted[0], "out", ROUNDING[dtype])
    assert_near(lse[3:32], wanted[1], "lse", ROUNDING[dtype])


def test_nothing_to_attend(rng):
    f32 = np.float32
    for rows, heads, sequences in ((0, 2, 1), (0, 2, 0), (3, 0, 1), (0, 2, 4)):
        q, k, v = (np.zeros((rows, heads, n), f32) for n in (192, 192, 128))
        at = np.linspace(0, rows, sequences + 1).astype(np.int32)
        out, lse = flash_attn_varlen_func(q, k, v, at, at, rows, rows)
        assert out.shape == (rows, heads, 128) and lse.shape == (rows, heads)
    out, lse = flash_attn_varlen_func(
        np.ones((3, 2, 192), f32), np.ones((0, 2, 192), f32), np.ones((0, 2, 128), f32),
        begins([3]), begins([0]), 3, 0,
    )
    assert np.all(out == 0) and np.all(lse == -np.inf)


def arguments_of(**changes):
    f32 = np.float32
    return dict(
        q=np.zeros((5, 2, 192), f32), k=np.zeros((7, 2, 192), f32), v=np.zeros((7, 2, 128), f32),
        cu_seqlens_qo=begins([2, 3]), cu_seqlens_kv=begins([3, 4]), max_seqlen_qo=3,
        max_seqlen_kv=4,
    ) | changes


@pytest.mark.parametrize("changes,error,words", [
    (dict(dropout_p=0.1), mla.UnsupportedError, ["dropout_p", "0.1"]),
    (dict(deterministic=True), mla.UnsupportedError, ["deterministic"]),
    (dict(q=np.zeros((5, 192), np.float32)), mla.ShapeError, ["q", "[5, 192]"]),
    (dict(k=[1.0]), mla.ShapeError, ["k: is a list"]),
    (dict(k=np.zeros((7, 2, 192))), mla.ShapeError, ["k", "float64", "q is float32"]),
    (dict(v=np.zeros((7, 2, 128), ml_dtypes.bfloat16)), mla.ShapeError, ["v", "bfloat16"]),
    (dict(k=np.zeros((7, 2, 128), np.float32)), mla.ShapeError, ["k's head dim", "128", "192"]),
    (dict(k=np.zeros((7, 0, 192), np.float32), v=np.zeros((7, 0, 128), np.float32)),
     mla.ShapeError, ["q has 2 heads", "0 KV heads"]),
    (dict(q=np.zeros((5, 3, 192), np.float32)), mla.ShapeError, ["q has 3 heads", "2 KV heads"]),
    (dict(v=np.zeros((7, 1, 128), np.float32)), mla.ShapeError, ["v's KV heads", "1", "2"]),
    (dict(v=np.zeros((6, 2, 128), np.float32)), mla.ShapeError, ["v's keys", "6", "7"]),
    (dict(q=np.zeros((5, 2, 384), np.float32)[..., ::2]), mla.ShapeError, ["q", "stride 2"]),
    (dict(v=np.zeros((7, 2, 256), np.float32)[..., ::2]), mla.ShapeError, ["v", "stride 2"]),
    (dict(cu_seqlens_qo=begins([5])), mla.ShapeError, ["cu_seqlens_kv length", "3", "2"]),
    (dict(cu_seqlens_qo=begins([2, 4])), mla.ShapeError, ["cu_seqlens_qo", "6", "5"]),
    (dict(cu_seqlens_qo=np.array([0, 3, 2], np.int32)), mla.ShapeError,
     ["cu_seqlens_qo", "behind 3", "2"]),
    (dict(cu_seqlens_qo=np.array([-1, 2, 5], np.int32)), mla.ShapeError, ["cu_seqlens_qo", "-1"]),
    (dict(cu_seqlens_qo=np.array([0, 2, 5])), mla.ShapeError, ["cu_seqlens_qo", "int64", "int32"]),
    (dict(cu_seqlens_qo=np.zeros(0, np.int32)), mla.ShapeError, ["cu_seqlens_qo", "no element"]),
    (dict(cu_seqlens_kv=None), mla.ShapeError, ["cu_seqlens_kv", "NoneType"]),
    (dict(max_seqlen_qo=2), mla.ShapeError,
     ["sequence 1 is 3 long", "cu_seqlens_qo", "max_seqlen_qo is 2"]),
    (dict(max_seqlen_kv=3), mla.ShapeError, ["sequence 1 is 4 long", "max_seqlen_kv is 3"]),
    (dict(max_seqlen_kv=-1), mla.ShapeError, ["max_seqlen_kv", "-1"]),
    (dict(max_seqlen_kv=4.0), mla.ShapeError, ["max_seqlen_kv", "4.0"]),
    (dict(is_varlen=False), mla.ShapeError, ["q's rows are 5", "2 sequences"]),
    (dict(softmax_scale=float("nan")), mla.InputError, ["softmax_scale", "nan"]),
    (dict(softmax_scale=0), mla.InputError, ["softmax_scale", "0"]),
    ({n: np.zeros(s, ml_dtypes.float8_e4m3fn) for n, s in
      (("q", (5, 2, 192)), ("k", (7, 2, 192)), ("v", (7, 2, 128)))},
     mla.ShapeError, ["q is fp8_e4m3", "f32 bf16"]),
])
def test_bad_input(changes, error, words):
    with pytest.raises(error) as raised:
        flash_attn_varlen_func(**arguments_of(**changes))
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value), str(raised.value)


@pytest.mark.parametrize("head_dim_qk", [0, 193, "64", None])
def test_packed_operands_need_a_head_dim_that_they_hold(head_dim_qk):
    kv, q = np.zeros((4, 2, 192), np.float32), np.zeros((4, 2, 64), np.float32)
    with pytest.raises(mla.ShapeError, match=r"head_dim_qk.*1 to 192, kv's last dim"):
        flash_attn_varlen_kvpacked_func(q, kv, begins([4]), begins([4]), 4, 4, head_dim_qk)
    with pytest.raises(mla.ShapeError, match=r"head_dim_qk.*1 to 96, half of qkv's"):
        flash_attn_varlen_qkvpacked_func(kv, begins([4]), 4, head_dim_qk)
    for refused in (dict(dropout_p=0.5), dict(deterministic=True)):
        with pytest.raises(mla.UnsupportedError, match=f"kvpacked_func: {[*refused][0]}"):
            flash_attn_varlen_kvpacked_func(q, kv, begins([4]), begins([4]), 4, 4, 64, **refused)
        with pytest.raises(mla.UnsupportedError, match=f"qkvpacked_func: {[*refused][0]}"):
            flash_attn_varlen_qkvpacked_func(kv, begins([4]), 4, 64, **refused)
