"""mla.flash_mla's calls as torch custom operators.

    import mla.torch

registers torch.ops.mla.flash_mla_with_kvcache, torch.ops.mla.flash_mla_sparse_fwd and
torch.ops.mla.flash_attn_varlen_func, for CPU and CUDA tensors, with fake implementations:
torch.compile and torch.export see their shapes without running them. Arguments and conventions are
those of mla.flash_mla, less the schedule's, dropout_p and deterministic. The functions here call
the operators, which have no gradient and say so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import library

from . import flash_mla
from ._arrays import require_rank

_library = library.Library("mla", "DEF")


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int = 512,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of mla.flash_mla.flash_mla_with_kvcache."""
    return flash_mla.flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, None, None, softmax_scale, causal,
        is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length,
        extra_topk_length, descale_q, descale_k,
    )


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, max_logits, lse) of mla.flash_mla.flash_mla_sparse_fwd."""
    return flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of mla.flash_mla.flash_attn_varlen_func."""
    return flash_mla.attend_sequences(
        q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, softmax_scale, causal,
        is_varlen,
    )


def _out_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype


def _fake_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int = 512,
    *_: object,
    **__: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    require_rank("q", q, "[batch, queries, heads, head dim]")
    batch, queries, heads, _dim = q.shape
    return (
        q.new_empty((batch, queries, heads, head_dim_v), dtype=_out_dtype(q)),
        q.new_empty((batch, heads, queries), dtype=torch.float32),
    )


def _fake_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    *_: object,
    **__: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    require_rank("q", q, "[rows, heads, head dim]")
    rows, heads, _dim = q.shape
    return (
        q.new_empty((rows, heads, d_v), dtype=_out_dtype(q)),
        q.new_empty((rows, heads), dtype=torch.float32),
        q.new_empty((rows, heads), dtype=torch.float32),
    )


def _fake_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object
) -> tuple[torch.Tensor, torch.Tensor]:
    require_rank("q", q, "[rows, heads, head dim]")
    require_rank("v", v, "[keys, KV heads, value dim]")
    rows, heads, _dim = q.shape
    return (
        q.new_empty((rows, heads, v.shape[2])),
        q.new_empty((heads, rows), dtype=torch.float32).T,
    )


def _no_backward(name: str) -> Callable[..., None]:
    def backward(*_: object) -> None:
        raise flash_mla.UnsupportedError(f"torch.ops.mla.{name}: has no gradient")

    return backward


def _operator(function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """torch.ops.mla's operator of that name and signature, which `function` computes."""
    name = function.__name__
    _library.define(
        name + library.infer_schema(function, mutates_args=()),
        tags=(torch.Tag.needs_exact_strides,),
    )
    for device in ("CPU", "CUDA"):
        _library.impl(name, function, device)
    library.register_fake(f"mla::{name}", fake, lib=_library)
    library.register_autograd(f"mla::{name}", _no_backward(name), lib=_library)
    operator = getattr(torch.ops.mla, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    return call


flash_mla_with_kvcache = _operator(flash_mla_with_kvcache, _fake_with_kvcache)
flash_mla_sparse_fwd = _operator(flash_mla_sparse_fwd, _fake_sparse_fwd)
flash_attn_varlen_func = _operator(flash_attn_varlen_func, _fake_varlen)

__all__ = ["flash_attn_varlen_func", "flash_mla_sparse_fwd", "flash_mla_with_kvcache"]
