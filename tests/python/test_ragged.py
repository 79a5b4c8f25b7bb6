"""Random ragged batches against float64, NaN in every output before; and the law of NaN and infinity."""

import ml_dtypes
import numpy as np
import pytest
from reference import F64, chosen, decode_rows, encode_rows
from test_layer import layer_inputs

import mla
from mla import flash_mla

ROUNDING = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 3e-2, "float8_e4m3fn": 3e-2}
KINDS = {
    576: ["float32", "bfloat16", "float16", "float8_e4m3fn", "fp8_ds_mla"],
    512: ["float32", "bfloat16", "fp8_ds_v4"],
}
LARGEST_F32 = float(np.finfo(np.float32).max)


@pytest.fixture(scope="module")
def streams():
    return [mla.Stream(threads) for threads in (1, 2, 3)]


@pytest.fixture
def poisoned(monkeypatch):
    """Outputs that a call allocates itself hold NaN before it."""
    plain = flash_mla.empty

    def empty(*arguments):
        array = plain(*arguments)
        array[...] = np.nan
        return array

    monkeypatch.setattr(flash_mla, "empty", empty)


def pick(rng, *values):
    return values[rng.integers(len(values))]


def softmax_rows(logits, values, seen, sink=None):
    """The law of docs/numerics.md, for logits [rows, keys] of values [keys, width]: out, largest, lse.

    A row without a key, or with none but masked ones, has lse -inf here.
    """
    with np.errstate(all="ignore"):
        s = np.where(seen, logits, -np.inf)
        nan = (np.isnan(s) | (s > LARGEST_F32)).any(axis=1)
        nan |= (seen & ~np.isfinite(values).all(axis=1)).any(axis=1)
        s, values = np.where(nan[:, None], -np.inf, s), np.where(np.isfinite(values), values, 0)
        largest = s.max(axis=1, initial=-np.inf)
        p = np.exp(s - np.where(np.isfinite(largest), largest, 0)[:, None])
        total = p.sum(axis=1)
        lse = np.where(np.isfinite(largest), largest, 0) + np.log(total)
        out = p @ values / np.where(total > 0, total, 1)[:, None]
        if sink is not None:
            out /= np.where(np.isfinite(lse), 1 + np.exp(sink.astype(F64) - lse), 1)[:, None]
    out[nan], largest[nan], lse[nan] = np.nan, np.nan, np.nan
    return out, largest, lse


def poisoned_queries(q):
    """[rows]: a NaN or +inf is its own row's."""
    return (np.isnan(q) | np.isposinf(q)).any(axis=-1)


def assert_rows(found, wanted, rounding, what):
    """NaN and infinities exactly; numbers to `rounding` of themselves and of the largest."""
    found, wanted = np.asarray(found).astype(F64), np.asarray(wanted)
    number = np.isfinite(wanted)
    np.testing.assert_array_equal(found[~number], wanted[~number], err_msg=what)
    largest = np.abs(wanted[number]).max(initial=1)
    np.testing.assert_allclose(
        found[number], wanted[number], rtol=rounding, atol=rounding * largest, err_msg=what
    )


def assert_same_bits(found, wanted, rows, what):
    """The rows named, NaN or not."""
    raw = [np.ascontiguousarray(a[rows]).view(np.uint8) for a in (found, wanted)]
    np.testing.assert_array_equal(*raw, err_msg=what)


# mla.flash_mla


