"""Random ragged batches against float64, and the law of NaN and infinity for mla.flash_mla."""

import numpy as np
import pytest
from reference import assert_near, chosen
from reference import attend as attend_rows
from test_flash_mla import KINDS_576, check_dense, make_cache, random_slots, scattered_table
from test_layer import TOLERANCE, attention, layer_inputs

import mla
from mla.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache

F64 = np.float64
# Of heads of 24 latents: fewer than test_layer's model has, over which e4m3's errors even out.
BOUNDS = TOLERANCE | {"fp8": 0.12}


def tiny_model(rng):
    model = mla.preset("deepseek-v2-lite")
    model.hidden, model.heads = 40, int(rng.choice([1, 2, 5, 16, 33, 128]))
    model.latent, model.nope, model.rope, model.value = 24, 12, 8, 10
    return model


def ragged_steps(rng, lengths):
    """Steps of (request, begin, end) until all is done, in any order, some without new tokens."""
    done = [0] * len(lengths)
    while list(done) != list(lengths):
        step = []
        for r in rng.permutation(len(lengths)):
            left = lengths[r] - done[r]
            count = int(min(left, rng.choice([0, 1, 1, 3, 40])))
            if rng.random() < 0.8 and done[r] + count > 0:
                step.append((int(r), done[r], done[r] + count))
                done[r] += count
        if step:
            yield step


