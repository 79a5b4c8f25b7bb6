#!/usr/bin/env python3
"""The Python package on a GPU, with PyTorch and transformers: right, captured, cheap to call.

    scripts/gpu-python.py [--json bench/results/<card>/python.json] [section ...]

Sections: flash_mla (its whole argument space against float64), flash_attn (sequences without a
cache, the same), graph (calls captured, launched again with other lengths, tables and lists),
custom_op, layer (forward against the CPU's, and captured), attach (greedy tokens of small random
models), overhead and frameworks (CuPy's and JAX's arrays). Exit code 1 when one fails.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import library

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/python"))

import mla
from mla.flash_mla import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

DEVICE = "cuda:0"
F64 = torch.float64
DTYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
# Absolute and relative error allowed, by the queries' dtype: f32 sums; bf16 and f16 round the
# softmax's weights and out to 8 and 11 bits. An f16 cache under bf16 queries is multiplied in bf16
# by some kernels.
ROUNDING = {"f32": 2e-4, "f16": 2e-3, "bf16": 1e-2, "fp8": 1e-2}


# Caches, and what they must give.


def rows_of(cache: torch.Tensor, head_dim: int) -> torch.Tensor:
    """A cache [blocks, page, 1, row] as float64 [slots, head_dim]."""
    blocks, page, _, row = cache.shape
    if cache.dtype.itemsize > 1 or row == head_dim:
        return cache.reshape(blocks * page, row).to(F64)
    raw = cache.view(torch.uint8).reshape(blocks, page * row)
    if row == 656:
        tokens = raw.reshape(-1, 656)
        codes = tokens[:, :512].contiguous().view(torch.float8_e4m3fn).to(F64)
        scales = tokens[:, 512:528].contiguous().view(torch.float32).to(F64)
        rope = tokens[:, 528:].contiguous().view(torch.bfloat16).to(F64)
        return torch.cat([codes * scales.repeat_interleave(128, 1), rope], 1)
    rows = raw[:, : page * 576].reshape(-1, 576)
    codes = rows[:, :448].contiguous().view(torch.float8_e4m3fn).to(F64)
    rope = rows[:, 448:].contiguous().view(torch.bfloat16).to(F64)
    exponents = raw[:, page * 576 :].reshape(-1, 8)[:, :7].to(F64) - 127
    return torch.cat([codes * (2.0**exponents).repeat_interleave(64, 1), rope], 1)


def cache_of(kind: str, blocks: int, page: int, head_dim: int) -> torch.Tensor:
    """Pages of random rows."""
    values = torch.randn(blocks * page, head_dim, device=DEVICE)
    if kind in DTYPES:
        return values.to(DTYPES[kind]).reshape(blocks, page, 1, head_dim)
    width, group = (512, 128) if kind == "fp8_ds_mla" else (448, 64)
    parts = values[:, :width].reshape(len(values), -1, group)
    exponents = torch.ceil(torch.log2(torch.clamp(parts.abs().amax(2) / 448, min=1e-4)))
    codes = (parts / torch.exp2(exponents)[:, :, None]).to(torch.float8_e4m3fn)
    codes = codes.reshape(len(values), width).view(torch.uint8)
    rope = values[:, width:].to(torch.bfloat16).view(torch.uint8)
    if kind == "fp8_ds_mla":
        scales = torch.exp2(exponents).float().view(torch.uint8)
        rows = torch.cat([codes, scales, rope], 1)
        return rows.reshape(blocks, page, 1, 656).view(torch.float8_e4m3fn)
    scales = torch.zeros(len(values), 8, dtype=torch.uint8, device=DEVICE)
    scales[:, :7] = (exponents + 127).to(torch.uint8)
    body = torch.cat([codes, rope], 1).reshape(blocks, -1)
    raw = torch.cat([body, scales.reshape(blocks, -1)], 1).reshape(blocks, page, 1, 584)
    return raw.view(torch.float8_e4m3fn)


def attended(
    q: torch.Tensor, rows: torch.Tensor, value: int, scale: float, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A query row [heads, head_dim] over rows [keys, head_dim]: out, max_logits, lse in float64."""
    heads = q.shape[0]
    if len(rows) == 0:
        none = torch.full((heads,), torch.inf, dtype=F64, device=q.device)
        return torch.zeros(heads, value, dtype=F64, device=q.device), -none, none
    logits = q.to(F64) @ rows.T * scale
    lse = torch.logsumexp(logits, 1)
    out = torch.softmax(logits, 1) @ rows[:, :value]
    if sink is not None:
        out = out / (1 + torch.exp(sink.to(F64) - lse))[:, None]
    return out, logits.amax(1), lse