class Paged:
    """Sequences of a random batch over the pages of one cache, in no order."""

    def __init__(self, rng, most=70):
        self.head_dim = pick(rng, 576, 576, 512)
        self.kind = pick(rng, *KINDS[self.head_dim])
        self.dtype = pick(rng, *ROUNDING)
        self.page = pick(rng, 1, 3, 16, 64)
        self.batch, self.queries, self.heads = (int(rng.integers(1, n)) for n in (6, 5, 7))
        self.lengths = rng.integers(0, most, self.batch).astype(np.int32)
        self.lengths[rng.random(self.batch) < 0.2] = 0
        needed = -(-self.lengths // self.page)
        self.blocks = int(needed.sum()) + 2
        self.table = np.full((self.batch, int(needed.max()) + 1), 2**31 - 1, np.int32)
        order = iter(rng.permutation(self.blocks))
        for r, n in enumerate(needed):
            self.table[r, :n] = [next(order) for _ in range(n)]
        self.keys = rng.standard_normal((self.blocks * self.page, self.head_dim))
        self.q = rng.standard_normal((self.batch, self.queries, self.heads, self.head_dim))
        self.scale = self.head_dim**-0.5
        self.what = (
            f"{self.kind} {self.dtype} page {self.page} heads {self.heads} queries {self.queries} "
            f"lengths {self.lengths.tolist()}"
        )

    def slots(self, r):
        at = np.arange(self.lengths[r])
        return self.table[r, at // self.page].astype(int) * self.page + at % self.page

    def cache(self, poison=()):
        """The cache, numbers (slot, column, value) put in as its format holds them; its rows in float64."""
        cache = encode_rows(self.keys, self.page, self.kind)
        flat = cache.reshape(self.blocks, -1)
        for slot, column, value in poison:
            block, row = flat[slot // self.page], slot % self.page
            if self.kind in ("fp8_ds_mla", "fp8_ds_v4"):
                codes, size = (512, 656) if self.kind == "fp8_ds_mla" else (448, 576)
                if column < codes:
                    block[row * size + column] = 0x7F  # codes hold no infinity
                else:
                    at = (
                        row * size
                        + codes
                        + (16 if self.kind == "fp8_ds_mla" else 0)
                        + 2 * (column - codes)
                    )
                    block[at : at + 2] = np.array([value], ml_dtypes.bfloat16).view(np.uint8)
            else:
                block[row * self.head_dim + column] = value
        with np.errstate(invalid="ignore"):
            return cache, decode_rows(cache, self.head_dim)

    def queries_of(self, q):
        return q.astype(np.dtype(self.dtype))

    def sparse(self, q, cache, slots, lengths, sink):
        return flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, 512, softmax_scale=self.scale, indices=slots, attn_sink=sink,
            topk_length=lengths, is_fp8_kvcache=self.kind.startswith("fp8"),
        )

    def dense(self, q, cache, causal):
        return flash_mla.flash_mla_with_kvcache(
            q,
            cache,
            self.table,
            self.lengths,
            512,
            softmax_scale=self.scale,
            causal=causal,
            is_fp8_kvcache=self.kind.startswith("fp8"),
        )

    def seen(self, r, causal):
        """[queries, length]"""
        n, last = self.lengths[r], self.lengths[r] - self.queries + np.arange(self.queries)
        return np.arange(n) <= (last if causal else np.full(self.queries, n))[:, None]

    def dense_wanted(self, q, rows, causal):
        out = np.zeros((self.batch, self.queries, self.heads, 512))
        lse = np.zeros((self.batch, self.heads, self.queries))
        for r in range(self.batch):
            keys, seen = rows[self.slots(r)], self.seen(r, causal)
            for h in range(self.heads):
                out[r, :, h], _, lse[r, h] = attend_rows(q[r, :, h], keys, seen, self.scale)
        lse[np.isneginf(lse)] = np.inf  # FlashMLA's lse of nothing
        return out, lse


def attend_rows(q, keys, seen, scale, sink=None):
    """q [rows, head dim] and keys, in float64 or less."""
    q = q.astype(F64)
    with np.errstate(all="ignore"):
        logits = q @ keys.T * scale
    logits[poisoned_queries(q)] = np.nan
    return softmax_rows(logits, keys[:, :512], seen, sink)


def test_flash_mla_ragged_dense(poisoned):
    rng = np.random.default_rng(11)
    for round in range(200):
        case, causal = Paged(rng), bool(rng.integers(2))
        held = {int(s) for r in range(case.batch) for s in case.slots(r)}
        unused = [
            (s, int(c), np.nan)
            for s in range(case.blocks * case.page)
            if s not in held
            for c in (0, case.head_dim - 1)
        ]
        cache, rows = case.cache(unused)
        q = case.queries_of(case.q)
        out, lse = case.dense(q, cache, causal)
        wanted = case.dense_wanted(q, rows, causal)
        what = f"round {round}: {case.what}"
        assert_rows(out, wanted[0], ROUNDING[case.dtype], what)
        assert_rows(lse, wanted[1], ROUNDING[case.dtype], what)


def random_choice(rng, shape, count):
    """[batch, queries, topk] with unused entries, absurd ones and repeats; the lists' lengths or None."""
    slots = rng.integers(0, count, shape).astype(np.int32)
    slots[rng.random(shape) < 0.2] = -1
    slots[rng.random(shape) < 0.05] = 2**31 - 1
    slots[rng.random(shape[:2]) < 0.1] = -1
    lengths = rng.integers(0, shape[2] + 1, shape[0]).astype(np.int32)
    return slots, pick(rng, lengths, None)


def sparse_wanted(q, rows, slots, lengths, scale, sink):
    batch, queries, heads = q.shape[:3]
    out, largest = np.zeros((batch, queries, heads, 512)), np.zeros((batch, heads, queries))
    lse = np.zeros((batch, heads, queries))
    for r in range(batch):
        for i in range(queries):
            keys = rows[chosen(slots[r, i], None if lengths is None else lengths[r], len(rows))]
            out[r, i], largest[r, :, i], lse[r, :, i] = attend_rows(
                q[r, i], keys, np.ones((heads, len(keys)), bool), scale, sink
            )
    lse[np.isneginf(lse)] = np.inf
    return out, largest, lse


def test_flash_mla_ragged_sparse(poisoned):
    rng = np.random.default_rng(12)
    for round in range(200):
        case = Paged(rng, most=40)
        cache, rows = case.cache()
        q = case.queries_of(case.q)
        shape = (case.batch, case.queries, int(rng.integers(1, 50)))
        slots, lengths = random_choice(rng, shape, len(rows))
        sink = pick(rng, None, rng.standard_normal(case.heads).astype(np.float32))
        found = case.sparse(q, cache, slots, lengths, sink)
        out, _, lse = sparse_wanted(q, rows, slots, lengths, case.scale, sink)
        what = f"round {round}: {case.what} topk {shape[2]}"
        assert_rows(found[0], out, ROUNDING[case.dtype], what)
        assert_rows(found[1], lse, ROUNDING[case.dtype], what)


def test_flash_mla_ragged_sparse_fwd(poisoned):
    rng = np.random.default_rng(13)
    for round in range(100):
        rows, heads, count, topk = (int(rng.integers(1, n)) for n in (7, 7, 90, 60))
        dtype, head_dim = pick(rng, "float32", "bfloat16"), pick(rng, 576, 512)
        q = rng.standard_normal((rows, heads, head_dim)).astype(np.dtype(dtype))
        kv = rng.standard_normal((count, 1, head_dim)).astype(np.dtype(dtype))
        slots, lengths = random_choice(rng, (rows, 1, topk), count)
        sink = pick(rng, None, rng.standard_normal(heads).astype(np.float32))
        found = flash_mla.flash_mla_sparse_fwd(
            q, kv, slots, 0.05, attn_sink=sink, topk_length=lengths
        )
        out, largest, lse = sparse_wanted(
            q[:, None], kv[:, 0].astype(F64), slots, lengths, 0.05, sink
        )
        for name, f, w in zip(
            ("out", "max_logits", "lse"),
            found,
            (out[:, 0], largest[:, :, 0], lse[:, :, 0]),
            strict=True,
        ):
            assert_rows(
                f, w, ROUNDING[dtype], f"round {round}: {name} of {dtype}, {rows} rows, topk {topk}"
            )


def random_poison(rng, case, slots):
    """NaN and infinities for up to three places of the cache."""
    return [
        (int(s), int(rng.integers(case.head_dim)), pick(rng, np.nan, np.inf, -np.inf))
        for s in rng.choice(slots, min(len(slots), 3), replace=False)
    ]


def law_case(rng, masks):
    """A case, poison in its cache and queries. masks: keys whose logits are -inf for every query."""
    case = Paged(rng, most=40)
    while not case.lengths.any() or (masks and case.kind in ("float8_e4m3fn", "fp8_ds_v4")):
        case = Paged(rng, most=40)
    if case.kind == "float8_e4m3fn":
        poison = [(s, c, np.nan) for s, c, _ in random_poison(rng, case, np.arange(len(case.keys)))]
    else:
        poison = random_poison(rng, case, np.arange(len(case.keys)))
    q = case.q.copy()
    if masks:
        last = case.head_dim - 1  # no value's, of head dim 576
        if case.head_dim == 576:
            q[..., last] = np.abs(q[..., last]) + 0.1
            poison = [
                (int(s), last, -np.inf)
                for s in rng.choice(len(case.keys), len(case.keys) // 2, False)
            ]
        else:
            poison = []
    elif rng.integers(2):
        at = tuple(int(rng.integers(n)) for n in q.shape)
        q[at] = np.nan if case.dtype == "float8_e4m3fn" else pick(rng, np.nan, np.inf, -np.inf)
    return case, poison, case.queries_of(q)


@pytest.mark.parametrize("masks", [False, True])
def test_flash_mla_law_dense(poisoned, masks):
    rng = np.random.default_rng(14)
    bad = 0
    for round in range(120):
        case, poison, q = law_case(rng, masks)
        causal = bool(rng.integers(2))
        cache, rows = case.cache(poison)
        out, lse = case.dense(q, cache, causal)
        wanted = case.dense_wanted(q, rows, causal)
        what = f"round {round}: {case.what}, causal {causal}, {poison[:3]}"
        assert_rows(out, wanted[0], ROUNDING[case.dtype], what)
        assert_rows(lse, wanted[1], ROUNDING[case.dtype], what)
        bad += np.isnan(wanted[0]).any()
        clean, clean_lse = case.dense(
            case.queries_of(case.q) if not masks else q, case.cache()[0], causal
        )
        touched = np.zeros((case.batch, case.queries, case.heads), bool)
        for r in range(case.batch):
            hit = np.isin(case.slots(r), [s for s, _, _ in poison])
            touched[r] = (case.seen(r, causal) & hit).any(axis=1)[:, None]
        touched |= ~np.isfinite(q.astype(F64)).all(axis=-1)
        assert_same_bits(out, clean, ~touched, what)
        assert_same_bits(lse.transpose(0, 2, 1), clean_lse.transpose(0, 2, 1), ~touched, what)
    assert masks or bad > 40


@pytest.mark.parametrize("masks", [False, True])
def test_flash_mla_law_sparse(poisoned, masks):
    rng = np.random.default_rng(15)
    bad = 0
    for round in range(120):
        case, poison, q = law_case(rng, masks)
        slots, lengths = random_choice(
            rng, (case.batch, case.queries, int(rng.integers(1, 30))), len(case.keys)
        )
        sink = pick(rng, None, rng.standard_normal(case.heads).astype(np.float32))
        cache, rows = case.cache(poison)

        def run(q, cache, case=case, slots=slots, sink=sink, lengths=lengths):
            return case.sparse(q, cache, slots, lengths, sink)

        out, lse = run(q, cache)
        wanted = sparse_wanted(q, rows, slots, lengths, case.scale, sink)
        what = f"round {round}: {case.what}, {poison[:3]}"
        assert_rows(out, wanted[0], ROUNDING[case.dtype], what)
        assert_rows(lse, wanted[2], ROUNDING[case.dtype], what)
        bad += np.isnan(wanted[0]).any()
        clean, clean_lse = run(case.queries_of(case.q) if not masks else q, case.cache()[0])
        touched = np.array(
            [
                [
                    np.isin(
                        chosen(slots[r, i], None if lengths is None else lengths[r], len(rows)),
                        [s for s, _, _ in poison],
                    ).any()
                    for i in range(case.queries)
                ]
                for r in range(case.batch)
            ]
        )[..., None]
        touched = touched | ~np.isfinite(q.astype(F64)).all(axis=-1)
        assert_same_bits(out, clean, ~touched, what)
        assert_same_bits(lse.transpose(0, 2, 1), clean_lse.transpose(0, 2, 1), ~touched, what)
    assert masks or bad > 40


# mla.plan, attend and forward


def tiny_model(heads, latent=64, rope=32):
    model = mla.preset("deepseek-v2-lite")
    model.hidden, model.heads, model.latent, model.rope = 48, heads, latent, rope
    model.nope, model.value = 16, 24
    return model


# The largest error over the largest output: f32's rounding, and a cached row's. e4m3 keeps 4 bits.
TOLERANCE = {"f32": 3e-5, "bf16": 2e-2, "f16": 4e-3, "fp8": 1e-1, "fp8_ds_mla": 1e-1}
LATENTS = {"fp8_ds_mla": (512, 64)}
POSITIONS = 80


class Layer:
    """A layer with everything that a step needs, made once for many batches."""

    def __init__(self, heads, form):
        self.form, self.model = form, tiny_model(heads, *LATENTS.get(form, ()))
        tensors = mla.random_layer(self.model, 0, 3, "f32")
        self.w = {k: v.astype(F64) for k, v in tensors.arrays().items()}
        self.weights = mla.prepare(self.model, tensors, dtype="f32")
        self.rotary = mla.RotaryTable(self.model, POSITIONS)

    def attention(self, q, kv_c, k_pe, begin):
        """Rows q of positions from `begin`, of one request's latents: [rows, heads, value], by the law."""
        m = self.model
        up = self.w["kv_up"].reshape(m.heads, m.nope + m.value, m.latent)
        out = np.zeros((len(q), m.heads, m.value))
        seen = np.arange(len(kv_c)) <= begin + np.arange(len(q))[:, None]
        for h in range(m.heads):
            with np.errstate(all="ignore"):
                k, v = kv_c @ up[h, : m.nope].T, kv_c @ up[h, m.nope :].T
                logits = (q[:, h, : m.nope] @ k.T + q[:, h, m.nope :] @ k_pe.T) * m.softmax_scale
            logits[poisoned_queries(q[:, h])] = np.nan
            v[~np.isfinite(kv_c).all(axis=1)] = np.nan
            out[:, h] = softmax_rows(logits, v, seen)[0]
        return out


class Requests:
    """Requests of random lengths, and their pages in one cache."""

    def __init__(self, rng, layer):
        self.layer, self.page = layer, pick(rng, 1, 3, 16, 64)
        self.lengths = rng.integers(1, POSITIONS // 2, int(rng.integers(1, 6)))
        columns = int(-(-self.lengths.max() // self.page))
        self.table = rng.permutation(len(self.lengths) * columns).reshape(
            len(self.lengths), columns
        )
        self.table = self.table.astype(np.int32)
        spec = mla.cache_spec(layer.model, layer.form, self.page)
        self.cache = mla.Cache(spec, self.table.size)
        self.done = np.zeros(len(self.lengths), int)

    def steps(self, rng):
        """Until every token is done: (begin, end) of every request that is in the step, in random order."""
        while (self.done < self.lengths).any():
            new = [min(pick(rng, 1, 1, 2, 7, 40), int(n)) for n in self.lengths - self.done]
            chosen = [r for r in rng.permutation(len(new)) if new[r] and rng.random() < 0.8]
            yield [(r, int(self.done[r]), int(self.done[r]) + new[r]) for r in chosen]
            for r in chosen:
                self.done[r] += new[r]

    def plan(self, parts, stream, path, split):
        slots = [
            self.table[r, t // self.page] * self.page + t % self.page
            for r, begin, end in parts
            for t in range(begin, end)
        ]
        starts = np.cumsum([0] + [end - begin for _, begin, end in parts])
        batch = mla.Batch(
            starts.astype(np.int32),
            np.array([end for *_, end in parts], np.int32),
            np.ascontiguousarray(self.table[[r for r, *_ in parts]]),
            np.array(slots, np.int32),
        )
        return mla.plan(
            self.layer.model,
            self.cache,
            batch,
            stream=stream,
            options=mla.PlanOptions(path=path, split=split),
        )


def rows_of(parts, of):
    return np.concatenate([of[r][begin:end] for r, begin, end in parts])


def padded(rows, most):
    """NaN rows after the step's: neither read nor written."""
    out = np.full((most, *rows.shape[1:]), np.nan, np.float32)
    out[: len(rows)] = rows
    return out


@pytest.fixture(scope="module")
def layers():
    return [Layer(heads, form) for form in TOLERANCE for heads in (1, 3)]


def assert_close(out, wanted, tolerance, what):
    number = np.isfinite(wanted)
    np.testing.assert_array_equal(np.isnan(out), ~number, err_msg=what)
    error = np.abs(out[number] - wanted[number]).max(initial=0)
    assert error <= tolerance * np.abs(wanted[number]).max(initial=1e-3), f"{what}: {error}"


def random_options(rng, streams):
    return (
        pick(rng, *streams),
        pick(rng, "automatic", "latent", "expanded"),
        pick(rng, "fast", "batch_invariant"),
    )


def test_forward_ragged(layers, streams):
    rng = np.random.default_rng(16)
    batches = 0
    while batches < 250:
        layer = pick(rng, *layers)
        requests = Requests(rng, layer)
        hidden = [rng.standard_normal((n, layer.model.hidden)) for n in requests.lengths]
        wanted = []
        for h in hidden:
            q, kv_c, k_pe = layer_inputs(layer.model, layer.w, h, np.arange(len(h)))
            wanted.append(
                layer.attention(q, kv_c, k_pe, 0).reshape(len(h), -1) @ layer.w["output"].T
            )
        for parts in requests.steps(rng):
            if not parts:
                continue
            batches += 1
            stream, path, split = random_options(rng, streams)
            step = requests.plan(parts, stream, path, split)
            x = rows_of(parts, hidden)
            out = np.full((len(x) + 2, x.shape[1]), np.nan, np.float32)
            found = mla.forward(
                step,
                layer.weights,
                layer.rotary,
                requests.cache,
                padded(x, len(out)),
                out,
                stream=stream,
            )
            what = f"{layer.form}, {layer.model.heads} heads, pages of {requests.page}, {path}, {split}, {parts}"
            assert found is out and np.isnan(out[len(x) :]).all(), what
            assert_close(out[: len(x)], rows_of(parts, wanted), TOLERANCE[layer.form], what)


@pytest.mark.parametrize("law", [False, True])
def test_attend_ragged(layers, streams, law):
    """law: NaN, infinities and -inf logits in the inputs; bits beside them are as without."""
    rng = np.random.default_rng(17 + law)
    batches = bad = masked = 0
    exact = [layer for layer in layers if layer.form in ("f32", "bf16", "f16")]
    while batches < 150:
        layer = pick(rng, *(exact if law else layers))
        m, clean = layer.model, Requests(rng, layer)
        arrays = [
            [rng.standard_normal((n, *shape)).astype(np.float32) for n in clean.lengths]
            for shape in ((m.heads, m.nope + m.rope), (m.latent,), (m.rope,))
        ]
        # The last column of a rotated key is masked through queries that are positive there.
        for q in arrays[0]:
            q[..., -1] = np.abs(q[..., -1]) + 0.1
        given = [[a.copy() for a in array] for array in arrays]
        if law:
            for _ in range(int(rng.integers(1, 3))):
                r, kind = int(rng.integers(len(clean.lengths))), int(rng.integers(4))
                t = int(rng.integers(clean.lengths[r]))
                if kind < 3:
                    given[kind][r][t].flat[int(rng.integers(given[kind][r][t].size))] = pick(
                        rng, np.nan, np.inf, -np.inf
                    )
                else:
                    given[2][r][t, -1] = -np.inf
        dirty = Requests.__new__(Requests)
        dirty.__dict__ = dict(clean.__dict__, cache=mla.Cache(clean.cache.spec, clean.table.size))
        element = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}.get(layer.form, np.float32)
        held = [[a.astype(element).astype(F64) for a in array] for array in given[1:]]
        for parts in clean.steps(rng):
            if not parts:
                continue
            batches += 1
            stream, path, split = random_options(rng, streams)
            outs = []
            for requests, inputs in ((dirty, given), (clean, arrays)):
                step = requests.plan(parts, stream, path, split)
                q, kv_c, k_pe = (rows_of(parts, a) for a in inputs)
                out = np.full((len(q) + 2, m.heads, m.value), np.nan, np.float32)
                mla.attend(
                    step,
                    layer.weights,
                    layer.rotary,
                    requests.cache,
                    padded(q, len(out)),
                    padded(kv_c, len(out)),
                    padded(k_pe, len(out)),
                    out,
                    stream=stream,
                )
                outs.append(out)
                if not law:
                    break
            rows = len(q)
            wanted = np.concatenate(
                [
                    layer.attention(
                        given[0][r][begin:end].astype(F64),
                        held[0][r][:end],
                        held[1][r][:end],
                        begin,
                    )
                    for r, begin, end in parts
                ]
            )
            what = f"{layer.form}, {m.heads} heads, pages of {clean.page}, {path}, {split}, {parts}"
            assert np.isnan(outs[0][rows:]).all(), what
            assert_close(outs[0][:rows], wanted, TOLERANCE[layer.form], what)
            if law:
                bad += np.isnan(wanted).any()
                touched = np.concatenate(
                    [
                        np.array(
                            [~np.isfinite(given[0][r][t]).all(axis=-1) for t in range(begin, end)]
                        )
                        | np.array(
                            [
                                not all(np.isfinite(a[r][: t + 1]).all() for a in held)
                                for t in range(begin, end)
                            ]
                        )[:, None]
                        for r, begin, end in parts
                    ]
                )
                masked += (touched & ~np.isnan(wanted).any(axis=-1)).any()
                assert_same_bits(outs[0][:rows], outs[1][:rows], ~touched, what)
    assert not law or (bad > 20 and masked > 10), (bad, masked)


def test_forward_law(layers, streams):
    """A hidden state that is no number: NaN from its token on, in its request, and no other bit moves."""
    rng = np.random.default_rng(19)
    for round in range(60):
        layer = pick(rng, *layers)
        requests = Requests(rng, layer)
        hidden = [
            rng.standard_normal((n, layer.model.hidden)).astype(np.float32)
            for n in requests.lengths
        ]
        given = [h.copy() for h in hidden]
        r = int(rng.integers(len(hidden)))
        t = int(rng.integers(len(hidden[r])))
        given[r][t, int(rng.integers(layer.model.hidden))] = pick(rng, np.nan, np.inf, -np.inf)
        parts = [(i, 0, int(n)) for i, n in enumerate(requests.lengths)]
        stream, path, split = random_options(rng, streams)
        step = requests.plan(parts, stream, path, split)
        outs = [
            mla.forward(
                step, layer.weights, layer.rotary, requests.cache, rows_of(parts, x), stream=stream
            )
            for x in (given, hidden)
        ]
        nan = np.concatenate(
            [(np.arange(n) >= t) & (i == r) for i, n in enumerate(requests.lengths)]
        )
        what = f"round {round}: {layer.form}, {path}, {split}, request {r} token {t} of {requests.lengths}"
        assert np.isnan(outs[0][nan]).all() and np.isfinite(outs[0][~nan]).all(), what
        assert_same_bits(*outs, ~nan, what)
