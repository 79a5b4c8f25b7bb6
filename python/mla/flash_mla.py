"""FlashMLA's calls, with its arguments and conventions, over any head count, page size and topk.

    from mla.flash_mla import flash_mla_with_kvcache, get_mla_metadata, flash_mla_sparse_fwd
    from mla.flash_mla import flash_attn_varlen_func  # also _kvpacked_func, _qkvpacked_func

Log-sum-exps are natural logarithms. A row that sees nothing has out 0 and lse +inf, and max_logits
-inf; in the flash_attn calls its lse is -inf, as it is in FlashMLA's. Attention sinks change out,
never lse. out has q's dtype, and is bf16 for fp8 queries. f16 queries: on a CPU they are attended
as f32. A GPU multiplies them as they are with f16 rows of a cache or f16 keys, the keys by kernels
that are not Hopper's own and slower, and as f32, slower still, with rows of other dtypes.

Arrays lie in CPU memory (NumPy, torch, JAX) or on a GPU (torch, CuPy; JAX's calls wait there). On a
GPU a call is queued on the framework's current stream; lengths, tables and indices are read by the
GPU alone, so that nothing waits, calls can be captured in CUDA graphs once a call of the same kind
has been made outside, and a graph serves other lengths and tables of the same shapes. Outputs and
working memory come from the framework's allocator. What the GPU alone reads is not checked: lengths
count up to what their table or list holds, and pages must be the cache's.
"""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass, field
from typing import Any

from . import _mla
from ._arrays import (
    cast,
    empty,
    finish,
    place,
    require_array,
    require_rank,
    settle,
    without_gradient,
)

InputError = _mla.InputError
ShapeError = _mla.ShapeError
UnsupportedError = _mla.UnsupportedError

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]


@dataclass(frozen=True)
class FlashMLASchedMeta:
    """A schedule. On a GPU dense calls that are captured together, on one stream, and given the
    same one share it: cache_seqlens and block_table must hold the same numbers for all of them, as
    in the layers of a step. A graph makes it anew at every launch. Other calls plan by themselves,
    and it serves any shape.
    """

    schedule: Any = field(default_factory=_mla.Schedule, repr=False, compare=False)

    def __reduce__(self) -> Any:
        return FlashMLASchedMeta, ()  # a copy is another one


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """What flash_mla_with_kvcache takes as tile_scheduler_metadata and num_splits. Within a capture
    a new one is needed whenever cache_seqlens or block_table change."""
    return FlashMLASchedMeta(), None


def _require_width(name: str, width: Any, most: int, what: str = "the head") -> None:
    try:
        usable = 0 < operator.index(width) <= most
    except TypeError:
        usable = False
    if not usable:
        raise ShapeError(f"{name}: is {width!r:.60}, allowed 1 to {most}, {what} dim")


# f32's normal numbers, which scales are passed on as.
_LEAST_SCALE, _MOST_SCALE = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def _require_scale(name: str, scale: Any) -> None:
    try:
        if _LEAST_SCALE <= scale <= _MOST_SCALE:
            return
        found = f"{float(scale)!r}"
    except OverflowError:
        found = "past every float"
    except (TypeError, ValueError):
        found = f"{scale!r:.60}"
    raise InputError(
        f"{name}: is {found}, a positive number is needed, {_LEAST_SCALE:.6g} to {_MOST_SCALE:.6g}"
    )


def _require_format(name: str, cache: Any, head_dim: int, is_fp8: bool) -> None:
    fp8 = cache.dtype.itemsize == 1
    if is_fp8 and not fp8:
        raise ShapeError(f"{name}: is {cache.dtype}, is_fp8_kvcache says 8-bit elements")
    if fp8 and not is_fp8 and cache.shape[-1] != head_dim:
        raise ShapeError(f"{name}: rows of {cache.shape[-1]} bytes need is_fp8_kvcache=True")


