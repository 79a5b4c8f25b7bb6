#!/usr/bin/env python3
"""Times of mla.flash_mla's calls from PyTorch on a GPU, as an engine makes them.

    scripts/gpu-calls.py [--json bench/results/<card>/calls.json] [--beside flash_mla] [word ...]

A call is everything it launches. A CUDA graph holds calls in a row, as a step's layers make them:
of the same lengths and block table, with one get_mla_metadata() (alone: without), over queries and
caches that together exceed the second level cache. Its replays are timed. Each shape's first and
last sequences are checked against float64. Calls of flash_attn_varlen_func are timed alike, a row of each
checked. With words, only the shapes whose names contain one of them. Beside each time
stands the best peer's of the same call on another H200: FlashMLA 9241ae3, FlashAttention-3 0251105
and FlashInfer 0.7.2, whose schedules were made outside the graph. With --beside, FlashMLA's is the one
measured here: replays of its graph and of ours take turns. Exit code 1 for a wrong answer of ours.
"""

from __future__ import annotations

import argparse
import importlib
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
import mla.flash_mla
from mla.flash_mla import flash_attn_varlen_func

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


class Peers(NamedTuple):
    """Microseconds on another H200."""

    flash_mla: float
    other: float = math.inf  # the best of FlashAttention-3 and FlashInfer