def dense_wanted(
    q: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, lengths: list[int], page: int,
    value: int, scale: float, causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, queries, heads, _ = q.shape
    out = torch.zeros(batch, queries, heads, value, dtype=F64, device=q.device)
    lse = torch.zeros(batch, heads, queries, dtype=F64, device=q.device)
    for b, length in enumerate(lengths):
        at = torch.arange(length, device=q.device)
        slots = table[b].long()[at // page] * page + at % page
        for i in range(queries):
            seen = max(0, length - queries + 1 + i) if causal else length
            out[b, i], _, lse[b, :, i] = attended(q[b, i], rows[slots[:seen]], value, scale)
    return out, lse


def sparse_wanted(
    q: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor, list[int] | None]], value: int,
    scale: float, sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """parts: rows, slots [batch, queries, topk] and lengths of each cache."""
    batch, queries, heads, _ = q.shape
    out = torch.zeros(batch, queries, heads, value, dtype=F64, device=q.device)
    lse = torch.zeros(batch, heads, queries, dtype=F64, device=q.device)
    largest = torch.zeros(batch, heads, queries, dtype=F64, device=q.device)
    for b, i in itertools.product(range(batch), range(queries)):
        keys = []
        for rows, slots, lengths in parts:
            chosen = slots[b, i].long()
            chosen = chosen if lengths is None else chosen[: lengths[b]]
            keys.append(rows[chosen[(chosen >= 0) & (chosen < len(rows))]])
        out[b, i], largest[b, :, i], lse[b, :, i] = attended(
            q[b, i], torch.cat(keys), value, scale, sink
        )
    return out, largest, lse


def error_of(
    found: torch.Tensor, wanted: torch.Tensor, rounding: float, unit: float = 1.0
) -> float:
    """The largest error, in units of what is allowed; infinite where infinities differ.

    unit: the values' standard deviation.
    """
    found = found.to(F64)
    finite = torch.isfinite(wanted)
    if not torch.equal(found[~finite], wanted[~finite]) or not torch.isfinite(found[finite]).all():
        return float("inf")
    error = (found - wanted).abs()[finite]
    allowed = rounding * (unit + wanted.abs()[finite])
    return float((error / allowed).max()) if error.numel() else 0.0


def inside(array: torch.Tensor, gaps: tuple[int, ...], fill: float) -> torch.Tensor:
    """The array as a view of a larger one: dimension i has gaps[i] more elements, all `fill`."""
    shape = [n + g for n, g in zip(array.shape, gaps, strict=True)]
    whole = torch.full(shape, fill, dtype=torch.float32, device=DEVICE).to(array.dtype)
    view = whole[tuple(slice(0, n) for n in array.shape)]
    view.copy_(array)
    return view


def unlike(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> float:
    """0 where bits are equal, as they are of one kernel's calls on the same numbers."""
    return 0.0 if all(map(torch.equal, found, wanted)) else float("inf")


def queries_of(dtype: str, *shape: int, gaps: tuple[int, ...] = ()) -> torch.Tensor:
    q = torch.randn(*shape, device=DEVICE).to(DTYPES[dtype])
    return inside(q, gaps, torch.nan) if gaps else q


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def table_of(lengths: list[int], page: int, blocks: int, columns: int) -> torch.Tensor:
    """Distinct pages in random order, absurd ones past the sequences' ends."""
    pages = torch.randperm(blocks).tolist()
    table = torch.full((len(lengths), columns), 2**31 - 1, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for c in range(-(-length // page)):
            table[b, c] = pages.pop()
    return table.to(DEVICE)


# Sections: each yields (case, error in units of what is allowed).

Row = tuple[str, float]


GAPS = [(0, 0, 0, 64), (0, 0, 3, 0), (0, 1, 0, 0), (1, 1, 1, 128), (0, 2, 0, 8), (1, 0, 1, 3)]


def dense_case(
    kind: str, dtype: str, heads: int, page: int, queries: int, causal: bool, lengths: list[int],
    head_dim: int = 576, q_scale: float | None = None, k_scale: float | None = None,
    gaps: tuple[int, ...] = (),
) -> Row:
    columns = max(1, max(-(-n // page) for n in lengths) + 1)
    blocks = sum(-(-n // page) for n in lengths) + 2
    cache = cache_of(kind, blocks, page, head_dim)
    rows = rows_of(cache, head_dim)
    table = table_of(lengths, page, blocks, columns)
    q = queries_of(dtype, len(lengths), queries, heads, head_dim, gaps=gaps)
    schedule, splits = get_mla_metadata(int32(lengths), queries * heads, 1)
    out, lse = flash_mla_with_kvcache(
        q, cache, table, int32(lengths), 512, schedule, splits, None, causal,
        is_fp8_kvcache=cache.dtype.itemsize == 1,
        descale_q=None if q_scale is None else torch.tensor([q_scale], device=DEVICE),
        descale_k=None if k_scale is None else torch.tensor([k_scale], device=DEVICE),
    )
    wanted = dense_wanted(
        q.to(F64) * (q_scale or 1), rows * (k_scale or 1), table, lengths, page, 512,
        head_dim**-0.5, causal,
    )
    bound = ROUNDING[dtype]
    worst = max(error_of(out, wanted[0], bound, k_scale or 1), error_of(lse, wanted[1], bound))
    if gaps:
        worst = max(worst, unlike((out, lse), flash_mla_with_kvcache(
            q.contiguous(), cache, table, int32(lengths), 512, causal=causal,
            is_fp8_kvcache=cache.dtype.itemsize == 1,
        )))
    name = f"dense {kind} q {dtype} d{head_dim} h{heads} page{page} s{queries}"
    name += "" if q_scale is k_scale is None else f" descales {q_scale} {k_scale}"
    name += f" gaps {gaps}" if gaps else ""
    return name + (" causal" if causal else "") + f" b{len(lengths)} <={max(lengths)}", worst


def slots_of(batch: int, queries: int, topk: int, slots: int) -> torch.Tensor:
    """Slots of a cache, duplicates and ones that do not exist among them."""
    chosen = torch.randint(0, slots, (batch, queries, topk), dtype=torch.int32)
    chosen[torch.rand(chosen.shape) < 0.1] = -1
    chosen[torch.rand(chosen.shape) < 0.05] = slots + 7
    return chosen.to(DEVICE)


def slots_inside(slots: torch.Tensor, gaps: tuple[int, ...]) -> torch.Tensor:
    """The slots as a view of a larger array, whose other entries name slot 0."""
    whole = torch.zeros(
        [n + g for n, g in zip(slots.shape, gaps, strict=True)], dtype=torch.int32, device=DEVICE
    )
    view = whole[tuple(slice(0, n) for n in slots.shape)]
    view.copy_(slots)
    return view


def several_kv_heads_case(
    kind: str, dtype: str, heads: int, kv_heads: int, page: int, queries: int, causal: bool,
    lengths: list[int], gaps: tuple[int, ...] = (),
) -> Row:
    blocks = sum(-(-n // page) for n in lengths) + 2
    encoded = cache_of(kind, blocks, page * kv_heads, 576)
    rows = rows_of(encoded, 576).reshape(blocks * page, kv_heads, 576)
    table = table_of(lengths, page, blocks, max(1, max(-(-n // page) for n in lengths)))
    q = queries_of(dtype, len(lengths), queries, heads, 576, gaps=gaps)
    out, lse = flash_mla_with_kvcache(
        q, encoded.reshape(blocks, page, kv_heads, -1), table, int32(lengths), 512, None, None,
        None, causal, is_fp8_kvcache=encoded.dtype.itemsize == 1,
    )
    group, worst, bound = heads // kv_heads, 0.0, ROUNDING[dtype]
    for j in range(kv_heads):
        part = slice(j * group, (j + 1) * group)
        wanted = dense_wanted(
            q[:, :, part], rows[:, j], table, lengths, page, 512, 576**-0.5, causal
        )
        worst = max(worst, error_of(out[:, :, part], wanted[0], bound))
        worst = max(worst, error_of(lse[:, part], wanted[1], bound))
    name = f"dense {kind} q {dtype} h{heads} over {kv_heads} KV heads page{page} s{queries}"
    return name + " causal" * causal + (f" gaps {gaps}" if gaps else ""), worst


def sparse_case(
    kind: str, dtype: str, heads: int, page: int, batch: int, queries: int, topk: int,
    lengths: list[int] | None, sink: bool, extra: int, head_dim: int = 576,
    gaps: tuple[int, ...] = (),
) -> Row:
    q = queries_of(dtype, batch, queries, heads, head_dim, gaps=gaps)
    caches = [cache_of(kind, 40, page, head_dim)]
    lists = [slots_of(batch, queries, topk, 40 * page)]
    if gaps:
        lists[0] = slots_inside(lists[0], (*gaps[:2], 9))
    options: dict[str, Any] = {}
    if extra:
        caches.append(cache_of(kind, 9, page + 1, head_dim))
        lists.append(slots_of(batch, queries, extra, 9 * (page + 1)))
        if gaps:
            lists[1] = slots_inside(lists[1], (*gaps[:2], 1))
        options = dict(extra_k_cache=caches[1], extra_indices_in_kvcache=lists[1])
    counts: list[list[int] | None] = [lengths, None]
    if lengths is not None:
        options["topk_length"] = int32(lengths)
        if extra:
            counts[1] = [extra - i % 2 for i in range(batch)]
            options["extra_topk_length"] = int32(counts[1])
    sinks = torch.randn(heads, device=DEVICE) * 3 if sink else None
    if sinks is not None:
        sinks[0], sinks[-1] = torch.inf, -torch.inf
    schedule, splits = get_mla_metadata()
    out, lse = flash_mla_with_kvcache(
        q, caches[0], None, None, 512, schedule, splits, None, False,
        caches[0].dtype.itemsize == 1, lists[0], sinks, **options,
    )
    parts = [
        (rows_of(c, head_dim), s, n) for c, s, n in zip(caches, lists, counts, strict=False)
    ]
    worst = 0.0
    if gaps:
        if extra:
            options["extra_indices_in_kvcache"] = lists[1].contiguous()
        worst = unlike((out, lse), flash_mla_with_kvcache(
            q.contiguous(), caches[0], None, None, 512, schedule, splits, None, False,
            caches[0].dtype.itemsize == 1, lists[0].contiguous(), sinks, **options,
        ))
    wanted = sparse_wanted(q, parts, 512, head_dim**-0.5, sinks)
    bound = ROUNDING[dtype]
    worst = max(worst, error_of(out, wanted[0], bound), error_of(lse, wanted[2], bound))
    name = f"sparse {kind} q {dtype} d{head_dim} h{heads} page{page} b{batch} s{queries} k{topk}"
    marks = [" lengths"] * (lengths is not None) + [" sinks"] * sink + [f" +{extra}"] * bool(extra)
    return name + "".join(marks) + (f" gaps {gaps}" if gaps else ""), worst


def prefill_case(
    dtype: str, kind: str, heads: int, rows: int, keys: int, topk: int, lengths: bool, sink: bool,
    head_dim: int = 576, gaps: tuple[int, ...] = (),
) -> Row:
    q = queries_of(dtype, rows, heads, head_dim, gaps=gaps)
    kv = torch.randn(keys, 1, head_dim, device=DEVICE).to(DTYPES[kind])
    slots = slots_of(rows, 1, topk, keys)
    count = [max(0, topk - 3 * i) for i in range(rows)] if lengths else None
    sinks = torch.randn(heads, device=DEVICE) if sink else None
    out, largest, lse = flash_mla_sparse_fwd(
        q, kv, slots, 0.05, 512, sinks, None if count is None else int32(count)
    )
    wanted = sparse_wanted(
        q[:, None], [(kv[:, 0].to(F64), slots, count)], 512, 0.05, sinks
    )
    bound = ROUNDING[dtype]
    worst = max(
        error_of(out, wanted[0][:, 0], bound), error_of(largest, wanted[1][..., 0], bound),
        error_of(lse, wanted[2][..., 0], bound),
    )
    if gaps:
        worst = max(worst, unlike((out, largest, lse), flash_mla_sparse_fwd(
            q.contiguous(), kv, slots, 0.05, 512, sinks, None if count is None else int32(count)
        )))
    name = f"prefill {kind} q {dtype} d{head_dim} h{heads} rows{rows} of {keys} k{topk}"
    name += " lengths" * lengths + " sinks" * sink
    return name + (f" gaps {gaps}" if gaps else ""), worst


def nan_queries() -> Iterator[Row]:
    """A row whose query or key is no number is NaN, and no other row's bits change."""
    for dtype, heads in itertools.product(["f16", "bf16", "f32"], [8, 64]):
        cache, q = cache_of(dtype, 4, 64, 576), queries_of(dtype, 2, 2, heads, 576)
        table, lengths = int32([[0, 1], [2, 3]]), int32([100, 70])
        clean = flash_mla_with_kvcache(q, cache, table, lengths)
        q[0, 1, heads - 1, 5] = torch.nan
        out, lse = flash_mla_with_kvcache(q, cache, table, lengths)
        right = bool(out[0, 1, -1].isnan().all()) and bool(lse[0, -1, 1].isnan())
        for found, wanted, row in ((out, clean[0], (0, 1, -1)), (lse, clean[1], (0, -1, 1))):
            found[row] = wanted[row]
            right = right and torch.equal(found, wanted)
        q[0, 1, heads - 1, 5] = 1
        cache[2, 7, 0, 9] = torch.inf  # of the second request alone
        out, lse = flash_mla_with_kvcache(q, cache, table, lengths)
        clean = flash_mla_with_kvcache(q, cache_of(dtype, 4, 64, 576).copy_(cache).nan_to_num_(
            posinf=0.0), table, lengths)
        right = right and torch.equal(out[0], clean[0][0]) and torch.equal(lse[0], clean[1][0])
        seen = lse[1].isnan()
        yield f"NaN of {dtype} q h{heads}", 0.0 if right and bool(seen.any()) else float("inf")


def flash_mla() -> Iterator[Row]:
    kinds = ["f32", "bf16", "f16", "fp8", "fp8_ds_mla"]
    for kind, dtype, causal in itertools.product(kinds, ["f32", "f16", "bf16", "fp8"], [0, 1]):
        yield dense_case(kind, dtype, 5, 64, 2, bool(causal), [70, 0, 129])
    for kind, heads, page in itertools.product(
        ["bf16", "f16", "fp8", "fp8_ds_mla"], [1, 16, 33, 64, 128, 130], [1, 16, 64, 100]
    ):
        yield dense_case(kind, "bf16", heads, page, 1, False, [37, 1500, 1, 640])
    # f16 queries over f16 rows are multiplied as they are.
    for heads, page, queries, head_dim in itertools.product(
        [1, 16, 33, 128], [1, 64, 100], [1, 4], [576, 512]
    ):
        yield dense_case("f16", "f16", heads, page, queries, True, [37, 1500, 1], head_dim)
    for heads, topk, sink, extra in itertools.product([6, 16, 128], [64, 2048], [0, 1], [0, 24]):
        yield sparse_case("f16", "f16", heads, 64, 2, 2, topk, [topk, 17], bool(sink), extra)
    yield from nan_queries()
    for kind, queries, causal in itertools.product(
        ["bf16", "f16", "fp8", "fp8_ds_mla"], [1, 2, 4, 70], [False, True]
    ):
        yield dense_case(kind, "bf16", 16, 64, queries, causal, [3, 900, 64])
        yield dense_case(kind, "bf16", 128, 64, queries, causal, [3000, 0, 65])
    for kind, dtype, page in itertools.product(
        ["bf16", "f16", "fp8_ds_v4"], ["f32", "bf16"], [16, 64, 3]
    ):
        yield dense_case(kind, dtype, 7, page, 3, True, [33, 1, 200], head_dim=512)
    for dtype, heads, queries in itertools.product(["fp8", "bf16", "f32", "f16"], [7, 128], [1, 2]):
        for q_scale, k_scale in [(0.37, 1.9), (None, 0.21)] if dtype == "fp8" else [(None, 1.9)]:
            yield dense_case("fp8", dtype, heads, 64, queries, True, [70, 900, 1],
                             q_scale=q_scale, k_scale=k_scale)
    # Queries and lists that are views of larger arrays, on the kernels that need dense rows and on
    # those that do not.
    for gaps, (kind, dtype), heads, queries in itertools.product(
        GAPS,
        [("bf16", "bf16"), ("fp8_ds_mla", "bf16"), ("f16", "f16"), ("fp8", "fp8"), ("f32", "f32")],
        [5, 16, 128], [1, 3],
    ):
        yield dense_case(kind, dtype, heads, 64, queries, True, [70, 0, 900], gaps=gaps)
        if kind != "f16":
            extra = 24 if heads == 5 else 0
            yield sparse_case(
                kind, dtype, heads, 64, 3, queries, 130, [130, 17, 0], True, extra, gaps=gaps
            )
    for gaps, heads in itertools.product([(0, 0, 64), (0, 2, 0), (1, 1, 8), (1, 0, 3)], [16, 128]):
        yield prefill_case("bf16", "bf16", heads, 40, 4000, 64, True, True, gaps=gaps)
    for (kind, dtype), (heads, kv_heads), queries, causal in itertools.product(
        [("bf16", "bf16"), ("f16", "f16"), ("fp8", "bf16"), ("fp8_ds_mla", "bf16"), ("f32", "f32")],
        [(6, 2), (128, 2), (16, 8), (3, 3)], [1, 3], [False, True],
    ):
        yield several_kv_heads_case(
            kind, dtype, heads, kv_heads, 64, queries, causal, [70, 0, 900],
            gaps=(1, 1, 1, 8) if causal else (),
        )
    yield dense_case("bf16", "bf16", 128, 64, 1, False, [20000] + [10] * 30)
    yield dense_case("fp8_ds_mla", "bf16", 128, 64, 2, True, [9000, 8000] + [700] * 126)

    for kind, dtype, sink, extra in itertools.product(
        kinds, ["f32", "bf16", "fp8"], [False, True], [0, 24]
    ):
        yield sparse_case(kind, dtype, 6, 8, 3, 2, 40, [40, 17, 0], sink, extra)
    for kind, heads, topk in itertools.product(
        ["bf16", "fp8_ds_mla"], [1, 16, 64, 128, 130], [0, 1, 64, 300, 2048]
    ):
        yield sparse_case(kind, "bf16", heads, 64, 2, 1, topk, None, True, 0)
    for kind, dtype, extra in itertools.product(["bf16", "fp8_ds_v4"], ["f32", "bf16"], [0, 130]):
        yield sparse_case(kind, dtype, 64, 64, 2, 2, 128, [128, 50], True, extra, head_dim=512)
        yield sparse_case(kind, dtype, 16, 64, 64, 1, 512, None, False, extra, head_dim=512)

    for dtype, kind, head_dim in itertools.product(["f32", "bf16", "f16"], ["f32", "bf16", "f16"],
                                                   [576, 512]):
        yield prefill_case(dtype, kind, 5, 9, 50, 33, True, True, head_dim)
    for heads, topk in itertools.product([1, 64, 128, 130], [0, 64, 2048]):
        yield prefill_case("bf16", "bf16", heads, 40, 4000, topk, False, True)


def varlen_wanted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_begins: list[int], k_begins: list[int],
    scale: float, causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, _ = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(rows, heads, v.shape[2], dtype=F64, device=q.device)
    lse = torch.full((rows, heads), -torch.inf, dtype=F64, device=q.device)
    for (q0, q1), (k0, k1) in zip(
        itertools.pairwise(q_begins), itertools.pairwise(k_begins), strict=True
    ):
        x = q[q0:q1].to(F64).transpose(0, 1)
        keys = k[k0:k1].to(F64).transpose(0, 1).repeat_interleave(group, 0)
        values = v[k0:k1].to(F64).transpose(0, 1).repeat_interleave(group, 0)
        logits = x @ keys.transpose(1, 2) * scale
        if causal:
            unseen = torch.ones_like(logits[0], dtype=torch.bool).triu(k1 - k0 - (q1 - q0) + 1)
            logits.masked_fill_(unseen, -torch.inf)
        lse[q0:q1] = torch.logsumexp(logits, 2).T
        # A row that sees nothing is NaN here.
        out[q0:q1] = torch.nan_to_num(torch.softmax(logits, 2) @ values, nan=0.0).transpose(0, 1)
    return out, lse


def begins_of(lengths: list[int], first: int = 0) -> list[int]:
    return list(itertools.accumulate(lengths, initial=first))


def varlen_case(
    dtype: str, heads: int, kv_heads: int, head_dim: int, value_dim: int, causal: bool,
    q_lengths: list[int], k_lengths: list[int], gaps: tuple[int, ...] = (), first: int = 0,
) -> Row:
    """first: rows and keys before the first sequence's, and as many behind the last one's."""
    q_begins, k_begins = begins_of(q_lengths, first), begins_of(k_lengths, first)
    q = queries_of(dtype, q_begins[-1] + first, heads, head_dim, gaps=gaps)
    k = queries_of(dtype, k_begins[-1] + first, kv_heads, head_dim, gaps=gaps)
    v = queries_of(dtype, k_begins[-1] + first, kv_heads, value_dim, gaps=gaps)
    for x, begins in ((q, q_begins), (k, k_begins), (v, k_begins)):
        x[: begins[0]] = x[begins[-1] :] = torch.nan
    out, lse = flash_attn_varlen_func(
        q, k, v, int32(q_begins), int32(k_begins), max(q_lengths), max(k_lengths), causal=causal
    )
    wanted = varlen_wanted(q, k, v, q_begins, k_begins, head_dim**-0.5, causal)
    part = slice(q_begins[0], q_begins[-1])
    bound = ROUNDING[dtype]
    worst = max(error_of(out[part], wanted[0][part], bound),
                error_of(lse[part], wanted[1][part], bound))
    if lse.stride() != (1, lse.shape[0]) or out.dtype is not q.dtype:
        worst = float("inf")
    name = f"varlen {dtype} h{heads}/{kv_heads} d{head_dim}/{value_dim} b{len(q_lengths)}"
    name += f" <={max(q_lengths)} over <={max(k_lengths)}" + " causal" * causal
    return name + (f" gaps {gaps}" if gaps else "") + (f" from {first}" if first else ""), worst


def flash_attn() -> Iterator[Row]:
    ragged = [17, 0, 300, 1, 64], [30, 5, 300, 0, 129]
    for dtype, (head_dim, value_dim), causal in itertools.product(
        ["f32", "bf16", "f16"], [(192, 128), (128, 128), (256, 256), (72, 40), (33, 5)],
        [False, True],
    ):
        yield varlen_case(dtype, 4, 4, head_dim, value_dim, causal, *ragged)
    for (heads, kv_heads), dtype, causal in itertools.product(
        [(6, 1), (6, 2), (6, 3), (32, 4), (128, 128)], ["bf16", "f32"], [False, True]
    ):
        yield varlen_case(dtype, heads, kv_heads, 192, 128, causal, [9, 133], [70, 133])
    for gaps, dtype, kv_heads in itertools.product(
        [(0, 0, 64), (0, 2, 0), (2, 1, 3), (1, 0, 8)], ["bf16", "f32"], [1, 4]
    ):
        yield varlen_case(dtype, 4, kv_heads, 192, 128, True, *ragged, gaps=gaps, first=7)
    # Causal rows before the first key; many sequences, short beside one that is long.
    yield varlen_case("bf16", 16, 16, 192, 128, True, [200, 70, 3], [65, 1, 4])
    yield varlen_case("bf16", 2, 2, 192, 128, True, [1] * 300 + [2000], [5] * 300 + [2500])
    q, k, v = (queries_of("bf16", 60, 4, n) for n in (192, 192, 128))
    same = int32([0, 20, 20, 60])
    plain = flash_attn_varlen_func(q, k, v, same, same, 40, 40, causal=True)
    packed = flash_attn_varlen_qkvpacked_func(torch.cat([q, k, v], 2), same, 40, 192, causal=True)
    yield "varlen qkvpacked", unlike(plain, packed)
    packed = flash_attn_varlen_kvpacked_func(
        q, torch.cat([k, v], 2), same, same, 40, 40, 192, causal=True
    )
    yield "varlen kvpacked", unlike(plain, packed)
    equal = int32([0, 20, 40, 60])
    plain = flash_attn_varlen_func(q, k, v, equal, equal, 20, 20, causal=True)
    absurd = int32([7, -3, 2**31 - 1, 0])
    yield "varlen of equal lengths", unlike(plain, flash_attn_varlen_func(
        q, k, v, absurd, absurd, 20, 20, causal=True, is_varlen=False
    ))
    # What lies past the arrays is cut off: nothing to compare, but no address outside them.
    flash_attn_varlen_func(q, k, v, absurd, absurd, 60, 60)
    torch.cuda.synchronize()
    yield "varlen of absurd cu_seqlens", 0.0


def captured(call: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[Any, tuple[torch.Tensor, ...]]:
    call()  # loads kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph, outputs


def graph() -> Iterator[Row]:
    for (kind, dtype), heads, queries in itertools.product(
        [("bf16", "bf16"), ("f16", "bf16"), ("f16", "f16"), ("fp8_ds_mla", "bf16"),
         ("f32", "bf16")],
        [16, 128], [1, 3],
    ):
        page, blocks, columns = 64, 120, 40
        cache = cache_of(kind, blocks, page, 576)
        gaps = (0, 1, 0, 64) if queries == 3 else ()  # copied by the graph
        q = queries_of(dtype, 4, queries, heads, 576, gaps=gaps)
        lengths, table = int32([1] * 4), table_of([1] * 4, page, blocks, columns)
        replay, (out, lse) = captured(lambda: flash_mla_with_kvcache(
            q, cache, table, lengths, causal=True, is_fp8_kvcache=cache.dtype.itemsize == 1
        ))
        worst = 0.0
        for now in ([2500, 3, 0, 700], [5, 2000, 64, 1], [1, 1, 1, 1]):
            q.copy_(queries_of(dtype, *q.shape))
            lengths.copy_(int32(now))
            table.copy_(table_of(now, page, blocks, columns))
            replay.replay()
            wanted = dense_wanted(
                q, rows_of(cache, 576), table, now, page, 512, 576**-0.5, True
            )
            worst = max(worst, error_of(out, wanted[0], 2e-2), error_of(lse, wanted[1], 2e-2))
        yield f"dense {kind} q {dtype} h{heads} s{queries}", worst
    for (kind, dtype), heads, queries in itertools.product(
        [("bf16", "bf16"), ("f16", "f16"), ("fp8", "fp8"), ("fp8_ds_mla", "bf16")], [16, 64, 128],
        [1, 2],
    ):  # a step's layers, which share a schedule
        caches = [cache_of(kind, 120, 64, 576) for _ in range(4)]
        q = queries_of(dtype, 4, queries, heads, 576)
        lengths, table = int32([1] * 4), table_of([1] * 4, 64, 120, 40)
        meta, splits = get_mla_metadata(lengths, queries * heads, 1)
        replay, outputs = captured(lambda: tuple(x for cache in caches for x in (
            flash_mla_with_kvcache(
                q, cache, table, lengths, 512, meta, splits, causal=True,
                is_fp8_kvcache=cache.dtype.itemsize == 1,
            ))))
        worst = 0.0
        for now in ([2500, 3, 0, 700], [5, 2000, 64, 1]):
            q.copy_(queries_of(dtype, *q.shape))
            lengths.copy_(int32(now))
            table.copy_(table_of(now, 64, 120, 40))
            replay.replay()
            for i, cache in enumerate(caches):
                wanted = dense_wanted(
                    q, rows_of(cache, 576), table, now, 64, 512, 576**-0.5, True
                )
                worst = max(worst, error_of(outputs[2 * i], wanted[0], 2e-2),
                            error_of(outputs[2 * i + 1], wanted[1], 2e-2))
        yield f"layers {kind} q {dtype} h{heads} s{queries}", worst
    cache, q = cache_of("fp8", 40, 64, 576), queries_of("fp8", 2, 1, 16, 576)
    lengths, table = int32([900, 70]), table_of([900, 70], 64, 40, 20)
    q_scale, k_scale = torch.ones(1, device=DEVICE), torch.ones(1, device=DEVICE)
    replay, (out, lse) = captured(lambda: flash_mla_with_kvcache(
        q, cache, table, lengths, causal=True, is_fp8_kvcache=True, descale_q=q_scale,
        descale_k=k_scale,
    ))
    worst = 0.0
    for now in ((0.4, 1.7), (1.3, 0.2)):
        q_scale.fill_(now[0])
        k_scale.fill_(now[1])
        replay.replay()
        wanted = dense_wanted(
            q.to(F64) * now[0], rows_of(cache, 576) * now[1], table, [900, 70], 64, 512,
            576**-0.5, True,
        )
        worst = max(worst, error_of(out, wanted[0], 2e-2), error_of(lse, wanted[1], 2e-2))
    yield "dense fp8, descales that change", worst
    for kind, heads, topk in itertools.product(["bf16", "fp8_ds_mla"], [16, 128], [64, 2048]):
        cache, q = cache_of(kind, 50, 64, 576), queries_of("bf16", 3, 2, heads, 576)
        indices, counts = slots_of(3, 2, topk, 3200), int32([topk] * 3)
        if heads == 128:
            q, indices = inside(q, (0, 1, 0, 8), torch.nan), slots_inside(indices, (0, 1, 3))
        sinks = torch.randn(heads, device=DEVICE)
        replay, (out, lse) = captured(lambda: flash_mla_with_kvcache(
            q, cache, None, None, is_fp8_kvcache=cache.dtype.itemsize == 1, indices=indices,
            attn_sink=sinks, topk_length=counts,
        ))
        worst = 0.0
        for now in ([topk, 1, 0], [topk // 2] * 3):
            indices.copy_(slots_of(3, 2, topk, 3200))
            counts.copy_(int32(now))
            sinks.normal_()
            replay.replay()
            wanted = sparse_wanted(
                q, [(rows_of(cache, 576), indices, now)], 512, 576**-0.5, sinks
            )
            worst = max(worst, error_of(out, wanted[0], 2e-2), error_of(lse, wanted[2], 2e-2))
        yield f"sparse {kind} h{heads} k{topk}", worst
    q, k, v = (queries_of("bf16", 300, h, n) for h, n in ((16, 192), (4, 192), (4, 128)))
    q_begins, k_begins = int32([0, 300, 300, 300]), int32([0, 300, 300, 300])
    replay, (out, lse) = captured(lambda: flash_attn_varlen_func(
        q, k, v, q_begins, k_begins, 300, 300, causal=True
    ))
    worst = 0.0
    for now in ([0, 100, 101, 300], [0, 0, 290, 300], [0, 1, 2, 300]):
        q_begins.copy_(int32(now))
        k_begins.copy_(int32([0, 120, 130, 300]))
        replay.replay()
        wanted = varlen_wanted(q, k, v, now, [0, 120, 130, 300], 192**-0.5, True)
        worst = max(worst, error_of(out, wanted[0], 2e-2), error_of(lse, wanted[1], 2e-2))
    yield "varlen, other sequences", worst
    encoded = cache_of("bf16", 40, 128, 576)  # of two heads
    q = queries_of("bf16", 2, 3, 32, 576)
    lengths, table = int32([1, 1]), table_of([1, 1], 64, 40, 20)
    replay, (out, lse) = captured(lambda: flash_mla_with_kvcache(
        q, encoded.reshape(40, 64, 2, 576), table, lengths, causal=True
    ))
    worst = 0.0
    for now in ([900, 70], [3, 0]):
        lengths.copy_(int32(now))
        table.copy_(table_of(now, 64, 40, 20))
        replay.replay()
        for j in range(2):
            rows, part = rows_of(encoded, 576)[j::2], slice(16 * j, 16 * j + 16)
            wanted = dense_wanted(q[:, :, part], rows, table, now, 64, 512, 576**-0.5, True)
            worst = max(worst, error_of(out[:, :, part], wanted[0], 2e-2))
            worst = max(worst, error_of(lse[:, part], wanted[1], 2e-2))
    yield "dense bf16, two KV heads", worst
    kv, q = torch.randn(500, 1, 576, device=DEVICE).bfloat16(), queries_of("bf16", 30, 128, 576)
    indices = slots_of(30, 1, 256, 500)
    replay, (out, largest, lse) = captured(lambda: flash_mla_sparse_fwd(q, kv, indices, 0.05))
    indices.copy_(slots_of(30, 1, 256, 500))
    replay.replay()
    wanted = sparse_wanted(q[:, None], [(kv[:, 0].to(F64), indices, None)], 512, 0.05, None)
    yield "prefill bf16 h128 k256", max(
        error_of(out, wanted[0][:, 0], 2e-2), error_of(largest, wanted[1][..., 0], 2e-2),
        error_of(lse, wanted[2][..., 0], 2e-2),
    )


def custom_op() -> Iterator[Row]:
    import mla.torch  # noqa: F401

    cache, q = cache_of("bf16", 20, 64, 576), queries_of("bf16", 2, 1, 16, 576)
    table, lengths = table_of([300, 5], 64, 20, 6), int32([300, 5])
    kv, indices = torch.randn(90, 1, 576, device=DEVICE).bfloat16(), slots_of(2, 1, 64, 90)
    ops = torch.ops.mla
    dense, sparse = (q, cache, table, lengths), (q[:, 0], kv, indices, 0.05)
    library.opcheck(ops.flash_mla_with_kvcache, dense)
    library.opcheck(ops.flash_mla_sparse_fwd, sparse)
    x = queries_of("bf16", 30, 4, 192)
    library.opcheck(
        ops.flash_attn_varlen_func, (x, x, x, int32([0, 9, 30]), int32([0, 9, 30]), 21, 21)
    )
    yield "opcheck", 0.0

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*arguments: torch.Tensor) -> torch.Tensor:
        return ops.flash_mla_with_kvcache(*arguments)[0] * 2

    same = torch.equal(compiled(*dense), flash_mla_with_kvcache(*dense)[0] * 2)
    yield "compiled without a graph break", 0.0 if same else float("inf")


def frameworks() -> Iterator[Row]:
    """CuPy's and JAX's arrays give what torch's do."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    cache, q = cache_of("f32", 20, 64, 576), queries_of("f32", 2, 1, 16, 576)
    table, lengths = table_of([300, 5], 64, 20, 6), int32([300, 5])
    kv, indices = cache_of("f32", 90, 1, 576)[:, 0], slots_of(2, 1, 64, 90)
    dense, sparse = (q, cache, table, lengths), (q[:, 0].contiguous(), kv, indices)
    x, begins = queries_of("f32", 30, 4, 192), int32([0, 9, 30])
    varlen = x, x, x, begins, begins
    wanted = (
        *flash_mla_with_kvcache(*dense), *flash_mla_sparse_fwd(*sparse, 0.05),
        *flash_attn_varlen_func(*varlen, 21, 21, causal=True),
    )
    for name in ("cupy", "jax"):
        try:
            framework = importlib.import_module(name)
        except ImportError:
            yield f"{name} is not installed", 0.0
            continue
        take = framework.from_dlpack if name == "cupy" else framework.dlpack.from_dlpack
        torch.cuda.synchronize()
        found = (
            *flash_mla_with_kvcache(*map(take, dense)),
            *flash_mla_sparse_fwd(*map(take, sparse), 0.05),
            *flash_attn_varlen_func(*map(take, varlen), 21, 21, causal=True),
        )
        same = all(
            type(f) is type(take(w.contiguous())) and torch.equal(torch.from_dlpack(f), w)
            for f, w in zip(found, wanted, strict=True)
        )
        yield name, 0.0 if same else float("inf")


def layer() -> Iterator[Row]:
    """The planned layer on the GPU beside the CPU's, and captured on the stream it has run on."""
    import ml_dtypes

    for name, kind in (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)):
        q, kv_c = (torch.randn(s, device=DEVICE).to(kind) for s in ((700, 16, 192), (700, 512)))
        found = mla.calc_kv_scales(q, kv_c)
        wanted = mla.calc_kv_scales(q.float().cpu().numpy(), kv_c.float().cpu().numpy())
        yield f"calc_kv_scales of {name} tensors", 0.0 if found == wanted else float("inf")

    model = mla.preset("deepseek-v2-lite")
    tensors = mla.random_layer(model)
    lengths, new = [300, 41], [100, 1]
    slots = [*range(200, 300), 320 + 40]
    batch = mla.Batch([0, 100, 101], lengths, np.arange(10, dtype=np.int32).reshape(2, 5), slots)
    hidden = torch.randn(sum(new), model.hidden) / 4
    # A path each: by rates a CPU and a GPU may choose different ones, and one reads the step's rows
    # as they are, the other as the cache holds them.
    for (compute, rows_in), path in itertools.product(
        (("f32", "f32"), ("bf16", "bf16"), ("f32", "f16"), ("bf16", "f16")), ("latent", "expanded")
    ):
        results = []
        what = (compute if rows_in == compute else f"{compute}, {rows_in} rows") + f", {path}"
        for device in ("cpu", DEVICE):
            weights = mla.prepare(model, tensors, dtype=compute, device=device)
            rotary = mla.RotaryTable(model, 1024, device=device)
            spec = mla.cache_spec(model, "fp8_ds_mla")
            generator = np.random.default_rng(1)
            rows = np.zeros((10 * 64, 656), np.uint8)
            rows[:, :512] = generator.integers(0, 0x70, (640, 512))
            rows[:, 512:528] = np.full((640, 4), 0.01, np.float32).view(np.uint8)
            rope = generator.standard_normal((640, 64)).astype(ml_dtypes.bfloat16)
            rows[:, 528:] = rope.view(np.uint8).reshape(640, 128)
            memory = torch.from_numpy(rows.reshape(10, -1).copy()).to(device)
            cache = mla.Cache(spec, memory=memory)
            x = hidden.to(device, DTYPES[rows_in])
            options = mla.PlanOptions(
                compute=compute, path=path,
                activation_dtype="native" if rows_in == compute else rows_in,
            )
            stream = torch.cuda.Stream() if device != "cpu" else None
            with torch.cuda.stream(stream):
                if stream is None:
                    step = mla.plan(model, cache, batch, options=options)
                else:
                    torch.cuda.synchronize()
                    # The stream that forward will find to be torch's current one.
                    step = mla.plan(model, cache, batch, stream=mla.stream_for(x), options=options)
                out = mla.forward(step, weights, rotary, cache, x)
                if stream is not None:
                    torch.cuda.synchronize()
                    again = torch.cuda.CUDAGraph()
                    kept = torch.empty_like(out)
                    with torch.cuda.graph(again, stream=stream):
                        mla.forward(step, weights, rotary, cache, x, kept)
                    again.replay()
                    torch.cuda.synchronize()
                    yield f"forward {what} captured", (
                        0.0 if torch.equal(kept, out) else float("inf")
                    )
            results.append(out.float().cpu())
        scale = float(results[0].abs().max())
        bound = {"f32": 1e-3 if rows_in == "f32" else 2e-3, "bf16": 2e-2}[compute] * scale
        yield f"forward {what}", float((results[1] - results[0]).abs().max()) / bound


def attach() -> Iterator[Row]:
    import hf_models

    import mla.transformers

    wide = dict(
        hidden_size=512, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, num_attention_heads=16, num_key_value_heads=16, initializer_range=0.08,
    )
    for kind, dtype, shape in itertools.product(
        hf_models.KINDS, (torch.float32, torch.bfloat16), ("small", "wide")
    ):
        changes = {} if shape == "small" else dict(wide)
        if changes and kind == "v3.2":
            changes["index_head_dim"] = 128
        model = hf_models.make_model(kind, dtype, **changes).to(DEVICE)
        wanted, logits = hf_models.greedy(model)
        caches = [None]
        if shape == "wide" and dtype is torch.bfloat16 and kind == "v3":
            caches.append("fp8_ds_mla")
        for cache in caches:
            attachment = mla.transformers.attach(model, cache)
            found, own = hf_models.greedy(model)
            attachment.detach()
            differ = (found != wanted).any(dim=0).nonzero()
            name = f"{kind} {str(dtype)[6:]} {shape} cache {cache or 'as weights'}: 64 tokens x 2"
            first = f", first differs at {int(differ[0])}" if len(differ) else ""
            error = float((own - logits).abs().max())
            yield f"{name}{first}, logits {error:.2g}", float("inf") if len(differ) else 0.0


def overhead() -> Iterator[Row]:
    """CPU time of a call, in units of 10 us: of an empty batch, where nothing is launched."""

    def best(call: Callable[[], Any], calls: int = 500, rounds: int = 20) -> float:
        fastest = float("inf")
        for _ in range(rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            fastest = min(fastest, (time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
        return fastest

    import mla.torch  # noqa: F401

    cache, q = cache_of("bf16", 64, 64, 576), queries_of("bf16", 8, 1, 128, 576)
    table, lengths = table_of([100] * 8, 64, 64, 8), int32([100] * 8)
    indices = slots_of(8, 1, 64, 4096)
    empty = (q[:0], cache, table[:0], lengths[:0])
    calls = {
        "flash_mla_with_kvcache, binding alone": (lambda: flash_mla_with_kvcache(*empty), True),
        "flash_mla_with_kvcache, queued": (
            lambda: flash_mla_with_kvcache(q, cache, table, lengths), False),
        "sparse, queued": (
            lambda: flash_mla_with_kvcache(q, cache, None, None, indices=indices), False),
        "torch.ops.mla.flash_mla_with_kvcache, queued": (
            lambda: torch.ops.mla.flash_mla_with_kvcache(q, cache, table, lengths), False),
    }
    for name, (call, judged) in calls.items():
        call()
        micros = 1e6 * best(call, calls=100 if "queued" in name else 500)
        yield f"{name}: {micros:.2f} us", micros / 10 if judged else 0.0


SECTIONS = {
    f.__name__: f
    for f in (flash_mla, flash_attn, graph, custom_op, layer, attach, overhead, frameworks)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("section", nargs="*", choices=[*SECTIONS, []], help="by default all")
    options = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0), "commit": os.environ.get("MLA_COMMIT", "unknown"),
        "mla": mla.__version__,
        "torch": torch.__version__, "transformers": transformers.__version__,
        "python": sys.version.split()[0], "sections": {},
    }
    failed = False
    for name in options.section or SECTIONS:
        rows: list[dict[str, Any]] = []
        start, trouble = time.perf_counter(), None
        cases = SECTIONS[name]()
        try:
            for case, error in cases:
                rows.append({"case": case, "error": error, "ok": error <= 1})
        except Exception as e:
            trouble = f"after {rows[-1]['case'] if rows else 'nothing'}: {type(e).__name__}: {e}"
            traceback.print_exc()
        bad = [r for r in rows if not r["ok"]]
        worst = max((r["error"] for r in rows), default=0.0)
        seconds = time.perf_counter() - start
        verdict = "FAILED" if bad or trouble else "ok"
        print(f"{name:10} {len(rows):4} cases, {len(bad)} failed, worst {worst:.2f} of what is "
              f"allowed, {seconds:.1f} s: {verdict}", flush=True)
        for row in bad[:20] if name not in ("attach", "overhead") else rows:
            print(f"    {row['case']}" + ("" if row["ok"] else f": {row['error']:.3g}"), flush=True)
        if trouble:
            print(f"    {trouble}", flush=True)
        report["sections"][name] = {"seconds": seconds, "trouble": trouble, "rows": rows}
        failed = failed or bool(bad) or trouble is not None
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(report, indent=1).replace("Infinity", '"inf"')
            options.json.write_text(text + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