def _empty_out(q: Any, shape: tuple[int, ...]) -> Any:
    return empty(q, shape, "bfloat16" if q.dtype.itemsize == 1 else None)


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int = 512,
    tile_scheduler_metadata: Any = None,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
    descale_q: Any = None,
    descale_k: Any = None,
) -> tuple[Any, Any]:
    """Attention of latent queries over a paged cache: all of each sequence, or the slots chosen.

    q: [batch, queries, heads, head dim], f32, bf16, f16 or fp8 e4m3. k_cache: [blocks, page, KV
    heads, row]: rows of head dim elements (f32, bf16, f16, fp8 e4m3), or bytes: 656 for head dim
    576 (fp8_ds_mla), 584 for head dim 512 (fp8_ds_v4); these need is_fp8_kvcache. q and indices may
    be views of larger arrays whose last dimension is dense; a page's rows lie dense.

    Dense: block_table [batch, columns] and cache_seqlens [batch], int32; causal: queries are the
    sequence's last. KV heads, one or as many as divide heads: head h attends to the rows of KV head
    h // (heads // KV heads); fp8_ds_v4 has one. Sparse, with one KV head: indices [batch, queries,
    topk] int32, slots page * page_size + offset, those below 0 or past the cache unused; the first
    topk_length[batch] of them count; attn_sink [heads]; a second cache with indices and lengths of
    its own joins the same softmax.

    descale_q, descale_k: f32 arrays of one element on q's device, for dense attention: what an fp8
    e4m3 q and an fp8 e4m3 k_cache are multiplied by, as FlashMLA's fp8 call has it; by default 1. A
    GPU reads them itself, so that a captured call serves other scales.

    tile_scheduler_metadata: of get_mla_metadata(), for the layers of a captured step: they then
    share a schedule, and cache_seqlens and block_table must not change between them.

    softmax_scale: by default head dim ** -0.5. Returns out [batch, queries, heads, head_dim_v] and
    lse f32 [batch, heads, queries].
    """
    if getattr(q, "ndim", None) != 4 or not hasattr(q, "dtype"):
        require_array("q", q, "[batch, queries, heads, head dim]")
    if getattr(k_cache, "ndim", None) != 4 or not hasattr(k_cache, "dtype"):
        require_array("k_cache", k_cache, "[blocks, page, KV heads, row]")
    batch, queries, heads, head_dim = q.shape
    _require_width("head_dim_v", head_dim_v, head_dim)
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    else:
        _require_scale("softmax_scale", softmax_scale)
    if is_fp8_kvcache != (k_cache.dtype.itemsize == 1):
        _require_format("k_cache", k_cache, head_dim, is_fp8_kvcache)
    if extra_k_cache is not None:
        require_array("extra_k_cache", extra_k_cache, "[blocks, page, 1, row]")
        _require_format("extra_k_cache", extra_k_cache, head_dim, is_fp8_kvcache)
    stream, allocate, half = place(q)
    if half and allocate is None:
        if descale_q is not None:
            raise UnsupportedError("descale_q: q is f16, fp8 e4m3 queries have one")
        q = cast(q, "float32")
        out, lse = flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, head_dim_v, None, None, softmax_scale, causal,
            is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache,
            topk_length, extra_topk_length, descale_q, descale_k,
        )
        return cast(out, "float16"), lse
    if "jax" in sys.modules:
        settle(
            q, k_cache, block_table, cache_seqlens, indices, attn_sink, extra_k_cache,
            extra_indices_in_kvcache, topk_length, extra_topk_length, descale_q, descale_k,
        )
    out = _empty_out(q, (batch, queries, heads, head_dim_v))
    lse = empty(q, (batch, heads, queries), "float32")
    if indices is None:
        if block_table is None or cache_seqlens is None:
            missing = "block_table" if block_table is None else "cache_seqlens"
            raise ShapeError(f"{missing}: is None, and needed without indices")
        if not (
            attn_sink is extra_k_cache is extra_indices_in_kvcache is None
            and topk_length is extra_topk_length is None
        ):
            given = {
                "attn_sink": attn_sink,
                "extra_k_cache": extra_k_cache,
                "extra_indices_in_kvcache": extra_indices_in_kvcache,
                "topk_length": topk_length,
                "extra_topk_length": extra_topk_length,
            }
            name = next(name for name, value in given.items() if value is not None)
            raise UnsupportedError(f"flash_mla: {name} is of sparse attention, without indices")
        meta = tile_scheduler_metadata
        _mla.flash_mla_dense(
            stream, q, k_cache, block_table, cache_seqlens, softmax_scale, causal, out, lse,
            descale_q=descale_q, descale_k=descale_k,
            schedule=meta.schedule if isinstance(meta, FlashMLASchedMeta) else None,
            allocate=allocate,
        )
        finish(q)
        return out, lse
    if causal:
        raise UnsupportedError("flash_mla: causal is True, with indices it must be False")
    if not (descale_q is descale_k is None):
        name = "descale_k" if descale_q is None else "descale_q"
        raise UnsupportedError(
            f"flash_mla: {name} is of dense attention, with indices it must be None"
        )
    require_rank("indices", indices, "[batch, queries, topk]")
    _mla.flash_mla_sparse(
        stream, q, k_cache, indices, softmax_scale, out, lse,
        attn_sink=attn_sink, topk_length=topk_length, extra_k_cache=extra_k_cache,
        extra_indices=extra_indices_in_kvcache, extra_topk_length=extra_topk_length,
        allocate=allocate,
    )
    finish(q)
    return out, lse


