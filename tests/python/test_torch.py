"""torch tensors and custom operators, on the CPU. scripts/gpu-python.py has the GPU's."""

import gc
import resource
import subprocess
import sys
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch", minversion="2.4")

from torch import library  # noqa: E402

import mla  # noqa: E402
import mla.torch  # noqa: E402
from mla.flash_mla import (  # noqa: E402
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
)

OPS = torch.ops.mla


def dense_arguments(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 3, 5, 576, generator=generator).to(dtype)
    cache = torch.randn(6, 16, 1, 576, generator=generator).bfloat16()
    table = torch.tensor([[1, 4, 0], [2, 3, 5]], dtype=torch.int32)
    return q, cache, table, torch.tensor([40, 7], dtype=torch.int32)


def sparse_arguments(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(4, 5, 576, generator=generator).to(dtype)
    kv = torch.randn(30, 1, 576, generator=generator).bfloat16()
    indices = torch.randint(-1, 30, (4, 1, 12), generator=generator, dtype=torch.int32)
    return q, kv, indices, 0.05


def varlen_arguments(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((9, 4, 192), (14, 2, 192), (14, 2, 128))
    )
    begins = (torch.tensor(b, dtype=torch.int32) for b in ([0, 2, 9], [0, 7, 14]))
    return q, k, v, *begins, 7, 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sequences_of_tensors_give_what_arrays_give(dtype):
    arguments = varlen_arguments(dtype)
    out, lse = flash_attn_varlen_func(*arguments, causal=True)
    assert out.dtype is dtype and lse.dtype is torch.float32
    assert out.is_contiguous() and lse.stride() == (1, 9)
    wanted, wanted_lse = flash_attn_varlen_func(
        *(a.float().numpy() for a in arguments[:3]), *(a.numpy() for a in arguments[3:5]), 7, 7,
        causal=True,
    )
    bound = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2e-2}[dtype]
    np.testing.assert_allclose(out.float().numpy(), wanted, atol=bound, rtol=bound)
    np.testing.assert_allclose(lse.numpy(), wanted_lse, atol=bound, rtol=bound)
    for found, same in zip(
        OPS.flash_attn_varlen_func(*arguments, causal=True), (out, lse), strict=True
    ):
        assert torch.equal(found, same)