@pytest.mark.parametrize("seed", range(150))
def test_ragged_batches(seed):
    rng = np.random.default_rng(seed)
    model = tiny_model(rng)
    form = str(rng.choice(["f32", "bf16", "f16", "fp8"]))
    path = str(rng.choice(["automatic", "latent", "expanded"]))
    page, stream = int(rng.integers(1, 20)), mla.Stream(threads=int(rng.integers(1, 4)))
    lengths = [int(n) for n in rng.integers(1, 60, rng.integers(1, 7))]
    columns = max(lengths) // page + 1
    cache = mla.Cache(mla.cache_spec(model, form, page), len(lengths) * columns)
    table = rng.permutation(len(lengths) * columns).reshape(-1, columns).astype(np.int32)
    tensors = mla.random_layer(model, 0, seed, "f32")
    w = {k: v.astype(F64) for k, v in tensors.arrays().items()}
    weights, rotary = mla.prepare(model, tensors, dtype="f32"), mla.RotaryTable(model, 64)
    hidden = [rng.standard_normal((n, model.hidden)) for n in lengths]
    inputs = [layer_inputs(model, w, h, np.arange(len(h))) for h in hidden]
    heads = [attention(model, w, *i) for i in inputs]
    largest_head = max(abs(h).max() for h in heads)
    wanted = [h.reshape(len(h), -1) @ w["output"].T for h in heads]
    largest = max(abs(y).max() for y in wanted)
    whole = rng.random() < 0.5  # the layer, or its attention alone
    for step in ragged_steps(rng, lengths):
        requests = [r for r, _, _ in step]
        tokens = [(r, t) for r, begin, end in step for t in range(begin, end)]
        slots = [table[r, t // page] * page + t % page for r, t in tokens]
        starts = np.cumsum([0] + [end - begin for _, begin, end in step])
        batch = mla.Batch(
            starts.astype(np.int32), np.array([end for _, _, end in step], np.int32),
            np.ascontiguousarray(table[requests]), np.array(slots, np.int32),
        )
        plan = mla.plan(
            model, cache, batch, stream=stream, options=mla.PlanOptions(path=path)
        )
        if whole:
            x = np.array([hidden[r][t] for r, t in tokens], np.float32).reshape(-1, model.hidden)
            out = np.full_like(x, np.nan)
            mla.forward(plan, weights, rotary, cache, x, out, stream=stream)
            right, bound = [wanted[r][t] for r, t in tokens], BOUNDS[form] * largest
        else:
            q, kv_c, k_pe = (
                np.array([inputs[r][i][t] for r, t in tokens], np.float32).reshape(
                    len(tokens), *inputs[0][i].shape[1:]
                )
                for i in range(3)
            )
            out = np.full((len(tokens), model.heads, model.value), np.nan, np.float32)
            mla.attend(plan, weights, rotary, cache, q, kv_c, k_pe, out, stream=stream)
            right, bound = [heads[r][t] for r, t in tokens], BOUNDS[form] * largest_head
        if tokens:
            assert abs(out - np.array(right)).max() <= bound, (step, form, path, page)


@pytest.mark.parametrize("seed", range(150))
def test_ragged_flash_mla(seed):
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(0, 70, rng.integers(1, 6))]
    check_dense(
        rng, lengths, int(rng.integers(1, 6)), int(rng.choice([1, 2, 5, 16, 33])),
        int(rng.integers(1, 70)), str(rng.choice(KINDS_576)),
        str(rng.choice(["float32", "bfloat16"])), bool(rng.random() < 0.7),
    )


def plant(rng, cache, page, slots, kind):
    """NaN, and where the kind holds it an infinity, somewhere in each slot's row."""
    for slot in slots:
        row = cache[slot // page, slot % page, 0]
        if kind == "fp8_ds_mla":
            row[rng.integers(0, 512)] = 0x7F
        elif kind == "float8_e4m3fn":
            row[rng.integers(0, 576)] = np.nan
        else:
            # As a value it is what the row sees, whatever its logit.
            row[rng.integers(0, 512)] = rng.choice([np.nan, np.inf, -np.inf])


def judge(found, clean, odd, what):
    """Rows [.., heads] that are odd are NaN throughout, the others have the clean run's bits."""
    (out, lse), (out_clean, lse_clean) = found, clean
    bits = np.dtype(f"u{out.dtype.itemsize}")
    assert np.isnan(out[odd].astype(F64)).all() and np.isnan(lse[odd]).all(), what
    assert (out[~odd].view(bits) == out_clean[~odd].view(bits)).all(), what
    assert (lse[~odd].view(np.uint32) == lse_clean[~odd].view(np.uint32)).all(), what


@pytest.mark.parametrize("seed", range(60))
def test_what_is_not_finite_reaches_those_who_see_it(seed):
    rng = np.random.default_rng(seed)
    kind, dtype = str(rng.choice(KINDS_576)), np.dtype(str(rng.choice(["float32", "bfloat16"])))
    page, queries = int(rng.integers(1, 40)), int(rng.integers(1, 5))
    heads = int(rng.choice([1, 3, 17, 40]))
    lengths = [int(n) for n in rng.integers(queries, 130, rng.integers(1, 5))]
    batch, sparse, causal = len(lengths), rng.random() < 0.5, bool(rng.random() < 0.7)
    blocks = sum(-(-n // page) for n in lengths) + 2
    cache, _ = make_cache(rng, blocks, page, 576, kind)
    q = rng.standard_normal((batch, queries, heads, 576)).astype(dtype)
    count = blocks * page
    if sparse:
        slots = random_slots(rng, (batch, queries, 30), count)
        seen = [[set(chosen(s, None, count).tolist()) for s in rows] for rows in slots]
        rest = (None, None, 512)
        more = dict(indices=slots)
    else:
        table = scattered_table(rng, lengths, page, blocks)
        at = [
            [int(table[b, t // page]) * page + t % page for t in range(n)]
            for b, n in enumerate(lengths)
        ]
        seen = [
            [set(keys[: len(keys) - queries + 1 + i] if causal else keys) for i in range(queries)]
            for keys in at
        ]
        rest = (table, np.array(lengths, np.int32), 512, None, None, None, causal)
        more = {}
    more["is_fp8_kvcache"] = kind.startswith("f") and cache.dtype.itemsize == 1

    def run():
        out, lse = flash_mla_with_kvcache(q, cache, *rest, **more)
        return np.array(out), np.ascontiguousarray(np.array(lse).transpose(0, 2, 1))

    clean = run()
    planted = rng.choice(count, min(count, int(rng.integers(1, 4))), replace=False).tolist()
    plant(rng, cache, page, planted, kind)
    odd = np.zeros((batch, queries, heads), bool)
    for b in range(batch):
        for i in range(queries):
            odd[b, i] = bool(seen[b][i] & set(planted))
    for _ in range(rng.integers(0, 3)):
        b, i, h = rng.integers(0, batch), rng.integers(0, queries), rng.integers(0, heads)
        q[b, i, h, rng.integers(0, 576)] = rng.choice([np.nan, np.inf])
        odd[b, i, h] = bool(seen[b][i])
    judge(run(), clean, odd, (kind, dtype, page, queries, heads, lengths, sparse, causal))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_minus_infinity_are_masked_keys(rng, dtype):
    heads, count = 20, 50
    kv = rng.standard_normal((count, 1, 576)).astype(np.dtype(dtype))
    q = rng.standard_normal((2, heads, 576)).astype(np.dtype(dtype))
    q[..., 570] = 1.0
    slots = np.broadcast_to(np.arange(count, dtype=np.int32), (2, 1, count)).copy()
    slots[1] = np.where(np.isin(slots[1], [3, 31]), slots[1], -1)  # a row of masked keys alone
    masked = [3, 31]
    kv[masked, 0, 570] = -np.inf
    out, largest, lse = flash_mla_sparse_fwd(q, kv, slots, 0.05)
    kept = np.delete(kv.reshape(count, 576).astype(F64), masked, axis=0)
    wanted = attend_rows(q[0], kept, 512, 0.05)
    rounding = 3e-5 if dtype == "float32" else 2e-2
    for found, right in zip((out[0], largest[0], lse[0]), wanted, strict=True):
        assert_near(np.asarray(found), right, "beside masked keys", rounding)
    assert (np.asarray(out[1]).astype(F64) == 0).all() and (np.asarray(lse[1]) == np.inf).all()
    assert (np.asarray(largest[1]) == -np.inf).all()