def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Any = None,
    topk_length: Any = None,
) -> tuple[Any, Any, Any]:
    """Attention of each query row over the rows of kv that it chose.

    q: [rows, heads, head dim]; kv: [kv rows, 1, head dim]; indices: [rows, 1, topk] int32, those
    below 0 or past kv unused; q and indices may be views of larger arrays whose last dimension is
    dense. topk_length: [rows] int32; attn_sink: [heads] f32. Returns out [rows, heads, d_v],
    max_logits and lse, f32 [rows, heads].
    """
    require_array("q", q, "[rows, heads, head dim]")
    require_rank("kv", kv, "[kv rows, 1, head dim]")
    require_rank("indices", indices, "[rows, 1, topk]")
    _require_scale("sm_scale", sm_scale)
    stream, allocate, half = place(q)
    if half and allocate is None:
        out, max_logits, lse = flash_mla_sparse_fwd(
            cast(q, "float32"), kv, indices, sm_scale, d_v, attn_sink, topk_length
        )
        return cast(out, "float16"), max_logits, lse
    rows, heads, head_dim = q.shape
    _require_width("d_v", d_v, head_dim)
    settle(q, kv, indices, attn_sink, topk_length)
    out = _empty_out(q, (rows, heads, d_v))
    max_logits = empty(q, (rows, heads), "float32")
    lse = empty(q, (rows, heads), "float32")
    _mla.flash_mla_sparse(
        stream, q, kv, indices, sm_scale, out, lse, max_logits=max_logits, attn_sink=attn_sink,
        topk_length=topk_length, allocate=allocate,
    )
    finish(q)
    return out, max_logits, lse


def _require_forward(name: str, dropout_p: Any, deterministic: Any) -> None:
    if dropout_p != 0.0:
        raise UnsupportedError(f"{name}: dropout_p is {dropout_p!r:.60}, it must be 0")
    if deterministic:
        raise UnsupportedError(f"{name}: deterministic is of the backward pass, it must be False")


def _most(name: str, value: Any) -> int:
    try:
        most = operator.index(value)
    except TypeError:
        most = -1
    if not 0 <= most < 2**31:
        raise ShapeError(f"{name}: is {value!r:.60}, allowed 0 to {2**31 - 1}")
    return most