def test_a_gradient_of_sequences_is_refused():
    q, k, v, q_begins, k_begins, *most = varlen_arguments(torch.float32)
    rest = q_begins, k_begins, *most
    plain, _ = flash_attn_varlen_func(q, k, v, *rest)
    kv, qkv = torch.cat([k, v], 2), torch.cat([k, k, v], 2)
    calls = {
        "flash_attn_varlen_func": lambda: flash_attn_varlen_func(q, k, v, *rest),
        "flash_attn_varlen_kvpacked_func":
            lambda: flash_attn_varlen_kvpacked_func(q, kv, *rest, 192),
        "flash_attn_varlen_qkvpacked_func":
            lambda: flash_attn_varlen_qkvpacked_func(qkv, k_begins, 7, 192),
    }
    asked = {
        "flash_attn_varlen_func": (q, k, v), "flash_attn_varlen_kvpacked_func": (q, kv),
        "flash_attn_varlen_qkvpacked_func": (qkv,),
    }
    for name, call in calls.items():
        assert not call()[0].requires_grad
        for tensor in asked[name]:
            tensor.requires_grad_()
            for result in call():
                with pytest.raises(mla.UnsupportedError, match=f"^{name}: has no gradient"):
                    result.sum().backward()
            tensor.requires_grad_(False)
    q.requires_grad_()
    assert torch.equal(flash_attn_varlen_func(q, k, v, *rest)[0], plain)
    with torch.no_grad():
        assert not flash_attn_varlen_func(q, k, v, *rest)[0].requires_grad
    out, _ = OPS.flash_attn_varlen_func(q, k, v, *rest)
    with pytest.raises(mla.UnsupportedError, match="flash_attn_varlen_func: has no gradient"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_give_what_arrays_give(dtype):
    q, cache, table, lengths = dense_arguments(dtype)
    out, lse = flash_mla_with_kvcache(q, cache, table, lengths, causal=True)
    assert out.dtype is dtype and lse.dtype is torch.float32
    wanted, wanted_lse = flash_mla_with_kvcache(
        q.float().numpy(), cache.float().numpy(), table.numpy(), lengths.numpy(), causal=True
    )
    bound = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    np.testing.assert_allclose(out.float().numpy(), wanted, atol=bound, rtol=bound)
    np.testing.assert_allclose(lse.numpy(), wanted_lse, atol=bound, rtol=bound)


def test_descales_are_tensors_of_one_element():
    q, cache, table, lengths = (t.clone() for t in dense_arguments())
    q, cache = q.to(torch.float8_e4m3fn), cache.to(torch.float8_e4m3fn)
    scales = dict(descale_q=torch.tensor([0.4]), descale_k=torch.tensor([1.5]))
    out, lse = OPS.flash_mla_with_kvcache(q, cache, table, lengths, causal=True, **scales)
    wanted, wanted_lse = flash_mla_with_kvcache(
        q.float().numpy() * np.float32(0.4), cache.float().numpy() * np.float32(1.5),
        table.numpy(), lengths.numpy(), causal=True,
    )
    assert out.dtype is torch.bfloat16
    np.testing.assert_allclose(out.float().numpy(), wanted, atol=2e-2, rtol=2e-2)
    np.testing.assert_allclose(lse.numpy(), wanted_lse, atol=1e-3, rtol=1e-3)


def test_a_layer_of_f16_tensors():
    model = mla.preset("deepseek-v2-lite")
    weights = mla.prepare(model, mla.random_layer(model, dtype="f32"), dtype="f32")
    rotary, cache = mla.RotaryTable(model, positions=64), mla.Cache(mla.cache_spec(model, "f16", 16), 2)
    batch = mla.Batch([0, 5], [5], torch.zeros(1, 1, dtype=torch.int32), list(range(5)))
    hidden = torch.randn(5, model.hidden, generator=torch.Generator().manual_seed(3)).half()
    wanted = mla.forward(mla.plan(model, cache, batch), weights, rotary, cache, hidden.float())
    options = mla.PlanOptions(activation_dtype="f16")
    step = mla.plan(model, cache, batch, options=options)
    out = mla.forward(step, weights, rotary, cache, hidden)
    assert out.dtype is torch.float16 and torch.equal(out, wanted.half())
    with pytest.raises(mla.ShapeError, match="hidden is bf16, plan was made for activations of f16"):
        mla.forward(step, weights, rotary, cache, hidden.bfloat16())


def test_bad_tensors_are_refused_in_words():
    q, cache, table, lengths = dense_arguments()
    with pytest.raises(mla.ShapeError, match="block_table: is int64, int32 is needed"):
        flash_mla_with_kvcache(q, cache, table.long(), lengths)
    with pytest.raises(mla.ShapeError, match="q: lies|q: is an array that exports no memory"):
        flash_mla_with_kvcache(q.to("meta"), cache, table, lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_custom_operators(dtype):
    dense, sparse = dense_arguments(dtype), sparse_arguments(dtype)
    library.opcheck(OPS.flash_mla_with_kvcache, dense)
    library.opcheck(OPS.flash_attn_varlen_func, varlen_arguments(dtype))
    library.opcheck(OPS.flash_mla_sparse_fwd, sparse)
    for found, wanted in zip(
        OPS.flash_mla_sparse_fwd(*sparse), flash_mla_sparse_fwd(*sparse), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_is_refused(compiled):
    q, *rest = dense_arguments(torch.float32)
    plain, _ = OPS.flash_mla_with_kvcache(q, *rest)
    q.requires_grad_()
    sparse = sparse_arguments(torch.float32)
    sparse[1].requires_grad_()
    if compiled:
        with pytest.raises((mla.UnsupportedError, RuntimeError), match="has no gradient"):
            call = torch.compile(OPS.flash_mla_with_kvcache, fullgraph=True, backend="aot_eager")
            call(q, *rest)[0].sum().backward()
        return
    out, _ = OPS.flash_mla_with_kvcache(q, *rest)
    assert torch.equal(out, plain)  # calls that ask for no gradient are as before
    with pytest.raises(mla.UnsupportedError, match="flash_mla_with_kvcache: has no gradient"):
        out.sum().backward()
    out, _, _ = OPS.flash_mla_sparse_fwd(*sparse)
    with pytest.raises(mla.UnsupportedError, match="flash_mla_sparse_fwd: has no gradient"):
        out.sum().backward()
    out, _ = mla.torch.flash_mla_with_kvcache(q, *rest)
    assert torch.equal(out, plain)
    with pytest.raises(mla.UnsupportedError, match="flash_mla_with_kvcache: has no gradient"):
        out.sum().backward()
    with torch.no_grad():
        assert not OPS.flash_mla_with_kvcache(q, *rest)[0].requires_grad


def test_nothing_is_alive_at_exit():
    script = (
        "import torch, mla.torch\n"
        "out, _ = torch.ops.mla.flash_mla_with_kvcache(\n"
        "    torch.ones(1, 1, 4, 576), torch.ones(1, 4, 1, 576),\n"
        "    torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_fake_tensors_have_the_shapes_of_real_ones():
    for op, arguments in (
        (OPS.flash_mla_with_kvcache, dense_arguments()),
        (OPS.flash_mla_sparse_fwd, sparse_arguments()),
        (OPS.flash_attn_varlen_func, varlen_arguments()),
    ):
        real = op(*arguments)
        fake = op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
        for r, f in zip(real, fake, strict=True):
            assert f.is_meta and f.shape == r.shape and f.dtype == r.dtype
            assert f.stride() == r.stride()


def test_slices_of_larger_tensors_are_taken():
    q, cache, table, lengths = dense_arguments()
    whole = torch.full((3, 4, 6, 704), torch.nan, dtype=q.dtype)
    view = whole[:2, :3, :5, :576].copy_(q)
    for op in (flash_mla_with_kvcache, OPS.flash_mla_with_kvcache):
        for found, wanted in zip(
            op(view, cache, table, lengths, causal=True),
            op(q, cache, table, lengths, causal=True), strict=True,
        ):
            assert torch.equal(found, wanted)


def test_compiled_without_a_graph_break():
    arguments = dense_arguments()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*tensors):
        out, lse = OPS.flash_mla_with_kvcache(*tensors)
        return out * 2, lse

    out, lse = compiled(*arguments)
    wanted, wanted_lse = flash_mla_with_kvcache(*arguments)
    assert torch.equal(out, wanted * 2) and torch.equal(lse, wanted_lse)


def test_a_call_costs_less_than_ten_microseconds():
    """Of a batch without requests: all that is left is the binding."""
    q, cache, table, lengths = dense_arguments()
    arguments = q[:0], cache, table[:0], lengths[:0]
    best = np.inf
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(500):
            flash_mla_with_kvcache(*arguments)
        best = min(best, (time.perf_counter() - start) / 500)
    print(f"\nflash_mla_with_kvcache of nothing: {1e6 * best:.2f} us")
    assert best < 10e-6


def test_calls_leave_nothing_behind():
    arguments = dense_arguments()
    sparse = sparse_arguments()[:3]
    watched = [*arguments, *sparse]

    def work(times):
        for _ in range(times):
            flash_mla_with_kvcache(*arguments)
            flash_mla_sparse_fwd(*sparse, 0.05)
            with pytest.raises(mla.ShapeError):
                flash_mla_with_kvcache(*arguments[:3], arguments[3] + 1000)

    work(200)
    gc.collect()
    references = [sys.getrefcount(x) for x in watched]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work(1000)
    gc.collect()
    assert [sys.getrefcount(x) for x in watched] == references
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 4096  # KiB
