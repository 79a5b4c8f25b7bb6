"""The planned layer: against float64, in every form that a caller may give its arrays."""

import os
import threading

import ml_dtypes
import numpy as np
import pytest

import mla

F64 = np.float64


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rotate(x, positions, model):
    """Interleaved pairs, YaRN's frequencies and magnitude as the config says."""
    r, half = model.rotary, model.rope // 2
    frequencies = r.theta ** (-np.arange(half) * 2.0 / model.rope)
    magnitude = 1.0
    if r.yarn:
        def correction(turns):
            at = np.log(r.original_max_position / (turns * 2 * np.pi)) / (2 * np.log(r.theta))
            return at * model.rope

        low = max(np.floor(correction(r.beta_fast)), 0)
        high = min(np.ceil(correction(r.beta_slow)), model.rope - 1)
        ramp = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0, 1)
        frequencies = frequencies / r.factor * ramp + frequencies * (1 - ramp)
        def m(scale, k):
            return 0.1 * k * np.log(scale) + 1 if scale > 1 else 1.0
        magnitude = m(r.factor, r.mscale) / m(r.factor, r.mscale_all_dim) * r.attention_factor
    angle = positions[:, None] * frequencies
    cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    y = np.empty_like(x)
    y[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    y[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return y


def layer_inputs(model, w, hidden, positions):
    """q [tokens, heads, nope + rope] rotated, kv_c normed, k_pe rotated."""
    q = (hidden @ w["query"].T).reshape(len(hidden), model.heads, model.query_key)
    q = np.concatenate(
        [q[..., : model.nope], rotate(q[..., model.nope :], positions, model)], axis=-1
    )
    kv = hidden @ w["kv_down"].T
    kv_c = rms_norm(kv[:, : model.latent], w["kv_norm"], model.rms_eps)
    return q, kv_c, rotate(kv[:, model.latent :], positions, model)


def attention(model, w, q, kv_c, k_pe):
    """One request's causal attention over its own tokens: [tokens, heads, value]."""
    up = w["kv_up"].reshape(model.heads, model.nope + model.value, model.latent)
    k = np.concatenate(
        [
            np.einsum("tl,hpl->thp", kv_c, up[:, : model.nope]),
            np.broadcast_to(k_pe[:, None], (len(k_pe), model.heads, model.rope)),
        ],
        axis=-1,
    )
    v = np.einsum("tl,hvl->thv", kv_c, up[:, model.nope :])
    s = np.einsum("qhd,khd->hqk", q, k) * model.softmax_scale
    s[:, ~np.tri(len(q), dtype=bool)] = -np.inf
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khv->qhv", p / p.sum(axis=-1, keepdims=True), v)


class World:
    """A model with its weights, and two requests of 37 and 90 tokens."""

    lengths = (37, 90)

    def __init__(self, model, form="bf16", page_size=16, dtype="f32"):
        self.model = model
        self.tensors = mla.random_layer(model, 0, 3, "f32")
        self.w = {k: v.astype(F64) for k, v in self.tensors.arrays().items()}
        self.weights = mla.prepare(model, self.tensors, dtype=dtype)
        self.rotary = mla.RotaryTable(model, 256)
        self.page_size = page_size
        self.columns = 90 // page_size + 1
        self.cache = mla.Cache(mla.cache_spec(model, form, page_size), 2 * self.columns)
        order = np.random.default_rng(1).permutation(2 * self.columns)
        self.table = order.reshape(2, self.columns).astype(np.int32)
        rng = np.random.default_rng(2)
        self.hidden = [rng.standard_normal((n, model.hidden)) for n in self.lengths]

    def batch(self, parts):
        """Tokens [begin, end) of each request."""
        slots = [
            self.table[r, t // self.page_size] * self.page_size + t % self.page_size
            for r, (begin, end) in enumerate(parts)
            for t in range(begin, end)
        ]
        starts = np.cumsum([0] + [end - begin for begin, end in parts])
        return mla.Batch(
            starts.astype(np.int32),
            np.array([end for _, end in parts], np.int32),
            self.table,
            np.array(slots, np.int32),
        )

    def rows(self, parts, of=None):
        return np.concatenate(
            [(of or self.hidden)[r][begin:end] for r, (begin, end) in enumerate(parts)]
        )

    def wanted(self):
        out = []
        for h in self.hidden:
            q, kv_c, k_pe = layer_inputs(self.model, self.w, h, np.arange(len(h)))
            out.append(attention(self.model, self.w, q, kv_c, k_pe).reshape(len(h), -1))
        return [o @ self.w["output"].T for o in out]


STEPS = [((0, 30), (0, 1)), ((30, 36), (1, 89)), ((36, 37), (89, 90))]
# The largest error over the largest output: f32 rounding, and a cached row's. e4m3 keeps 4 bits.
TOLERANCE = {"f32": 1e-5, "bf16": 1e-2, "f16": 2e-3, "fp8": 6e-2, "fp8_ds_mla": 6e-2}


@pytest.mark.parametrize("path", ["automatic", "latent", "expanded"])
@pytest.mark.parametrize("form", list(TOLERANCE))
def test_forward(small_model, stream, form, path):
    world = World(small_model, form)
    wanted = world.wanted()
    for parts in STEPS:
        step = mla.plan(
            world.model, world.cache, world.batch(parts), stream=stream,
            options=mla.PlanOptions(path=path),
        )
        assert step.tokens == sum(end - begin for begin, end in parts)
        if path != "automatic":
            assert step.paths == [path, path]
        hidden = world.rows(parts).astype(np.float32)
        out = mla.forward(step, world.weights, world.rotary, world.cache, hidden, stream=stream)
        assert out.dtype == np.float32 and out.shape == hidden.shape
        reference = world.rows(parts, wanted)
        error = np.abs(out - reference).max() / np.abs(reference).max()
        assert error < TOLERANCE[form], error


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_rows_of_a_dtype_of_their_own(small_model, stream, dtype):
    kind = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}[dtype]
    world = World(small_model, "f32")
    options = mla.PlanOptions(activation_dtype=dtype)
    assert options.activation_dtype == dtype and mla.PlanOptions().activation_dtype == "native"
    for parts in STEPS:
        batch = world.batch(parts)
        hidden = world.rows(parts).astype(kind)
        plain = mla.plan(world.model, world.cache, batch, stream=stream)
        wanted = mla.forward(
            plain, world.weights, world.rotary, world.cache, hidden.astype(np.float32), stream=stream
        )
        step = mla.plan(world.model, world.cache, batch, stream=stream, options=options)
        out = mla.forward(step, world.weights, world.rotary, world.cache, hidden, stream=stream)
        assert out.dtype == kind
        np.testing.assert_array_equal(out, wanted.astype(kind))
    if dtype == "f16":
        with pytest.raises(mla.ShapeError, match="hidden is f16, plan was made for activations of f32"):
            mla.forward(plain, world.weights, world.rotary, world.cache, hidden, stream=stream)
    with pytest.raises(mla.InputError, match="unknown activation dtype 'f64'"):
        mla.PlanOptions(activation_dtype="f64")


@pytest.mark.parametrize("scales", [{}, {"q": [0.01], "k": [0.02], "v": [0.02]}, {"k": "heads"}])
@pytest.mark.parametrize("prefill", ["fp8", "fp8_raw"])
def test_prefill_of_codes(small_model, stream, prefill, scales):
    world = World(small_model, "bf16")
    wanted = world.wanted()
    arrays = world.tensors.arrays()  # borrowed
    tensors = mla.LayerTensors(arrays)
    heads = {"k": [0.02 * (1 + h) for h in range(world.model.heads)]}
    tensors.scales = heads if scales.get("k") == "heads" else scales
    assert set(tensors.scales) == set(scales)
    weights = mla.prepare(world.model, tensors, dtype="f32")
    options = mla.PlanOptions(path="expanded", prefill=prefill)
    assert options.prefill == prefill
    for parts in STEPS:
        step = mla.plan(world.model, world.cache, world.batch(parts), stream=stream, options=options)
        hidden = world.rows(parts).astype(np.float32)
        out = mla.forward(step, weights, world.rotary, world.cache, hidden, stream=stream)
        reference = world.rows(parts, wanted)
        error = np.sqrt(((out - reference) ** 2).sum() / (reference**2).sum())
        assert 0.005 < error < 0.1, error


def test_decode_of_codes(small_model, stream):
    world = World(small_model, "fp8")
    options = mla.PlanOptions(path="latent", fp8_query=True, q_scale=0.05, decode="fp8")
    assert options.decode == "fp8"
    step = mla.plan(world.model, world.cache, world.batch(STEPS[0]), stream=stream, options=options)
    assert "products of codes" in step.describe()
    with pytest.raises(mla.UnsupportedError, match="decode fp8 needs fp8 queries"):
        mla.plan(world.model, world.cache, world.batch(STEPS[0]), stream=stream, options=mla.PlanOptions(decode="fp8"))
    with pytest.raises(mla.InputError, match="unknown decode operands 'e5m2'"):
        mla.PlanOptions(decode="e5m2")


def test_prefill_scales_are_checked(small_model):
    tensors = mla.random_layer(small_model)
    with pytest.raises(mla.InputError, match="no scales are called 'o'"):
        tensors.scales = {"o": [1.0]}
    tensors.scales = {"v": [1.0] * (small_model.heads + 1)}
    with pytest.raises(mla.ShapeError, match="v scales have"):
        mla.prepare(small_model, tensors, dtype="f32")
    with pytest.raises(mla.InputError, match="unknown prefill operands 'e5m2'"):
        mla.PlanOptions(prefill="e5m2")


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_calc_kv_scales(rng, kind):
    q = rng.standard_normal((5, 3, 24)).astype(kind)
    rows = rng.standard_normal((5, 40)).astype(kind)
    q[4, 2, 23], rows[0, 0] = -50, np.nan
    kv_c = rows[:, 4:36]  # the NaN does not lie there
    rows[:, 36:] = np.inf
    largest = float(np.abs(kv_c.astype(np.float32)).max())
    scales = mla.calc_kv_scales(q, kv_c)
    np.testing.assert_allclose(scales, (0.25, largest / 200, largest / 100), rtol=1e-6)
    assert scales == mla.calc_kv_scales(q, kv_c, k_divisor=200, stream=mla.Stream(1))
    assert mla.calc_kv_scales(None, kv_c, k_divisor=2).q_scale == 1
    assert mla.calc_kv_scales(None, kv_c, k_divisor=2).k_scale == pytest.approx(largest / 2)
    with pytest.raises(mla.InputError, match=r"kv_c \[0, 36\] is infinite"):
        mla.calc_kv_scales(q, rows)
    with pytest.raises(mla.InputError, match="constant v is 0"):
        mla.calc_kv_scales(q, kv_c, v_divisor=0)
    with pytest.raises(mla.ShapeError, match="q: has shape|q has|rank|dimensions"):
        mla.calc_kv_scales(q[0], kv_c)
    with pytest.raises(mla.ShapeError, match="kv_c is fp8_e4m3, allowed: f32 bf16 f16"):
        mla.calc_kv_scales(None, np.zeros((2, 8), ml_dtypes.float8_e4m3fn))


def test_attend(small_model, stream):
    world = World(small_model, "f32")
    parts = ((0, 37), (0, 90))
    step = mla.plan(world.model, world.cache, world.batch(parts), stream=stream)
    inputs = [layer_inputs(world.model, world.w, h, np.arange(len(h))) for h in world.hidden]
    q, kv_c, k_pe = (np.concatenate(x).astype(np.float32) for x in zip(*inputs, strict=True))
    profile = mla.Profile()
    out = mla.attend(
        step, world.weights, world.rotary, world.cache, q, kv_c, k_pe, stream=stream,
        profile=profile,
    )
    wanted = np.concatenate([attention(world.model, world.w, *x) for x in inputs])
    assert np.abs(out - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert {r["op"] for r in profile.rows} and all(r["calls"] > 0 for r in profile.rows)


@pytest.mark.parametrize("form", ["f32", "bf16"])
def test_attention_over_rows_that_are_there_or_without_a_cache(small_model, stream, form):
    world = World(small_model, form)
    parts = tuple((0, n) for n in world.lengths)
    inputs = [layer_inputs(world.model, world.w, h, np.arange(len(h))) for h in world.hidden]
    q, kv_c, k_pe = (np.concatenate(x).astype(np.float32) for x in zip(*inputs, strict=True))
    wanted = np.concatenate([attention(world.model, world.w, *x) for x in inputs])

    def attend(batch, cache, *rows, **options):
        options = mla.PlanOptions(form="attention", **options)
        step = mla.plan(world.model, cache, batch, stream=stream, options=options)
        return mla.attend(step, world.weights, world.rotary, cache, q, *rows, stream=stream)

    appended = attend(world.batch(parts), world.cache, kv_c, k_pe, path="latent")
    found = attend(world.batch(parts), world.cache, None, None, path="latent", cache_use="read")
    np.testing.assert_array_equal(found, appended)
    assert np.abs(found - wanted).max() < TOLERANCE[form] * np.abs(wanted).max()
    with pytest.raises(mla.ShapeError, match="kv_c"):
        attend(world.batch(parts), world.cache, None, None, path="expanded", cache_use="read")

    nothing = mla.Cache(world.cache.spec, 0)
    lengths = list(world.lengths)
    alone = mla.Batch([0, 37, 127], lengths, [[], []], [])
    found = attend(alone, nothing, kv_c, k_pe, cache_use="none")
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    with pytest.raises(mla.BatchError, match="without a cache there is no context"):
        attend(mla.Batch([0, 37, 126], lengths, [[], []], []), nothing, kv_c, k_pe, cache_use="none")
    with pytest.raises(mla.UnsupportedError, match="attention form"):
        mla.plan(
            world.model, nothing, alone, stream=stream, options=mla.PlanOptions(cache_use="none")
        )
    with pytest.raises(mla.InputError, match="write.*read"):
        mla.PlanOptions(cache_use="write")


def test_dummy_steps_write_zeros(small_model, stream):
    world = World(small_model)
    options = mla.PlanOptions(dummy=True)
    assert options.dummy and options.cache_use == "append"
    nothing = mla.Cache(world.cache.spec, 0)
    batch = mla.Batch([0, 37, 127], [37, 90], [[], []], [])
    step = mla.plan(world.model, nothing, batch, stream=stream, options=options)
    hidden = np.full((130, world.model.hidden), np.nan, np.float32)
    out = np.full_like(hidden, 7)
    mla.forward(step, world.weights, world.rotary, nothing, hidden, out, stream=stream)
    assert np.all(out[:127] == 0) and np.all(out[127:] == 7)
    q = np.full((127, world.model.heads, 192), np.nan, np.float32)
    heads = mla.attend(step, world.weights, world.rotary, nothing, q, None, None, stream=stream)
    assert np.all(heads == 0)


def prefill(world, stream):
    parts = ((0, 37), (0, 90))
    step = mla.plan(world.model, world.cache, world.batch(parts), stream=stream)
    return step, world.rows(parts).astype(np.float32)


def test_arrays_are_used_in_place(small_model, stream):
    world = World(small_model)
    step, hidden = prefill(world, stream)
    arguments = (step, world.weights, world.rotary, world.cache)
    dense = mla.forward(*arguments, hidden, stream=stream)

    padded = np.full((200, 300), np.nan, np.float32)
    padded[: len(hidden), :256] = hidden
    out = np.full((200, 300), 7, np.float32)
    rows = out[:, :256]
    assert mla.forward(*arguments, padded[:, :256], rows, stream=stream) is rows
    np.testing.assert_array_equal(out[: len(hidden), :256], dense)
    assert np.all(out[len(hidden) :] == 7) and np.all(out[:, 256:] == 7)

    frozen = hidden.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(mla.forward(*arguments, frozen, stream=stream), dense)

    narrow = hidden.astype(ml_dtypes.bfloat16)
    found = mla.forward(*arguments, narrow, stream=stream)
    assert found.dtype == ml_dtypes.bfloat16
    wide = np.empty_like(hidden)
    mla.forward(*arguments, narrow, wide, stream=stream)
    np.testing.assert_array_equal(wide.astype(ml_dtypes.bfloat16), found)


def test_threads_do_not_change_results(small_model):
    world = World(small_model)
    outs = []
    for threads in (1, 3):
        stream = mla.Stream(threads)
        step, hidden = prefill(world, stream)
        out = mla.forward(step, world.weights, world.rotary, world.cache, hidden, stream=stream)
        outs.append(out)
    np.testing.assert_array_equal(*outs)


def test_pinned_threads_do_not_change_results(small_model):
    world = World(small_model)
    outs = []
    for stream in (mla.Stream(1), mla.Stream(1, pinned=True)):
        world.weights.place(stream)
        world.cache.place(stream)
        step, hidden = prefill(world, stream)
        outs.append(mla.forward(step, world.weights, world.rotary, world.cache, hidden, stream=stream))
    np.testing.assert_array_equal(*outs)
    assert stream.pinned and not mla.Stream(2).pinned
    assert repr(stream) == "mla.Stream(device='cpu', threads=1, pinned=True)"
    processors = len(os.sched_getaffinity(0))
    with pytest.raises(mla.InputError, match=f"threads is {processors + 1}, .* may use {processors} processor"):
        mla.Stream(processors + 1, pinned=True)
    with pytest.raises(mla.InputError, match="pinned is of the CPU's threads, device is cuda:0"):
        mla.Stream(pinned=True, device="cuda:0")
    borrowed = mla.Cache(world.cache.spec, memory=np.zeros_like(world.cache.memory))
    with pytest.raises(mla.UnsupportedError, match="the caller's memory"):
        borrowed.place(stream)


def test_one_stream_serves_many_python_threads(small_model, stream):
    world = World(small_model)
    step, hidden = prefill(world, stream)
    arguments = (step, world.weights, world.rotary, world.cache, hidden)
    wanted = mla.forward(*arguments, stream=stream)
    outs = [None] * 8

    def work(i):
        for _ in range(3):
            outs[i] = mla.forward(*arguments, stream=stream)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(outs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for out in outs:
        np.testing.assert_array_equal(out, wanted)


def test_a_plan_keeps_its_batch(small_model, stream):
    world = World(small_model)
    parts = ((0, 37), (0, 90))
    table = world.table.copy()
    batch = world.batch(parts)
    step = mla.plan(world.model, world.cache, batch, stream=stream)
    hidden = world.rows(parts).astype(np.float32)
    arguments = (step, world.weights, world.rotary, world.cache, hidden)
    wanted = mla.forward(*arguments, stream=stream)
    world.table[:] = 2**31 - 1
    del batch
    np.testing.assert_array_equal(mla.forward(*arguments, stream=stream), wanted)
    world.table[:] = table


def test_memory_of_maxima_is_enough_for_steps_within_them(small_model, stream):
    world = World(small_model)
    limits = {"requests": 2, "tokens": 128, "query_len": 90, "seq_len": 200}
    for path in ("automatic", "latent", "expanded"):
        options = mla.PlanOptions(path=path)
        workspace, selection = mla.step_memory(
            world.model, world.cache, stream=stream, options=options, **limits
        )
        assert selection == 0
        for parts in (((0, 37), (0, 90)), ((0, 1), (0, 1)), ((0, 90), (80, 90))):
            step = mla.plan(world.model, world.cache, world.batch(parts), stream=stream, options=options)
            assert 0 < step.workspace_bytes <= workspace
    with pytest.raises(mla.ShapeError, match="maxima seq_len is 80, below query_len 90"):
        mla.step_memory(world.model, world.cache, stream=stream, **(limits | {"seq_len": 80}))


def test_own_weights(small_model, stream):
    world = World(small_model)
    arrays = {k: v.astype(np.float32) for k, v in world.w.items()}
    weights = mla.prepare(world.model, mla.LayerTensors(arrays), dtype="f32")
    step, hidden = prefill(world, stream)
    arguments = (world.rotary, world.cache, hidden)
    np.testing.assert_array_equal(
        mla.forward(step, weights, *arguments, stream=stream),
        mla.forward(step, world.weights, *arguments, stream=stream),
    )
    with pytest.raises(mla.InputError, match="'quer'.*query_down"):
        mla.LayerTensors({"quer": arrays["query"]})
    with pytest.raises(mla.ShapeError, match="query.*stride"):
        mla.LayerTensors({"query": arrays["query"].T})
    with pytest.raises(mla.Error, match="kv_up"):
        mla.prepare(
            world.model, mla.LayerTensors({k: v for k, v in arrays.items() if k != "kv_up"})
        )


def test_sparse_model(stream):
    model = mla.preset("deepseek-v3.2")
    model.hidden, model.heads, model.query_latent = 256, 2, 128
    indexer = model.indexer
    indexer.topk, indexer.heads = 16, 4
    model.indexer = indexer
    weights = mla.prepare(model, mla.random_layer(model, dtype="f32"), dtype="f32")
    rotary = mla.RotaryTable(model, 128)
    index_rotary = mla.RotaryTable(model, 128, indexer=True)
    cache = mla.Cache(mla.cache_spec(model, "fp8_ds_mla"), 2)
    index_cache = mla.IndexCache(model, cache)
    batch = mla.Batch([0, 100], [100], np.array([[1, 0]], np.int32), [*range(64, 128), *range(36)])
    step = mla.plan(model, cache, batch, stream=stream)
    assert step.topk == 16 and step.selection_bytes > 0 and step.paths == ["sparse"]
    hidden = np.random.default_rng(0).standard_normal((100, 256)).astype(np.float32)
    out = mla.forward(
        step, weights, rotary, cache, hidden, stream=stream, index_cache=index_cache,
        index_rotary=index_rotary,
    )
    assert np.all(np.isfinite(out)) and np.abs(out).max() > 0
    with pytest.raises(mla.Error):
        mla.forward(step, weights, rotary, cache, hidden, stream=stream)
    with pytest.raises(mla.ShapeError, match="index rotary table is of interleaved pairs"):
        mla.forward(
            step, weights, rotary, cache, hidden, stream=stream, index_cache=index_cache,
            index_rotary=rotary,
        )
    # A choice of all that the first rows see is what a dense plan attends to.
    q, kv_c, k_pe = (
        np.random.default_rng(1).standard_normal(s).astype(np.float32)
        for s in ((100, 2, 192), (100, 512), (100, 64))
    )
    first = np.tile(np.arange(16, dtype=np.int32), (100, 1))
    first[first > np.arange(100)[:, None]] = -1
    index = dict(index_cache=index_cache, index_rotary=index_rotary)
    step = mla.plan(
        model, cache, batch, stream=stream, options=mla.PlanOptions(form="attention")
    )
    with pytest.raises(mla.BatchError, match="selection holds no choice"):
        mla.attend(step, weights, rotary, cache, q, kv_c, k_pe, stream=stream, **index)
    with pytest.raises(mla.UnsupportedError, match="attention form alone"):
        mla.forward(step, weights, rotary, cache, hidden, stream=stream, **index)
    mla.select(step, weights, rotary, cache, first, stream=stream, **index)
    found = mla.attend(step, weights, rotary, cache, q, kv_c, k_pe, stream=stream, **index)
    dense = mla.plan(
        model, cache, batch, stream=stream, options=mla.PlanOptions(sparse="dense", path="latent")
    )
    wanted = mla.attend(dense, weights, rotary, cache, q, kv_c, k_pe, stream=stream, **index)
    np.testing.assert_allclose(found[:16], wanted[:16], rtol=1e-3, atol=1e-3)
    with pytest.raises(mla.ShapeError, match="17"):
        mla.select(
            step, weights, rotary, cache, np.zeros((100, 17), np.int32), stream=stream, **index
        )


def test_bad_arrays(small_model, stream):
    world = World(small_model)
    step, hidden = prefill(world, stream)

    def run(hidden=hidden, out=None):
        mla.forward(
            step, world.weights, world.rotary, world.cache, hidden, out, stream=stream
        )

    frozen = np.empty_like(hidden)
    frozen.flags.writeable = False
    cases = [
        (dict(hidden=hidden.astype(F64), out=hidden), "hidden: is float64, allowed: f32"),
        (dict(hidden=hidden[0], out=hidden), r"hidden: has shape \[256\], \[Token, Hidden\]"),
        (dict(hidden=hidden[:, :255]), "hidden Hidden is 255, model hidden is 256"),
        (dict(hidden=hidden[:100]), "hidden has 100 rows, the plan has 127 tokens"),
        (dict(out=hidden[:, :255].copy()), "out Hidden is 255"),
        (dict(out=frozen), "out: is read-only"),
        (dict(out=np.empty((127, 256), np.int32)), "out: is int32"),
        (dict(out=np.empty((127, 256), np.float16)), "f16"),
        (dict(out=np.empty((127, 512), np.float32)[:, ::2]), "stride 2"),
        (dict(hidden="text", out=hidden), "hidden: is a str"),
        (dict(hidden=[[1.0]]), "hidden: is a list"),
        (dict(hidden=memoryview(hidden)), "hidden: is a memoryview, an array of NumPy"),
        (dict(hidden=hidden[0]), r"hidden: has shape \[256\], \[tokens, hidden\]"),
        (dict(hidden=hidden.astype(">f4"), out=hidden), "hidden: .*byte order"),
        (dict(hidden=hidden.astype("m8[s]"), out=hidden), "hidden: .*exports no memory"),
    ]
    for arguments, message in cases:
        with pytest.raises(mla.ShapeError, match=message) as raised:
            run(**arguments)
        assert "\n" not in str(raised.value)


def test_bad_batches(small_model, stream):
    world = World(small_model)
    good = dict(
        query_start_loc=[0, 1], seq_lens=[1], block_table=np.zeros((1, 1), np.int32),
        slot_mapping=[0],
    )

    def run(**changes):
        return mla.plan(
            world.model, world.cache, mla.Batch(**(good | changes)), stream=stream
        )

    assert run().tokens == 1
    for changes in (
        dict(block_table=np.zeros((1, 1), np.int64), seq_lens=np.ones(1, np.int64)),
        dict(block_table=[[0]], slot_mapping=np.zeros(1, np.int64)),
        dict(block_table=((0,),), seq_lens=[np.int64(1)]),
        dict(block_table=[np.zeros(1, np.int64)]),
        dict(block_table=np.zeros((1, 6), np.int64)[:, ::2]),
        dict(query_start_loc=[0, 1, 1 + 1], seq_lens=[1, 17], slot_mapping=[0, 32],
             block_table=[[0], [1, 2]]),
    ):
        tokens = changes.get("query_start_loc", [0, 1])[-1]
        assert run(**changes).tokens == tokens
    for changes in (
        dict(query_start_loc=[1, 2]),
        dict(query_start_loc=[]),
        dict(seq_lens=[0]),
        dict(seq_lens=[17]),
        dict(block_table=np.array([[99]], np.int32)),
        dict(slot_mapping=[10**6]),
        dict(slot_mapping=[]),
    ):
        with pytest.raises(mla.BatchError):
            run(**changes)
    for changes, message in (
        (dict(block_table=np.zeros((2, 1), np.int32)), "block_table Request is 2"),
        (dict(block_table=np.full((1, 2), 2**31)), "block_table: element 0 is 2147483648, int32"),
        (dict(block_table=np.zeros(1, np.int32)), r"block_table: has shape \[1\], \[Request"),
        (dict(block_table=[0]), "block_table of request 0: is a int"),
        (dict(block_table=[[0.5]]), "block_table of request 0: element 0 is 0.5, int32"),
        (dict(seq_lens=np.ones((1, 1), np.int32)), "seq_lens: has shape"),
        (dict(seq_lens=np.ones(1)), "seq_lens: is float64, int32"),
        (dict(seq_lens=["one"]), "seq_lens: element 0 is 'one', int32"),
        (dict(seq_lens=["x" * 1000]), "seq_lens: element 0 is 'x{59}, int32"),
        (dict(seq_lens=[2**31]), "seq_lens: element 0 is 2147483648, int32"),
        (dict(slot_mapping=[[0, 3]]), r"slot_mapping: element 0 is \[0, 3\], int32"),
    ):
        with pytest.raises(mla.ShapeError, match=message):
            run(**changes)
    with pytest.raises(mla.BatchError, match="request 1: seq_len 17 needs 2 pages of 16"):
        run(query_start_loc=[0, 1, 2], seq_lens=[1, 17], slot_mapping=[0, 32],
            block_table=[[0], [1]])


def test_what_was_not_planned_is_refused(small_model, stream):
    world = World(small_model)
    step, hidden = prefill(world, stream)
    spec = world.cache.spec
    fewer = mla.Cache(spec, world.cache.pages - 1)
    other = mla.Cache(mla.cache_spec(world.model, "f32", 16), world.cache.pages)
    short = mla.RotaryTable(world.model, 50)
    wide = mla.Stream(3)
    for cache, rotary, s, message in (
        (fewer, world.rotary, stream, "cache pages"),
        (other, world.rotary, stream, "f32"),
        (world.cache, short, stream, "position"),
        (world.cache, world.rotary, wide, "3 threads"),
    ):
        with pytest.raises(mla.ShapeError, match=message):
            mla.forward(step, world.weights, rotary, cache, hidden, stream=s)
    with pytest.raises(mla.InputError, match="sideways.*latent"):
        mla.PlanOptions(path="sideways")
    with pytest.raises(mla.InputError, match="round.*attention"):
        mla.PlanOptions(form="round")


def test_other_rotary_tables_are_refused(small_model, stream):
    world = World(small_model)
    step, hidden = prefill(world, stream)
    other = mla.preset("deepseek-v3")
    other.rope = small_model.rope
    rotary = other.rotary
    rotary.interleaved, rotary.theta = not small_model.rotary.interleaved, 7.0
    other.rotary = rotary
    with pytest.raises(mla.ShapeError, match="rotary table is of"):
        mla.forward(
            step, world.weights, mla.RotaryTable(other, 256), world.cache, hidden, stream=stream
        )
    with pytest.raises(mla.ShapeError, match="positions is 0, allowed 1 to"):
        mla.RotaryTable(small_model, 0)


def test_slots_belong_to_their_tokens(small_model, stream):
    cache = mla.Cache(mla.cache_spec(small_model, "f32", 16), 4)

    def planned(slots, starts=(0, 3), lens=(20,), table=((2, 1),)):
        batch = mla.Batch([*starts], [*lens], np.array(table, np.int32), slots)
        return mla.plan(small_model, cache, batch, stream=stream)

    planned([17, 18, 19])
    planned([17, -1, 19])
    with pytest.raises(mla.BatchError, match=r"slot_mapping\[1\] is 17, its token's position 18 is slot 18"):
        planned([17, 17, 19])
    with pytest.raises(mla.BatchError, match=r"slot_mapping\[0\] is 33"):
        planned([33, 18, 19])
    with pytest.raises(mla.BatchError, match="the slot of token 0 too"):  # two decode one row
        planned([19, 19], (0, 1, 2), (20, 20), ((2, 1), (0, 1)))