def attend_sequences(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_qo: Any,
    cu_seqlens_kv: Any,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_varlen: bool = True,
) -> tuple[Any, Any]:
    """flash_attn_varlen_func of tensors whose gradients are someone else's to refuse."""
    require_array("q", q, "[rows, heads, head dim]")
    require_array("k", k, "[keys, KV heads, head dim]")
    require_array("v", v, "[keys, KV heads, value dim]")
    require_array("cu_seqlens_qo", cu_seqlens_qo, "[sequences + 1]")
    require_array("cu_seqlens_kv", cu_seqlens_kv, "[sequences + 1]")
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise ShapeError(f"{name}: is {array.dtype}, q is {q.dtype}")
    rows, heads, head_dim = q.shape
    if head_dim == 0:
        raise ShapeError("q: has head dim 0, at least 1 is needed")
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    else:
        _require_scale("softmax_scale", softmax_scale)
    longest = _most("max_seqlen_qo", max_seqlen_qo), _most("max_seqlen_kv", max_seqlen_kv)
    sequences = cu_seqlens_qo.shape[0] - 1
    if sequences < 0:
        raise ShapeError("cu_seqlens_qo: has no element, it begins with a 0")
    stream, allocate, half = place(q)
    if half and allocate is None:
        out, lse = attend_sequences(
            cast(q, "float32"), cast(k, "float32"), cast(v, "float32"), cu_seqlens_qo,
            cu_seqlens_kv, *longest, softmax_scale, causal, is_varlen,
        )
        return cast(out, "float16"), lse
    out = empty(q, (rows, heads, v.shape[2]))
    lse = empty(q, (heads, rows), "float32").T
    settle(q, k, v, cu_seqlens_qo, cu_seqlens_kv, lse)
    _mla.flash_attn_varlen(
        stream, q, k, v, cu_seqlens_qo if is_varlen else None, cu_seqlens_kv if is_varlen else None,
        sequences, *longest, softmax_scale, causal, out, lse, allocate=allocate,
    )
    finish(q)
    return out, lse


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_qo: Any,
    cu_seqlens_kv: Any,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Any, Any]:
    """Attention of sequences that lie one after another, each over keys and values of its own.

    q: [rows, heads, head dim]; k: [keys, KV heads, head dim]; v: [keys, KV heads, value dim]; all
    of one dtype, f32, bf16 or f16, and of any head dims, last dimension dense. KV heads divide
    heads: head h attends to KV head h // (heads // KV heads). Rows cu_seqlens_qo[i] to
    cu_seqlens_qo[i + 1] are a sequence's queries, and cu_seqlens_kv has its keys: int32 [sequences
    + 1] on q's device. A sequence may have no queries, or no keys. is_varlen=False: sequences are
    equally long, whatever cu_seqlens_* hold.

    causal: query i of n sees keys up to i + keys - n, the last query all of them.

    Returns out [rows, heads, value dim] in q's dtype and lse f32 [rows, heads], which lies [heads,
    rows]. A row that sees nothing has out 0 and lse -inf; rows of no sequence hold anything.

    max_seqlen_*: no sequence is longer; ShapeError on the CPU, where cu_seqlens_* are looked at. A
    GPU reads them itself and clamps them to the arrays; neither it nor a captured graph needs
    max_seqlen_*. Hopper has kernels of its own for bf16 and f16 with head dims of 192 and 128, or 256
    and 256; the rest runs those for every GPU. dropout_p other than 0 and deterministic=True are refused, and so is a backward
    pass: UnsupportedError.
    """
    _require_forward("flash_attn_varlen_func", dropout_p, deterministic)
    return without_gradient(
        "flash_attn_varlen_func",
        lambda q, k, v: attend_sequences(
            q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, softmax_scale,
            causal, is_varlen,
        ),
        q, k, v,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Any, Any]:
    """flash_attn_varlen_func of qkv [rows, heads, 2 head_dim_qk + value dim]: q, k, v in turn."""
    _require_forward("flash_attn_varlen_qkvpacked_func", dropout_p, deterministic)
    require_array("qkv", qkv, "[rows, heads, 2 head_dim_qk + value dim]")
    _require_width("head_dim_qk", head_dim_qk, qkv.shape[2] // 2, "half of qkv's last")
    return without_gradient(
        "flash_attn_varlen_qkvpacked_func",
        lambda qkv: attend_sequences(
            qkv[:, :, :head_dim_qk], qkv[:, :, head_dim_qk : 2 * head_dim_qk],
            qkv[:, :, 2 * head_dim_qk :], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
            softmax_scale, causal, is_varlen,
        ),
        qkv,
    )


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_qo: Any,
    cu_seqlens_kv: Any,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Any, Any]:
    """flash_attn_varlen_func of kv [keys, KV heads, head_dim_qk + value dim]: k and v in turn."""
    _require_forward("flash_attn_varlen_kvpacked_func", dropout_p, deterministic)
    require_array("kv", kv, "[keys, KV heads, head_dim_qk + value dim]")
    _require_width("head_dim_qk", head_dim_qk, kv.shape[2], "kv's last")
    return without_gradient(
        "flash_attn_varlen_kvpacked_func",
        lambda q, kv: attend_sequences(
            q, kv[:, :, :head_dim_qk], kv[:, :, head_dim_qk:], cu_seqlens_qo, cu_seqlens_kv,
            max_seqlen_qo, max_seqlen_kv, softmax_scale, causal, is_varlen,
        ),
        q, kv,
    )