# Peers of 16, 64 and 128 heads.
GRID: dict[tuple[int, int, int], list[Peers]] = {key: [Peers(*us) for us in all_us] for key, all_us in {
    # batch, query tokens, K
    (1, 1, 4): ((22.51, 15.59), (24.84, 17.94), (19.47, 18.53)),
    (8, 1, 4): ((21.99, 22.10), (26.10, 24.20), (32.76, 29.65)),
    (32, 1, 4): ((45.42, 45.96), (52.80, 54.00), (72.89, 77.73)),
    (64, 1, 4): ((81.97, 81.96), (93.04, 93.73), (130.99, 145.19)),
    (128, 1, 4): ((149.75, 149.34), (154.97, 156.85), (265.85, 256.12)),
    (1, 1, 16): ((40.54, 23.09), (43.36, 26.02), (38.20, 31.18)),
    (8, 1, 16): ((47.57, 49.14), (53.14, 53.24), (74.04, 77.76)),
    (32, 1, 16): ((152.53, 162.72), (166.10, 177.65), (264.68, 291.21)),
    (64, 1, 16): ((297.48, 322.59), (330.31, 344.79), (505.53, 552.71)),
    (128, 1, 16): ((593.70, 650.70), (650.89, 654.53), (1058.51, 1077.75)),
    (1, 1, 64): ((53.76, 38.91), (56.36, 43.73), (51.65, 54.46)),
    (8, 1, 64): ((154.16, 161.63), (169.25, 183.73), (257.22, 279.77)),
    (32, 1, 64): ((585.72, 639.91), (641.85, 680.93), (1047.73, 1082.38)),
    (64, 1, 64): ((1184.59, 1244.16), (1270.38, 1307.81), (2006.67, 2158.88)),
    (128, 1, 64): ((2378.71, 2504.43), (2405.26, 2805.89), (4111.38, 4353.90)),
    (128, 2, 4): ((149.74, 157.33), (271.02, 283.39), (498.95, 515.78)),
}.items()}
PEERS: dict[Shape, Peers] = {
    **{dense("bf16", b, s, h, k): us for (b, s, k), all_us in GRID.items()
       for h, us in zip((16, 64, 128), all_us)},
    dense("bf16", 8, 2, 128, 4): Peers(42.70, 44.59),
    dense("bf16", 128, 1, 16, 4, True): Peers(152.72, 184.83),
    dense("bf16", 128, 1, 64, 4, True): Peers(177.00, 200.77),
    dense("bf16", 128, 1, 128, 4, True): Peers(260.74, 288.04),
    dense("bf16", 128, 1, 128, 1): Peers(73.29, 83.11),
    dense("bf16", 128, 1, 16, 1): Peers(42.36, 45.17),
    **{s: Peers(math.inf, us) for s, us in {
        dense("fp8", 1, 1, 16, 4): 33.38, dense("fp8", 8, 1, 128, 4): 76.44,
        dense("fp8", 128, 1, 16, 4): 455.56, dense("fp8", 128, 1, 64, 4): 458.90,
        dense("fp8", 128, 1, 128, 4): 909.11, dense("fp8", 1, 1, 128, 64): 148.20,
    }.items()},
    **{s: Peers(us) for s, us in {
        # FlashMLA's sparse call with all slots listed; of 16 heads, which it lacks, 64.
        dense("ds", 1, 1, 128, 4): 20.60, dense("ds", 8, 1, 128, 4): 38.17,
        dense("ds", 128, 1, 64, 4): 205.02, dense("ds", 128, 1, 128, 4): 344.83,
        sparse("ds", 1, 1, 64): 17.00, sparse("ds", 1, 1, 128): 17.58, sparse("ds", 8, 1, 128): 25.79,
        sparse("ds", 64, 1, 64): 75.38, sparse("ds", 64, 1, 128): 93.42,
        sparse("ds", 64, 1, 16): 74.96, sparse("ds", 128, 1, 16): 113.41,
        sparse("ds", 128, 1, 64): 113.22, sparse("ds", 128, 1, 128): 183.26,
        sparse("ds", 128, 2, 128): 364.28,
        prefill(64): 2326.21, prefill(128): 4220.46,
    }.items()},
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


def call_of(s: Shape, x: Inputs, package: Any, meta: Any) -> Callable[[], tuple[torch.Tensor, ...]]:
    if s.prefill:
        return lambda: package.flash_mla_sparse_fwd(
            x.q[:, 0], x.cache.view(-1, 1, ROW), x.indices.view(s.batch, 1, s.topk), SCALE)
    if x.indices is not None:
        return lambda: package.flash_mla_with_kvcache(
            x.q, x.cache, None, None, VALUE, meta, softmax_scale=SCALE, is_fp8_kvcache=s.kind != "bf16",
            indices=x.indices)
    return lambda: package.flash_mla_with_kvcache(
        x.q, x.cache, x.table, x.lengths, VALUE, meta, softmax_scale=SCALE, causal=True,
        is_fp8_kvcache=s.kind != "bf16")


def slots_at(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Of one sequence, or of each row of a block table."""
    return table[..., positions // PAGE].long() * PAGE + positions % PAGE


def all_slots(s: Shape, x: Inputs) -> torch.Tensor:
    """Of a dense call, as a sparse call lists them."""
    slots = slots_at(x.table, torch.arange(s.length, device=DEVICE))
    return slots.int().view(s.batch, 1, -1).repeat(1, s.queries, 1)


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
                slots = slots_at(x.table[b], at)
            rows = rows_of(s, x.cache, slots)
            weights = torch.softmax(x.q[b, i].double() @ rows.T * SCALE, 1)
            wanted = weights @ rows[:, :VALUE]
            difference = (out[b, i].double() - wanted).abs().max() / wanted.abs().max()
            worst = max(worst, float(difference))  # NaN stays out of max's way
            if not math.isfinite(float(difference)):
                return math.inf
    return worst


def measure(s: Shape, beside: Any = None) -> dict[str, Any]:
    torch.manual_seed(1)
    lengths = lengths_of(s)
    sizes, flops = work_of(s, lengths)
    floor = max(sizes / READ_GB_PER_S / 1e3, flops / TFLOP_PER_S / 1e6)
    copies = max(1, min(CALLS, math.ceil(COLD_BYTES / sizes)))
    calls = max(copies, min(CALLS, int(20000 / floor)), 2)
    calls -= calls % copies
    tables = None if s.topk else table_of(lengths)
    inputs = [inputs_of(s, lengths, tables) for _ in range(copies)]

    def captured(package: Any, inputs: list[Inputs], meta: Any) -> tuple[Timed, float]:
        """Calls in a graph, and the error of the first and the last."""
        each = [call_of(s, x, package, meta) for x in inputs]
        error = error_of(s, inputs[0], each[0]()[0])
        torch.cuda.synchronize()
        timed = Timed(calls, lambda i: each[i % copies]()[0])
        return timed, max(error, error_of(s, inputs[(calls - 1) % copies], timed.out))

    def schedule(package: Any) -> Any:
        return None if s.alone else package.get_mla_metadata()[0]

    ours, error = captured(mla.flash_mla, inputs, schedule(mla.flash_mla))
    row: dict[str, Any] = {"op": "flash_mla", "shape": s.name}
    theirs = None
    if beside is not None and not s.alone:
        listed = s.kind == "ds" and not s.topk
        try:
            theirs, their_error = captured(
                beside, [x._replace(indices=all_slots(s, x)) for x in inputs] if listed else inputs, schedule(beside))
        except Exception as e:  # whatever it says of a shape that it does not take
            row["beside_refused"] = f"{type(e).__name__}: {e}"[:200]
    times, their_times = replay_in_turn(ours, theirs)
    row |= {
        **median_of(times), "floor_us": floor, "error": error, "right": error < 2e-2, "calls": calls,
        "inputs": copies,
    }
    peers = PEERS.get(s, Peers(math.inf))
    if theirs is not None:
        row["beside_us"], row["beside_error"] = statistics.median(their_times), their_error
        if their_error < 2e-2:
            peers = peers._replace(flash_mla=row["beside_us"])
    if math.isfinite(min(peers)):
        row["peer_us"] = min(peers)
    return row


class Timed:
    """Calls in a row, captured."""

    def __init__(self, calls: int, call: Callable[[int], torch.Tensor]) -> None:
        self.calls, self.graph = calls, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(calls):
                out = call(i)
        self.out = out  # the last call's
        self.graph.replay()

    def replay(self) -> float:
        """A call's microseconds."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * float(begin.elapsed_time(end)) / self.calls


def replay_in_turn(*timed: Timed | None) -> list[list[float]]:
    """Times of each, one replay of each after another, so that all see the card alike."""
    times: list[list[float]] = [[] for _ in timed]
    for i in range(REPLAYS + 2):
        for found, t in zip(times, timed):
            if t is not None:
                us = t.replay()
                if i >= 2:
                    found.append(us)
    return times


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
    timed = Timed(calls, call)
    error = max(error, error_of(calls - 1, timed.out))
    times, = replay_in_turn(timed)
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
    parser.add_argument("--beside", metavar="MODULE", help="a package of FlashMLA's functions, its own for example: its "
                        "calls over the same tensors are timed in turn with ours, where it takes them")
    parser.add_argument("words", nargs="*", help="of the shapes' names")
    options = parser.parse_args()
    beside = importlib.import_module(options.beside) if options.beside else None
    rows = []
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        **{s.name: lambda s=s: measure(s, beside) for s in [*PEERS, *OTHERS]},
        **{s.name: lambda s=s, peer=peer: measure_sequences(s, peer) for s, peer in SEQUENCES.items()},
    }
    for name, measured in measures.items():
        if options.words and not any(word in name for word in options.words):
            continue
        row = measured()
        torch.cuda.empty_cache()
        rows.append(row)
        peers = f"  {row['peer_us'] / row['us_median']:.3f} of a peer" if "peer_us" in row else ""
        if "beside_us" in row:
            peers += f"  {options.beside} {row['beside_us']:9.2f}"
        print(f"{row['shape']:40} {row['us_median']:9.2f} us  p90 {row['us_p90']:9.2f}{peers}"
              + ("" if row["right"] else f"  WRONG: {row['error']:.3g}"), flush=True)
    with_peers = [r for r in rows if "peer_us" in r]
    for kind in ("dense bf16", "dense bf16 b1 ", "dense fp8", "dense ds", "sparse", "varlen"):
        summary([r for r in with_peers if r["shape"].startswith(kind)], kind.strip())
    if options.json:
        report = {
            "device": torch.cuda.get_device_name(0), "commit": os.environ.get("MLA_COMMIT", "unknown"),
            "command": "scripts/gpu-calls.py" + (f" --beside {options.beside}" if options.beside else ""), "mla": mla.__version__, "torch": torch.__version__,
            "method": f"CUDA graph of up to {CALLS} calls from PyTorch, inputs of {COLD_BYTES / 1e6:.0f} MB in turn, "
                      f"{REPLAYS} replays", "results": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(not all(r["right"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
