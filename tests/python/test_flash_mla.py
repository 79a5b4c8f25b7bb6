"""mla.flash_mla against float64, over its argument space."""

import ml_dtypes
import numpy as np
import pytest
from reference import assert_near, attend, chosen, decode_rows, encode_rows

import mla
from mla.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

# f32 queries: f32 sums. bf16 queries may be multiplied as bf16 (weights of the softmax rounded to 8
# bits, values near 1), and out is rounded to bf16.
ROUNDING = {"float32": 3e-5, "float16": 2e-3, "bfloat16": 2e-2, "float8_e4m3fn": 2e-2}
KINDS_576 = ["float32", "bfloat16", "float16", "float8_e4m3fn", "fp8_ds_mla"]
KINDS_512 = ["bfloat16", "fp8_ds_v4"]


def make_cache(rng, blocks, page, head_dim, kind, poison=()):
    """Pages of random rows, NaN in the slots that must not be read; and what they decode to."""
    cache = encode_rows(rng.standard_normal((blocks * page, head_dim)), page, kind)
    rows = decode_rows(cache, head_dim)
    if kind == "fp8_ds_v4":
        flat = cache.reshape(blocks, -1)
        for slot in poison:
            flat[slot // page, slot % page * 576 :][:448] = 0x7F
    else:
        for slot in poison:
            row = cache[slot // page, slot % page, 0]
            if kind == "fp8_ds_mla":
                row[:512] = 0x7F
            else:
                row[:] = np.nan
    return cache, rows


def scattered_table(rng, lengths, page, blocks):
    """A block table of distinct pages in random order, absurd ids past the sequences' ends."""
    columns = max(1, max(-(-n // page) for n in lengths) + 1)
    table = np.full((len(lengths), columns), 2**31 - 1, np.int32)
    pages = iter(rng.permutation(blocks))
    for r, n in enumerate(lengths):
        for c in range(-(-n // page)):
            table[r, c] = next(pages)
    return table


def dense_reference(q, rows, table, lengths, page, value, scale, causal):
    batch, queries, heads, _ = q.shape
    out, lse = np.zeros((batch, queries, heads, value)), np.zeros((batch, heads, queries))
    for b in range(batch):
        slots = np.array([table[b, t // page] * page + t % page for t in range(lengths[b])], int)
        for i in range(queries):
            seen = max(0, lengths[b] - queries + 1 + i) if causal else lengths[b]
            out[b, i], _, lse[b, :, i] = attend(q[b, i], rows[slots[:seen]], value, scale)
    return out, lse


def check_dense(
    rng, lengths, queries, heads, page, kind, dtype, causal, head_dim=576, scale=None,
    q_scale=None, k_scale=None,
):
    blocks = sum(-(-n // page) for n in lengths) + 2
    table = scattered_table(rng, lengths, page, blocks)
    used = {
        int(table[b, t // page]) * page + t % page for b, n in enumerate(lengths) for t in range(n)
    }
    poison = [s for s in range(blocks * page) if s not in used]
    cache, rows = make_cache(rng, blocks, page, head_dim, kind, poison)
    q = rng.standard_normal((len(lengths), queries, heads, head_dim)).astype(np.dtype(dtype))
    meta, splits = get_mla_metadata()
    out, lse = flash_mla_with_kvcache(
        q, cache, table, np.array(lengths, np.int32), 512, meta, splits, scale, causal,
        is_fp8_kvcache=kind.startswith("fp8"),
        descale_q=None if q_scale is None else np.array([q_scale], np.float32),
        descale_k=None if k_scale is None else np.array([k_scale], np.float32),
    )
    wanted = dense_reference(
        q.astype(np.float64) * (q_scale or 1), rows * (k_scale or 1), table, lengths, page, 512,
        scale or head_dim**-0.5, causal,
    )
    assert out.dtype == (dtype if dtype in ("float32", "float16") else ml_dtypes.bfloat16)
    assert lse.dtype == np.float32
    assert_near(out, wanted[0], "out", ROUNDING[dtype])
    assert_near(lse, wanted[1], "lse", ROUNDING[dtype])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("kind", KINDS_576)
def test_dense_formats(rng, kind, dtype, causal):
    check_dense(rng, [70, 0, 129], 2, 5, 64, kind, dtype, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_scale,k_scale", [(0.37, 1.9), (2.5, None), (None, 0.21), (1.0, 1.0)])
def test_dense_descales_of_fp8(rng, q_scale, k_scale, causal):
    check_dense(
        rng, [70, 0, 129], 2, 5, 64, "float8_e4m3fn", "float8_e4m3fn", causal, q_scale=q_scale,
        k_scale=k_scale,
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_fp8_cache_has_a_descale_whatever_the_queries(rng, dtype):
    check_dense(rng, [33, 100], 1, 16, 16, "float8_e4m3fn", dtype, True, k_scale=1.7)


@pytest.mark.parametrize("descale", [
    np.array([0.3], np.float32), np.array(0.3, np.float32), np.full((1, 1), 0.3, np.float32),
])
def test_a_descale_has_one_element_of_any_shape(rng, descale):
    fp8 = ml_dtypes.float8_e4m3fn
    q, cache = (rng.standard_normal(s).astype(fp8) for s in ((1, 1, 2, 576), (2, 4, 1, 576)))
    arguments = dense_arguments(rng, q=q, k_cache=cache)
    out, lse = flash_mla_with_kvcache(**arguments, descale_q=descale)
    wanted = flash_mla_with_kvcache(**arguments, descale_q=np.array([0.3], np.float32))
    np.testing.assert_array_equal(out, wanted[0])
    np.testing.assert_array_equal(lse, wanted[1])
    assert not np.array_equal(lse, flash_mla_with_kvcache(**arguments)[1])


@pytest.mark.parametrize(
    "changes,error,words",
    [
        (dict(descale_q=np.ones(2, np.float32)), mla.ShapeError, ["descale_q", "[2]", "one f32"]),
        (dict(descale_k=np.ones(1)), mla.ShapeError, ["descale_k", "float64", "one f32"]),
        (dict(descale_k=1.0), mla.ShapeError, ["descale_k"]),
        (dict(descale_q=np.array([-1], np.float32)), mla.InputError, ["descale_q", "-1"]),
        (dict(descale_k=np.array([np.nan], np.float32)), mla.InputError, ["descale_k", "nan"]),
        (
            dict(q=np.zeros((1, 1, 2, 576), np.float32), descale_q=np.ones(1, np.float32)),
            mla.UnsupportedError, ["descale_q", "q is f32", "fp8"],
        ),
        (
            dict(q=np.zeros((1, 1, 2, 576), np.float16), descale_q=np.ones(1, np.float32)),
            mla.UnsupportedError, ["descale_q", "q is f16", "fp8"],
        ),
        (
            dict(k_cache=np.zeros((2, 4, 1, 656), np.uint8), is_fp8_kvcache=True,
                 descale_k=np.ones(1, np.float32)),
            mla.UnsupportedError, ["descale_k", "fp8_ds_mla"],
        ),
        (
            dict(indices=np.zeros((1, 1, 4), np.int32), descale_k=np.ones(1, np.float32)),
            mla.UnsupportedError, ["descale_k", "dense"],
        ),
    ],
)
def test_bad_descales(rng, changes, error, words):
    fp8 = ml_dtypes.float8_e4m3fn
    arguments = dense_arguments(
        rng, q=np.zeros((1, 1, 2, 576), fp8), k_cache=np.zeros((2, 4, 1, 576), fp8)
    )
    with pytest.raises(error) as raised:
        flash_mla_with_kvcache(**arguments | changes)
    for word in words:
        assert word in str(raised.value), str(raised.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS_512)
def test_dense_head_dim_512(rng, kind, dtype):
    check_dense(rng, [33, 1], 3, 4, 16, kind, dtype, True, head_dim=512)


@pytest.mark.parametrize("page", [1, 3, 64, 100])
@pytest.mark.parametrize("heads", [1, 7, 64, 130])
def test_dense_any_heads_and_page(rng, heads, page):
    check_dense(rng, [37, 150], 1, heads, page, "bfloat16", "float32", True)


@pytest.mark.parametrize("lengths", [[0], [1], [2, 5], [4, 0, 3]])
@pytest.mark.parametrize("queries", [1, 4, 70])
def test_queries_past_their_sequence_see_nothing(rng, lengths, queries):
    check_dense(rng, lengths, queries, 3, 4, "float32", "float32", True)


@pytest.mark.parametrize("queries,causal", [(1, False), (3, True), (65, True), (3, False)])
def test_dense_long_contexts_are_split(rng, queries, causal):
    check_dense(rng, [3000, 700], queries, 2, 64, "float32", "float32", causal, scale=0.02)


def sparse_reference(q, parts, value, scale, sink):
    """parts: (rows, slots [batch, queries, topk], lengths or None) of each cache."""
    batch, queries, heads, _ = q.shape
    out, lse = np.zeros((batch, queries, heads, value)), np.zeros((batch, heads, queries))
    largest = np.zeros((batch, heads, queries))
    for b in range(batch):
        for i in range(queries):
            keys = np.concatenate([
                rows[chosen(slots[b, i], None if n is None else n[b], len(rows))]
                for rows, slots, n in parts
            ])
            out[b, i], largest[b, :, i], lse[b, :, i] = attend(q[b, i], keys, value, scale, sink)
    return out, largest, lse


def random_slots(rng, shape, count):
    """With unused entries, absurd ones, and slots named twice."""
    slots = rng.integers(0, count, shape).astype(np.int32)
    slots[rng.random(shape) < 0.2] = -1
    slots[rng.random(shape) < 0.05] = 2**31 - 1
    return slots


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize(
    "kind,head_dim", [(k, 576) for k in KINDS_576] + [(k, 512) for k in KINDS_512]
)
def test_sparse(rng, kind, head_dim, lengths, sink, extra):
    batch, queries, heads, topk, dtype = 3, 2, 6, 40, "float32"
    cache, rows = make_cache(rng, 5, 16, head_dim, kind)
    q = rng.standard_normal((batch, queries, heads, head_dim)).astype(np.dtype(dtype))
    slots = random_slots(rng, (batch, queries, topk), len(rows))
    slots[1] = -1
    n = np.array([topk, 7, 0], np.int32) if lengths else None
    sinks = np.array([0.5, -np.inf, np.inf, 3, -2, 0], np.float32) if sink else None
    parts, more = [(rows, slots, n)], {}
    if extra:
        cache2, rows2 = make_cache(rng, 3, 7, head_dim, kind)
        slots2 = random_slots(rng, (batch, queries, 9), len(rows2))
        slots2[1, 0] = -1
        n2 = np.array([9, 4, 0], np.int32) if lengths else None
        parts.append((rows2, slots2, n2))
        more = dict(
            extra_k_cache=cache2, extra_indices_in_kvcache=slots2, extra_topk_length=n2
        )
    out, lse = flash_mla_with_kvcache(
        q, cache, None, None, 512, indices=slots, attn_sink=sinks, topk_length=n,
        is_fp8_kvcache=kind.startswith("fp8"), **more,
    )
    wanted = sparse_reference(q, parts, 512, head_dim**-0.5, sinks)
    assert_near(out, wanted[0], "out", ROUNDING[dtype])
    assert_near(lse, wanted[2], "lse", ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [1, 64, 100])
@pytest.mark.parametrize("topk", [1, 64, 2049])
def test_sparse_fwd(rng, heads, topk, dtype):
    rows, count = 3, 500
    q = rng.standard_normal((rows, heads, 576)).astype(np.dtype(dtype))
    kv = rng.standard_normal((count, 1, 576)).astype(np.dtype(dtype))
    slots = random_slots(rng, (rows, 1, topk), count)
    slots[2] = -1
    n = np.array([topk, max(1, topk // 2), topk], np.int32)
    sinks = rng.standard_normal(heads).astype(np.float32)
    out, largest, lse = flash_mla_sparse_fwd(
        q, kv, slots, 0.03, attn_sink=sinks, topk_length=n
    )
    wanted = sparse_reference(
        q[:, None], [(kv.reshape(count, 576).astype(np.float64), slots, n)], 512, 0.03, sinks
    )
    assert out.shape == (rows, heads, 512) and largest.shape == lse.shape == (rows, heads)
    assert_near(out, wanted[0][:, 0], "out", ROUNDING[dtype])
    assert_near(largest, wanted[1][:, :, 0], "max_logits", ROUNDING[dtype])
    assert_near(lse, wanted[2][:, :, 0], "lse", ROUNDING[dtype])
    assert np.all(out[2].astype(float) == 0) and np.all(lse[2] == np.inf)
    assert np.all(largest[2] == -np.inf)


def test_sinks_change_out_and_never_lse(rng):
    q = rng.standard_normal((2, 4, 576)).astype(np.float32)
    kv = rng.standard_normal((30, 1, 576)).astype(np.float32)
    slots = rng.integers(0, 30, (2, 1, 8)).astype(np.int32)
    plain = flash_mla_sparse_fwd(q, kv, slots, 0.05)
    sunk = flash_mla_sparse_fwd(q, kv, slots, 0.05, attn_sink=np.full(4, np.inf, np.float32))
    np.testing.assert_array_equal(plain[1], sunk[1])
    np.testing.assert_array_equal(plain[2], sunk[2])
    assert np.all(sunk[0] == 0) and np.all(plain[0] != 0)


def test_strided_inputs_are_read_in_place(rng):
    cache, _ = make_cache(rng, 12, 8, 576, "float32")
    table = np.array([[3, 99], [1, 99]], np.int32)[:, :1]
    wide = rng.standard_normal((4, 1, 6, 600)).astype(np.float32)
    q = wide[::2, :, 1:5, :576]
    out, lse = flash_mla_with_kvcache(q, cache[::2], table, np.array([8, 5], np.int32))
    rows = decode_rows(cache[::2], 576)
    wanted = dense_reference(q, rows, table, [8, 5], 8, 512, 576**-0.5, False)
    assert_near(out, wanted[0], "out", 3e-5)
    assert_near(lse, wanted[1], "lse", 3e-5)


def inside(array, gaps, fill):
    """The array as a view of a larger one: dimension i has gaps[i] more elements, all `fill`."""
    whole = np.full([n + g for n, g in zip(array.shape, gaps, strict=True)], fill, array.dtype)
    view = whole[tuple(slice(0, n) for n in array.shape)]
    view[...] = array
    return view


GAPS = [(0, 0, 0, 64), (0, 0, 3, 0), (0, 1, 0, 0), (1, 1, 1, 128), (0, 2, 0, 8), (1, 0, 1, 3)]


def poison_of(dtype):
    return 0x7F if dtype == np.uint8 else np.nan


@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("queries", [1, 3])
def test_dense_queries_are_views_of_larger_arrays(rng, queries, dtype, gaps):
    cache, _ = make_cache(rng, 6, 8, 576, "bfloat16")
    table = scattered_table(rng, [20, 0, 9], 8, 6)
    q = rng.standard_normal((3, queries, 5, 576)).astype(np.dtype(dtype))
    rest = cache, table, np.array([20, 0, 9], np.int32), 512, None, None, None, True
    found = flash_mla_with_kvcache(inside(q, gaps, poison_of(dtype)), *rest)
    for a, b in zip(found, flash_mla_with_kvcache(q, *rest), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("axes", [(1, 0, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)])
def test_dense_queries_may_be_transposed_and_reversed(rng, axes):
    cache, _ = make_cache(rng, 6, 8, 576, "float32")
    table = scattered_table(rng, [20, 3, 9], 8, 6)
    shape = (3, 2, 5, 576)
    q = rng.standard_normal([shape[a] for a in axes]).astype(np.float32).transpose(axes)
    rest = cache, table, np.array([20, 3, 9], np.int32)
    assert q.shape == shape
    for view in (q, q[::-1], q[:, ::-1], q[:, :, ::-1], np.broadcast_to(q[:1], shape)):
        found = flash_mla_with_kvcache(view, *rest)
        for a, b in zip(found, flash_mla_with_kvcache(view.copy(), *rest), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sparse_queries_and_indices_are_views_of_larger_arrays(rng, dtype, queries, gaps):
    cache, rows = make_cache(rng, 6, 8, 576, "bfloat16")
    extra, extra_rows = make_cache(rng, 3, 8, 576, "bfloat16")
    q = rng.standard_normal((3, queries, 5, 576)).astype(np.dtype(dtype))
    slots = random_slots(rng, (3, queries, 20), len(rows))
    extra_slots = random_slots(rng, (3, queries, 7), len(extra_rows))
    # A slot of the gaps that exists would change the answer.
    found = flash_mla_with_kvcache(
        inside(q, gaps, np.nan), cache, None, None, indices=inside(slots, gaps[:2] + (9,), 0),
        extra_k_cache=extra, extra_indices_in_kvcache=inside(extra_slots, gaps[:2] + (1,), 0),
    )
    wanted = sparse_reference(
        q, [(rows, slots, None), (extra_rows, extra_slots, None)], 512, 576**-0.5, None
    )
    assert_near(found[0], wanted[0], "out", ROUNDING[dtype])
    assert_near(found[1], wanted[2], "lse", ROUNDING[dtype])


@pytest.mark.parametrize("gaps", [(0, 0, 64), (0, 2, 0), (1, 1, 8), (1, 0, 3)])
def test_sparse_fwd_takes_views_of_larger_arrays(rng, gaps):
    q = rng.standard_normal((4, 5, 576)).astype(np.float32)
    kv = rng.standard_normal((50, 1, 576)).astype(np.float32)
    slots = random_slots(rng, (4, 1, 20), 50)
    found = flash_mla_sparse_fwd(
        inside(q, gaps, np.nan), kv, inside(slots, gaps, 0), 0.05, attn_sink=np.zeros(5, np.float32)
    )
    wanted = flash_mla_sparse_fwd(q, kv, slots, 0.05, attn_sink=np.zeros(5, np.float32))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kv_heads,heads", [(1, 6), (2, 6), (3, 3), (8, 16)])
@pytest.mark.parametrize(
    "kind,dtype",
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"),
     ("float8_e4m3fn", "float8_e4m3fn"), ("fp8_ds_mla", "float32")],
)
def test_caches_of_several_heads(rng, kind, dtype, kv_heads, heads, queries, causal):
    """Query head h meets head h // (heads // kv_heads) of the cache."""
    lengths, page, blocks = [37, 0, 20], 16, 8
    table = scattered_table(rng, lengths, page, blocks)
    encoded = encode_rows(rng.standard_normal((blocks * page * kv_heads, 576)), page, kind)
    cache = encoded.reshape(blocks, page, kv_heads, -1)
    rows = decode_rows(encoded, 576).reshape(blocks * page, kv_heads, 576)
    used = [table[b, t // page] * page + t % page for b, n in enumerate(lengths) for t in range(n)]
    slots = cache.reshape(blocks * page, kv_heads, -1)
    slots[np.setdiff1d(np.arange(blocks * page), used)] = poison_of(slots.dtype)
    q = inside(
        rng.standard_normal((3, queries, heads, 576)).astype(np.dtype(dtype)), (0, 1, 1, 8),
        poison_of(dtype),
    )
    whole = np.zeros((blocks, page + 1, kv_heads, cache.shape[3]), cache.dtype)
    whole[:, :page] = cache
    for view in (cache, whole[:, :page]):
        out, lse = flash_mla_with_kvcache(
            q, view, table, np.array(lengths, np.int32), 512, causal=causal,
            is_fp8_kvcache=kind == "fp8_ds_mla",
        )
        group = heads // kv_heads
        for j in range(kv_heads):
            part = slice(j * group, (j + 1) * group)
            wanted = dense_reference(
                q[:, :, part].astype(np.float64), rows[:, j], table, lengths, page, 512, 576**-0.5,
                causal,
            )
            assert_near(out[:, :, part], wanted[0], "out", ROUNDING[dtype])
            assert_near(lse[:, part], wanted[1], "lse", ROUNDING[dtype])


@pytest.mark.parametrize("lengths", [[3000, 700]])
def test_long_contexts_of_several_heads_are_split(rng, lengths):
    cache, rows = make_cache(rng, 128, 64, 576, "float32")
    cache = cache.reshape(64, 64, 2, 576)
    table = scattered_table(rng, lengths, 64, 64)
    q = rng.standard_normal((2, 2, 4, 576)).astype(np.float32)
    out, lse = flash_mla_with_kvcache(q, cache, table, np.array(lengths, np.int32), causal=True)
    for j in range(2):
        part = slice(2 * j, 2 * j + 2)
        wanted = dense_reference(
            q[:, :, part], rows.reshape(-1, 2, 576)[:, j], table, lengths, 64, 512, 576**-0.5, True
        )
        assert_near(out[:, :, part], wanted[0], "out", 3e-5)
        assert_near(lse[:, part], wanted[1], "lse", 3e-5)


def dense_arguments(rng, **changes):
    arguments = dict(
        q=rng.standard_normal((1, 1, 2, 576)).astype(np.float32),
        k_cache=np.zeros((2, 4, 1, 576), np.float32),
        block_table=np.array([[0, 1]], np.int32),
        cache_seqlens=np.array([5], np.int32),
    )
    return arguments | changes


@pytest.mark.parametrize(
    "changes,error,words",
    [
        (dict(q=np.zeros((1, 2, 576), np.float32)), mla.ShapeError, ["q", "[1, 2, 576]"]),
        (dict(q=[1.0]), mla.ShapeError, ["q: is a list"]),
        (dict(q=np.zeros((1, 1, 2, 576))), mla.ShapeError, ["q: is float64", "f32 bf16"]),
        (dict(q=np.zeros((1, 1, 2, 512), np.float32)), mla.ShapeError, ["k_cache", "576", "512"]),
        (dict(q=np.zeros((1, 1, 2, 1152), np.float32)[..., ::2]), mla.ShapeError, ["stride", "2"]),
        (
            dict(k_cache=np.zeros((2, 4, 3, 576), np.float32)), mla.ShapeError,
            ["q has 2 heads", "3 KV heads"],
        ),
        (dict(k_cache=np.zeros((2, 4, 0, 576), np.float32)), mla.ShapeError, ["KV heads", "0"]),
        (
            dict(k_cache=np.zeros((2, 4, 4, 576), np.float32)[:, :, ::2]), mla.ShapeError,
            ["k_cache", "KV heads have stride 1152", "576"],
        ),
        (
            dict(k_cache=np.zeros((2, 8, 2, 576), np.float32)[:, ::2]), mla.ShapeError,
            ["k_cache", "rows of a page have stride 2304", "1152"],
        ),
        (
            dict(k_cache=np.zeros((4, 4, 1, 656), np.uint8).reshape(2, 4, 2, 656)[:, :3],
                 is_fp8_kvcache=True, block_table=np.array([[0, 2]], np.int32)),
            mla.ShapeError, ["page id", "2"],
        ),
        (
            dict(q=np.zeros((1, 1, 2, 512), np.float32),
                 k_cache=np.zeros((2, 4, 2, 584), np.uint8), is_fp8_kvcache=True),
            mla.UnsupportedError, ["KV heads", "fp8_ds_v4"],
        ),
        (dict(k_cache=np.zeros((2, 0, 1, 576), np.float32)), mla.ShapeError, ["page size", "0"]),
        (
            dict(k_cache=np.zeros((2, 4, 1, 656), np.uint8)), mla.ShapeError,
            ["656", "is_fp8_kvcache"],
        ),
        (
            dict(k_cache=np.zeros((2, 4, 1, 656), bool), is_fp8_kvcache=True), mla.ShapeError,
            ["k_cache", "656", "576"],
        ),
        (
            dict(k_cache=np.zeros((2, 4, 1, 600), np.uint8), is_fp8_kvcache=True), mla.ShapeError,
            ["600", "656"],
        ),
        (dict(is_fp8_kvcache=True), mla.ShapeError, ["k_cache", "float32"]),
        (dict(cache_seqlens=np.array([9], np.int32)), mla.ShapeError, ["cache_seqlens", "9", "8"]),
        (dict(cache_seqlens=np.array([-1], np.int32)), mla.ShapeError, ["cache_seqlens", "-1"]),
        (dict(cache_seqlens=np.array([5], np.int64)), mla.ShapeError,
         ["cache_seqlens: is int64, int32 is needed"]),
        (dict(cache_seqlens=np.array([5, 5], np.int32)), mla.ShapeError, ["2", "1"]),
        (dict(block_table=np.array([[0, 2]], np.int32)), mla.ShapeError, ["page id", "2", "1"]),
        (dict(block_table=np.array([[0, -1]], np.int32)), mla.ShapeError, ["page id", "-1"]),
        (dict(block_table=np.array([0, 1], np.int32)), mla.ShapeError, ["block_table", "[2]"]),
        (dict(block_table=None), mla.ShapeError, ["block_table", "None"]),
        (dict(attn_sink=np.zeros(2, np.float32)), mla.UnsupportedError, ["attn_sink"]),
        (dict(head_dim_v=577), mla.ShapeError, ["head_dim_v", "577", "576"]),
        (dict(head_dim_v=-1), mla.ShapeError, ["head_dim_v", "-1"]),
        (dict(softmax_scale=float("nan")), mla.InputError, ["softmax_scale", "nan", "positive"]),
        (dict(softmax_scale=0), mla.InputError, ["softmax_scale", "0"]),
        (dict(softmax_scale="1"), mla.InputError, ["softmax_scale", "'1'"]),
        (dict(softmax_scale=10**400), mla.InputError, ["softmax_scale", "past every float"]),
        (dict(softmax_scale=10**5000), mla.InputError, ["softmax_scale", "past every float"]),
        (dict(softmax_scale=1e39), mla.InputError, ["softmax_scale", "1e+39", "3.40282e+38"]),
        (dict(softmax_scale=1e-39), mla.InputError, ["softmax_scale", "1e-39", "1.17549e-38"]),
        (dict(softmax_scale=[1]), mla.InputError, ["softmax_scale", "[1]"]),
        (dict(head_dim_v="512"), mla.ShapeError, ["head_dim_v", "'512'", "allowed 1 to 576"]),
        (dict(head_dim_v=512.0), mla.ShapeError, ["head_dim_v", "512.0"]),
        (dict(q=memoryview(np.ones((2, 1, 3, 576), np.float32))), mla.ShapeError,
         ["q: is a memoryview, an array of NumPy"]),
        (dict(k_cache=memoryview(np.ones((4, 16, 1, 576), np.float32))), mla.ShapeError,
         ["k_cache: is a memoryview"]),
    ],
)
def test_bad_dense_input(rng, changes, error, words):
    with pytest.raises(error) as raised:
        flash_mla_with_kvcache(**dense_arguments(rng, **changes))
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value), str(raised.value)


@pytest.mark.parametrize(
    "changes,error,words",
    [
        (dict(causal=True), mla.UnsupportedError, ["causal"]),
        (dict(indices=np.zeros((1, 1, 4), np.int64)), mla.ShapeError, ["indices", "int64"]),
        (dict(indices=np.zeros((1, 4), np.int32)), mla.ShapeError, ["indices", "[1, 4]"]),
        (
            dict(indices=np.zeros((1, 2, 4), np.int32)), mla.ShapeError,
            ["indices' queries", "2", "1"],
        ),
        (
            dict(k_cache=np.zeros((2, 4, 2, 576), np.float32)), mla.ShapeError,
            ["k_cache's KV heads is 2, 1 is needed with indices"],
        ),
        (dict(indices=np.zeros((2, 1, 4), np.int32)), mla.ShapeError, ["indices", "2", "1"]),
        (dict(indices=np.zeros((1, 1, 8), np.int32)[..., ::2]), mla.ShapeError, ["stride", "2"]),
        (dict(topk_length=np.array([5], np.int32)), mla.ShapeError, ["topk_length", "5", "4"]),
        (dict(attn_sink=np.zeros(3, np.float32)), mla.ShapeError, ["attn_sink", "3", "2"]),
        (dict(attn_sink=np.full(2, np.nan, np.float32)), mla.ShapeError, ["sink", "nan"]),
        (dict(attn_sink=np.zeros(2)), mla.ShapeError, ["attn_sink", "float64"]),
        (
            dict(extra_k_cache=np.zeros((1, 2, 1, 576), np.float32)), mla.ShapeError,
            ["extra_indices_in_kvcache"],
        ),
        (
            dict(extra_k_cache=np.zeros((1, 2, 1, 512), np.float32),
                 extra_indices_in_kvcache=np.zeros((1, 1, 2), np.int32)),
            mla.ShapeError, ["extra_k_cache", "512", "576"],
        ),
    ],
)
def test_bad_sparse_input(rng, changes, error, words):
    arguments = dense_arguments(rng, indices=np.zeros((1, 1, 4), np.int32)) | changes
    with pytest.raises(error) as raised:
        flash_mla_with_kvcache(**arguments)
    for word in words:
        assert word in str(raised.value), str(raised.value)


@pytest.mark.parametrize(
    "changes,words",
    [
        (dict(kv=np.zeros((5, 2, 576), np.float32)), ["kv's KV heads", "2"]),
        (dict(kv=np.zeros((5, 1, 512), np.float32)), ["kv's row", "512", "576"]),
        (dict(d_v=0), ["d_v", "0", "576"]),
        (dict(indices=np.zeros((3, 1, 4), np.int32)), ["indices", "3", "2"]),
    ],
)
def test_bad_sparse_fwd_input(changes, words):
    arguments = dict(
        q=np.zeros((2, 3, 576), np.float32), kv=np.zeros((5, 1, 576), np.float32),
        indices=np.zeros((2, 1, 4), np.int32), sm_scale=1.0,
    )
    with pytest.raises(mla.ShapeError) as raised:
        flash_mla_sparse_fwd(**arguments | changes)
    for word in words:
        assert word in str(raised.value), str(raised.value)


def test_empty_batches(rng):
    out, lse = flash_mla_with_kvcache(
        np.zeros((0, 1, 4, 576), np.float32), np.zeros((1, 4, 1, 576), np.float32),
        np.zeros((0, 1), np.int32), np.zeros(0, np.int32),
    )
    assert out.shape == (0, 1, 4, 512) and lse.shape == (0, 4, 1)
    out, lse = flash_mla_with_kvcache(
        np.ones((2, 1, 4, 576), np.float32), np.zeros((0, 4, 1, 576), np.float32),
        np.zeros((2, 0), np.int32), np.zeros(2, np.int32),
    )
    assert np.all(out == 0) and np.all(lse == np.inf)
    out, largest, lse = flash_mla_sparse_fwd(
        np.ones((2, 3, 576), np.float32), np.zeros((5, 1, 576), np.float32),
        np.zeros((2, 1, 0), np.int32), 1.0,
    )
    assert np.all(out == 0) and np.all(lse == np.inf) and np.all(largest == -np.inf)
