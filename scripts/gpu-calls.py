#!/usr/bin/env python3
"""Times of mla.flash_mla's calls from PyTorch on a GPU, as an engine makes them.

    scripts/gpu-calls.py [--json bench/results/<card>/calls.json] [word ...]

A call is everything it launches. A CUDA graph holds calls in a row, as a step's layers make them:
of the same lengths and block table, with one get_mla_metadata() (alone: without), over queries and
caches that together exceed the second level cache. Its replays are timed. Each shape's first and
last sequences are checked against float64. Calls of flash_attn_varlen_func are timed alike, a row of each
checked. With words, only the shapes whose names contain one of them. Beside each time
stands the best peer's of the same call on another H200: FlashMLA 9241ae3, FlashAttention-3 0251105
and FlashInfer 0.7.2, whose schedules were made outside the graph. Exit code 1 for a wrong answer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mla
from mla.flash_mla import (
    flash_attn_varlen_func, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata,
)

DEVICE = "cuda:0"
PAGE, ROW, VALUE, SCALE = 64, 576, 512, 576**-0.5
COLD_BYTES = 300e6
REPLAYS, CALLS = 12, 20
READ_GB_PER_S, TFLOP_PER_S = 4560.0, 680.0


class Shape(NamedTuple):
    kind: str  # of the cache: bf16, fp8, ds (fp8_ds_mla, 656 bytes a row)
    batch: int
    queries: int
    heads: int
    length: int  # of sequences; of a sparse call, of its cache
    topk: int = 0
    varlen: bool = False
    prefill: bool = False  # flash_mla_sparse_fwd: the batch is the query tokens
    alone: bool = False

    @property
    def name(self) -> str:
        size = f"{self.length // 1024}K" + " varlen" * self.varlen + " alone" * self.alone
        if self.topk:
            what = f"sparse {'prefill' if self.prefill else 'decode'}"
            size = f"{self.topk} of {size}"
        else:
            what = "dense"
        tokens = f"{self.batch} tokens" if self.prefill else f"b{self.batch} s{self.queries}"
        return f"{what} {self.kind} {tokens} h{self.heads} {size}"


def dense(kind: str, batch: int, queries: int, heads: int, kilo: int, varlen: bool = False) -> Shape:
    return Shape(kind, batch, queries, heads, kilo * 1024, varlen=varlen)


def sparse(kind: str, batch: int, queries: int, heads: int) -> Shape:
    return Shape(kind, batch, queries, heads, 32768, topk=2048)


def prefill(heads: int) -> Shape:
    return Shape("bf16", 4096, 1, heads, 65536, topk=2048, prefill=True)


# The best peer's microseconds of 16, 64 and 128 heads.
GRID: dict[tuple[int, int, int], tuple[float, float, float]] = {  # batch, query tokens, K
    (1, 1, 4): (15.59, 17.94, 18.53), (8, 1, 4): (21.99, 24.20, 29.65),
    (32, 1, 4): (45.42, 52.80, 72.89), (64, 1, 4): (81.96, 93.04, 130.99),
    (128, 1, 4): (149.34, 154.97, 256.12),
    (1, 1, 16): (23.09, 26.02, 31.18), (8, 1, 16): (47.57, 53.14, 74.04),
    (32, 1, 16): (152.53, 166.10, 264.68), (64, 1, 16): (297.48, 330.31, 505.53),
    (128, 1, 16): (593.70, 650.89, 1058.51),
    (1, 1, 64): (38.91, 43.73, 51.65), (8, 1, 64): (154.16, 169.25, 257.22),
    (32, 1, 64): (585.72, 641.85, 1047.73), (64, 1, 64): (1184.59, 1270.38, 2006.67),
    (128, 1, 64): (2378.71, 2405.26, 4111.38),
    (128, 2, 4): (149.74, 271.02, 498.95),
}
PEERS: dict[Shape, float] = {
    **{dense("bf16", b, s, h, k): us for (b, s, k), all_us in GRID.items()
       for h, us in zip((16, 64, 128), all_us)},
    dense("bf16", 8, 2, 128, 4): 42.70,
    dense("bf16", 128, 1, 16, 4, True): 152.72,
    dense("bf16", 128, 1, 64, 4, True): 177.00,
    dense("bf16", 128, 1, 128, 4, True): 260.74,
    dense("bf16", 128, 1, 128, 1): 73.29,
    dense("bf16", 128, 1, 16, 1): 42.36,
    dense("fp8", 1, 1, 16, 4): 33.38, dense("fp8", 8, 1, 128, 4): 76.44,
    dense("fp8", 128, 1, 16, 4): 455.56, dense("fp8", 128, 1, 64, 4): 458.90,
    dense("fp8", 128, 1, 128, 4): 909.11, dense("fp8", 1, 1, 128, 64): 148.20,
    # All slots listed, of its sparse call.
    dense("ds", 1, 1, 128, 4): 20.60, dense("ds", 8, 1, 128, 4): 38.17,
    dense("ds", 128, 1, 64, 4): 205.02, dense("ds", 128, 1, 128, 4): 344.83,
    sparse("ds", 1, 1, 64): 17.00, sparse("ds", 1, 1, 128): 17.58, sparse("ds", 8, 1, 128): 25.79,
    sparse("ds", 64, 1, 64): 75.38, sparse("ds", 64, 1, 128): 93.42,
    sparse("ds", 64, 1, 16): 74.96, sparse("ds", 128, 1, 16): 113.41,
    sparse("ds", 128, 1, 64): 113.22, sparse("ds", 128, 1, 128): 183.26,
    sparse("ds", 128, 2, 128): 364.28,
    prefill(64): 2326.21, prefill(128): 4220.46,
}
OTHERS = [
    sparse("bf16", 64, 1, 16), sparse("bf16", 64, 1, 128),  # no peer has such a call
    *(dense("bf16", b, 1, h, 4)._replace(alone=True) for b in (1, 8) for h in (16, 128)),
]


class Sequences(NamedTuple):
    """Of flash_attn_varlen_func: causal, keys of 192 elements, values of 128."""

    heads: int
    count: int
    length: int
    dtype: torch.dtype = torch.bfloat16
    kv_heads: int = 0  # 0: as many as heads

    @property
    def name(self) -> str:
        shared = f" kv{self.kv_heads}" if self.kv_heads else ""
        size = f"{self.length // 1024}K" if self.length >= 1024 else str(self.length)
        return f"varlen {str(self.dtype).removeprefix('torch.')} h{self.heads}{shared} {self.count} x {size}"

    @property
    def flops(self) -> float:
        return 2.0 * self.heads * self.count * self.length * (self.length + 1) / 2 * (192 + 128)


# FlashAttention-3's TFLOP/s.
SEQUENCES: dict[Sequences, float | None] = {
    Sequences(16, 1, 8192): 688.4, Sequences(128, 1, 8192): 609.3, Sequences(128, 16, 512): 300.7,
    Sequences(16, 1, 8192, torch.float16): None, Sequences(16, 1, 8192, kv_heads=1): None,
}
Tables = tuple[torch.Tensor, torch.Tensor]  # pages of each sequence, and lengths


class Inputs(NamedTuple):
    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    indices: torch.Tensor | None


def cache_of(kind: str, rows: int) -> torch.Tensor:
    """Random rows [pages, PAGE, 1, row]."""
    pages = rows // PAGE
    if kind == "bf16":
        cache = torch.empty(pages, PAGE, 1, ROW, dtype=torch.bfloat16, device=DEVICE)
        return cache.normal_()
    # Codes of 1/8 to 1.875 and either sign: fp8's scale, or that of 128 of fp8_ds_mla's, is 1.
    shape = (pages, PAGE, 1, ROW if kind == "fp8" else 656)
    codes = torch.randint(0x20, 0x40, shape, dtype=torch.uint8, device=DEVICE)
    codes |= torch.randint(0, 2, shape, dtype=torch.uint8, device=DEVICE) << 7
    if kind == "ds":
        codes[..., 512:528] = torch.ones(4, device=DEVICE).view(torch.uint8)
        codes[..., 528:] = torch.randn(pages, PAGE, 1, 64, device=DEVICE).bfloat16().view(torch.uint8)
    return codes.view(torch.float8_e4m3fn)


def row_bytes(kind: str) -> int:
    return {"bf16": 2 * ROW, "fp8": ROW, "ds": 656}[kind]


def work_of(s: Shape, lengths: list[int]) -> tuple[float, float]:
    """Bytes, each once, and FLOPs."""
    keys = s.topk * s.batch * s.queries if s.topk else sum(lengths)
    rows = min(keys, s.length) if s.prefill else keys
    queries = s.batch * s.queries
    sizes = rows * row_bytes(s.kind) + queries * s.heads * (ROW + VALUE) * 2 + 4 * queries * s.topk
    pairs = keys if s.topk else keys * s.queries
    return float(sizes), 2.0 * pairs * s.heads * (ROW + VALUE)


def lengths_of(s: Shape) -> list[int]:
    if not s.varlen:
        return [s.length] * s.batch
    spread = torch.randn(s.batch).mul_(s.length / 2).add_(s.length)
    return [int(n) for n in spread.clamp_(min=1, max=2 * s.length)]


def inputs_of(s: Shape, lengths: list[int], tables: Tables | None) -> Inputs:
    q = torch.randn(s.batch, s.queries, s.heads, ROW, device=DEVICE).bfloat16()
    if s.topk:  # lists of its own for each layer
        cache = cache_of(s.kind, s.length if s.prefill else s.length * s.batch)
        order = torch.rand(s.batch, s.queries, s.length, device=DEVICE)
        indices = order.topk(s.topk).indices.int()
        if not s.prefill:
            indices += s.length * torch.arange(s.batch, device=DEVICE, dtype=torch.int32)[:, None, None]
        none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
        return Inputs(q, cache, none, none, indices)
    assert tables is not None
    pages = sum(-(-n // PAGE) for n in lengths)
    return Inputs(q, cache_of(s.kind, pages * PAGE), *tables, None)


def table_of(lengths: list[int]) -> Tables:
    """Pages in no order, and the lengths."""
    pages = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(pages), device=DEVICE).int()
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device=DEVICE)
    for b, part in enumerate(order.split(pages)):
        table[b, : len(part)] = part
    return table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def call_of(s: Shape, x: Inputs, meta: Any = None) -> Callable[[], tuple[torch.Tensor, ...]]:
    if s.prefill:
        return lambda: flash_mla_sparse_fwd(
            x.q[:, 0], x.cache.view(-1, 1, ROW), x.indices.view(s.batch, 1, s.topk), SCALE)
    if s.topk:
        return lambda: flash_mla_with_kvcache(
            x.q, x.cache, None, None, softmax_scale=SCALE, is_fp8_kvcache=s.kind != "bf16", indices=x.indices)
    return lambda: flash_mla_with_kvcache(
        x.q, x.cache, x.table, x.lengths, tile_scheduler_metadata=meta, softmax_scale=SCALE, causal=True,
        is_fp8_kvcache=s.kind != "bf16")


def rows_of(s: Shape, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    rows = cache.view(torch.uint8).view(-1, row_bytes(s.kind))[slots]
    if s.kind == "bf16":
        return rows.view(torch.bfloat16).double()
    if s.kind == "fp8":
        return rows.view(torch.float8_e4m3fn).double()
    codes = rows[:, :512].contiguous().view(torch.float8_e4m3fn).double()
    return torch.cat([codes, rows[:, 528:].contiguous().view(torch.bfloat16).double()], 1)


def error_of(s: Shape, x: Inputs, out: torch.Tensor) -> float:
    """Of the first and last batch entries, against float64, relative to the largest number."""
    out = out.view(s.batch, s.queries, s.heads, VALUE)
    worst = 0.0
    for b in (0, s.batch - 1):
        for i in range(s.queries):
            if x.indices is not None:
                slots = x.indices[b, i].long()
            else:
                at = torch.arange(int(x.lengths[b]) - s.queries + 1 + i, device=DEVICE)
                slots = x.table[b].long()[at // PAGE] * PAGE + at % PAGE
            rows = rows_of(s, x.cache, slots)
            weights = torch.softmax(x.q[b, i].double() @ rows.T * SCALE, 1)
            wanted = weights @ rows[:, :VALUE]
            difference = (out[b, i].double() - wanted).abs().max() / wanted.abs().max()
            worst = max(worst, float(difference))  # NaN stays out of max's way
            if not math.isfinite(float(difference)):
                return math.inf
    return worst


def measure(s: Shape) -> dict[str, Any]:
    torch.manual_seed(1)
    lengths = lengths_of(s)
    sizes, flops = work_of(s, lengths)
    floor = max(sizes / READ_GB_PER_S / 1e3, flops / TFLOP_PER_S / 1e6)
    copies = max(1, min(CALLS, math.ceil(COLD_BYTES / sizes)))
    calls = max(copies, min(CALLS, int(20000 / floor)), 2)
    calls -= calls % copies
    tables = None if s.topk else table_of(lengths)
    inputs = [inputs_of(s, lengths, tables) for _ in range(copies)]
    error = error_of(s, inputs[0], call_of(s, inputs[0])()[0])
    torch.cuda.synchronize()
    meta = None if s.alone else get_mla_metadata()[0]
    times, out = time_graph(calls, lambda i: call_of(s, inputs[i % copies], meta)()[0])
    error = max(error, error_of(s, inputs[(calls - 1) % copies], out))
    row: dict[str, Any] = {
        "op": "flash_mla", "shape": s.name, **median_of(times), "floor_us": floor, "error": error,
        "right": error < 2e-2, "calls": calls, "inputs": copies,
    }
    if s in PEERS:
        row["peer_us"] = PEERS[s]
    return row


def time_graph(calls: int, call: Callable[[int], torch.Tensor]) -> tuple[list[float], torch.Tensor]:
    """A call's microseconds in each replay, and the last call's result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            out = call(i)
    graph.replay()
    times = []
    for i in range(REPLAYS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(1e3 * begin.elapsed_time(end) / calls)
    return times, out


def median_of(times: list[float]) -> dict[str, float]:
    return {"us_median": statistics.median(times),
            "us_p90": statistics.quantiles(times, n=10, method="inclusive")[8]}


def measure_sequences(s: Sequences, peer: float | None) -> dict[str, Any]:
    torch.manual_seed(1)
    rows, kv_heads = s.count * s.length, s.kv_heads or s.heads
    widths = (s.heads, 192), (kv_heads, 192), (kv_heads, 128)
    copies = max(1, min(CALLS, math.ceil(COLD_BYTES / (2 * rows * sum(h * w for h, w in widths)))))
    inputs = [[torch.randn(rows, *w, device=DEVICE).to(s.dtype) for w in widths] for _ in range(copies)]
    begins = torch.arange(0, rows + 1, s.length, dtype=torch.int32, device=DEVICE)

    def call(i: int) -> torch.Tensor:
        out, _ = flash_attn_varlen_func(*inputs[i % copies], begins, begins, s.length, s.length, causal=True)
        return out

    def error_of(i: int, out: torch.Tensor) -> float:  # the last sequence's last row: all heads, all its keys
        q, k, v = (x.double() for x in inputs[i % copies])
        k, v = (x[-s.length:].repeat_interleave(s.heads // kv_heads, 1) for x in (k, v))
        weights = torch.softmax(torch.einsum("hd,khd->hk", q[-1], k) * 192**-0.5, 1)
        wanted = torch.einsum("hk,khd->hd", weights, v)
        difference = float((out[-1].double() - wanted).abs().max() / wanted.abs().max())
        return difference if math.isfinite(difference) else math.inf

    error = error_of(0, call(0))
    torch.cuda.synchronize()
    floor = s.flops / TFLOP_PER_S / 1e6
    calls = max(copies, min(CALLS, int(20000 / floor)), 2)
    times, out = time_graph(calls, call)
    error = max(error, error_of(calls - 1, out))
    row: dict[str, Any] = {
        "op": "flash_attn_varlen", "shape": s.name, **median_of(times), "floor_us": floor,
        "tflop_per_s": s.flops / statistics.median(times) / 1e6, "error": error, "right": error < 2e-2,
        "calls": calls, "inputs": copies,
    }
    if peer:
        row["peer_us"] = s.flops / peer / 1e6
    return row


def summary(rows: list[dict[str, Any]], name: str) -> None:
    ratios = [r["peer_us"] / r["us_median"] for r in rows]
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"{name}: {len(ratios)} shapes, {mean:.3f} times the best peer's speed in the geometric mean, "
              f"least {min(ratios):.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("words", nargs="*", help="of the shapes' names")
    options = parser.parse_args()
    rows = []
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        **{s.name: lambda s=s: measure(s) for s in [*PEERS, *OTHERS]},
        **{s.name: lambda s=s, peer=peer: measure_sequences(s, peer) for s, peer in SEQUENCES.items()},
    }
    for name, measured in measures.items():
        if options.words and not any(word in name for word in options.words):
            continue
        row = measured()
        torch.cuda.empty_cache()
        rows.append(row)
        beside = f"  {row['peer_us'] / row['us_median']:.3f} of a peer" if "peer_us" in row else ""
        print(f"{row['shape']:40} {row['us_median']:9.2f} us  p90 {row['us_p90']:9.2f}{beside}"
              + ("" if row["right"] else f"  WRONG: {row['error']:.3g}"), flush=True)
    with_peers = [r for r in rows if "peer_us" in r]
    for kind in ("dense bf16", "dense bf16 b1 ", "dense fp8", "dense ds", "sparse", "varlen"):
        summary([r for r in with_peers if r["shape"].startswith(kind)], kind.strip())
    if options.json:
        report = {
            "device": torch.cuda.get_device_name(0), "commit": os.environ.get("MLA_COMMIT", "unknown"),
            "command": "scripts/gpu-calls.py", "mla": mla.__version__, "torch": torch.__version__,
            "method": f"CUDA graph of up to {CALLS} calls from PyTorch, inputs of {COLD_BYTES / 1e6:.0f} MB in turn, "
                      f"{REPLAYS} replays", "results": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(not all(r["right"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
