#!/usr/bin/env python3
"""What the GPU's benches measured, beside its marks: peers, the memory's rate, sums of ops.

    scripts/gpu-table.py [DIR]               the JSON in DIR, by default bench/results/h200
    scripts/gpu-table.py [DIR] --markdown    the same as a markdown table
    scripts/gpu-table.py [DIR] --write       puts that table into docs/performance.md
    scripts/gpu-table.py [DIR] --check       exit code 1 when the page shows another one
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import page
from page import ROOT

BEGIN, END = "<!-- made by scripts/gpu-table.py --write -->", "<!-- end of the table -->"

# Peers, on another H200 (700 W, CUDA 13.0, torch 2.11): whole calls, CUDA graphs of 20 over
# rotating inputs of at least 300 MB, median of 12 replays; the better of the two where both ran.
FLASH_MLA, FA3 = "FlashMLA 9241ae3", "FlashAttention-3 0251105"
COPY_GB_PER_S = 3996  # read and written by a plain copy kernel, of the same card
LARGE = 64e6  # bytes, from which on a row op is held against the memory

# Dense decode over bf16: shape, peer, its us, how much faster to be.
DENSE = [
    ("b128 h16 4K", FLASH_MLA, 147.4, 1.0),
    ("b32 h16 16K", FLASH_MLA, 148.5, 1.0),
    ("b128 h128 4K", FA3, 255.0, 1.0),
    ("b128 s2 h128 4K", FLASH_MLA, 528.1, 1.0),
    ("b1 h16 4K", FA3, 15.58, 1.5),
    ("b1 h128 4K", FA3, 21.95, 1.5),
    ("b1 h16 64K", FA3, 38.10, 1.5),
    ("b1 h128 64K", FLASH_MLA, 60.36, 1.5),
    ("b8 h16 4K", FA3, 22.19, 1.5),
    ("b8 h128 4K", FA3, 33.79, 1.5),
    ("b128 h16 4K varlen", FLASH_MLA, 158.2, 1.0),
    ("b128 h128 4K varlen", FLASH_MLA, 260.6, 1.0),
]
# Dense decode over 8-bit caches: shape, the shape in bf16, how much faster to be.
FP8 = [("fp8 b128 h16 4K", "b128 h16 4K", 1.4), ("ds b128 h16 4K", "b128 h16 4K", 1.4)]
# Sparse attention, 2048 positions a row (two caches: 128 and 1024): shape, FlashMLA's us, us to stay below. FlashMLA ran on one card, side by side
# with an older commit; it pads 16 heads to 64.
DEEP_GEMM = "DeepGEMM 54e2261"
SPARSE = [
    ("decode b1 h64 fp8_ds_mla", 17.0, 12),
    ("decode b1 h128 fp8_ds_mla", 17.58, 12),
    ("decode b8 h128 fp8_ds_mla", 25.79, 19),
    ("decode b64 h16 fp8_ds_mla", 74.96, 37),
    ("decode b128 h16 fp8_ds_mla", 113.41, 58),
    ("decode b64 h64 fp8_ds_mla", 75.38, 63),
    ("decode b128 h64 fp8_ds_mla", 113.22, 95),
    ("decode b64 h128 fp8_ds_mla", 93.42, 75),
    ("decode b128 h128 fp8_ds_mla", 183.26, 150),
    ("decode b128 s2 h128 fp8_ds_mla", 364.28, 300),
    ("decode b2 s2 h128 fp8_ds_v4 two caches", 15.5, 11),
    ("decode b128 s2 h128 fp8_ds_v4 two caches", 202, 175),
    ("prefill 4096 h64 bf16", 2326.21, 2150),
    ("prefill 4096 h128 bf16", 4220.46, 4000),
]
# Index scores: shape, DeepGEMM's us (of e4m3 products, beside ours on one card), us to stay below. Each by fp8 products, which are those, and exact.
SCORES = [
    ("score b64 s1 128K", 283.3, 270),
    ("score b64 s2 128K", 333, 285),
    ("score b64 s4 32K", 155, 150),
    ("score b1 s1 64K", 5.2, 5.8),
    ("score b8 s1 32K", 12.4, 12.5),
    ("score b1 s1024 16K", 275, 240),
]
# The indexer: op, shape, DeepGEMM's us or None, us to stay below.
INDEX = [("index_score", shape + kind, peer, below) for kind in (" fp8", "") for shape, peer, below in SCORES] + [
    ("select_topk", "select b64 s1 128K", None, 35),
    ("select_topk", "select b8 s1 32K", None, 12),
    ("select_topk", "select b1 s1 64K", None, 11),
    ("select_topk", "select b1 s1024 16K", None, 100),
]
# Expanded prefill: shape, FlashAttention-3's TFLOP/s (keys concatenated beforehand), what share of
# it to reach.
EXPANDED = [
    ("h16 8K causal", 688.4, 0.9),
    ("h128 8K causal", 609.3, 0.9),
    ("h128 16 x 512 causal", 300.7, 1.0),
]
# The same of e4m3 operands: shape, FlashAttention-3's TFLOP/s (its sums are raw), TFLOP/s to reach.
EXPANDED_FP8 = [
    ("h16 8K causal", 868, 800),
    ("h128 8K causal", 861, 800),
    ("h128 16K causal", 932, 850),
    ("h128 16 x 512 causal", 350, 430),
    ("h16 8K causal, raw sums", 868, 870),
    ("h128 8K causal, raw sums", 861, 870),
    ("h128 16K causal, raw sums", 932, 940),
]
# FlashAttention-3 was not timed on context chunks: its TFLOP/s at 128 heads, causal, stand for it.
CHUNK_PEERS = [("8K", 609.3), ("16K", 668.8)]
# Calls of mla.flash_mla from PyTorch beside the best peer's (scripts/gpu-calls.py): how their names
# begin, what they are, and how much faster to be in the geometric mean.
CALLS = [
    ("dense bf16", "dense decode, bf16", 1.15),
    ("dense bf16 b1 ", "dense decode, bf16, batch 1", 1.5),
    ("dense fp8", "dense decode, fp8", 1.0),
    ("dense ds", "dense decode, fp8_ds_mla", 1.0),
    ("sparse decode ds", "sparse decode, fp8_ds_mla", 1.0),
    ("sparse prefill", "sparse prefill, bf16", 1.0),
    ("varlen", "sequences of 192 / 128, bf16", 0.9),
]
# A replay of 61 layers of deepseek-v3.2: a decode step of so many requests, its most milliseconds; least prompt tokens/s.
RUN, RUN_REQUESTS, STEP_MOST_MS, PROMPT_LEAST = "run_deepseek_v3.2", 16, 13, 12000
ROW_OPS = ["append", "rope_append", "gather", "merge", "merge_splits", "quantize"]
ROW_OPS_LEAST = 0.75
LAYER, LAYER_MOST = "decode b64 8K", 1.05

Row = dict[str, Any]


class Line(NamedTuple):
    what: str
    shape: str
    measured: str
    against: str
    ratio: float | None  # above 1: better than what it is held against
    least: float
    of_floor: float | None = None  # the larger of bytes and arithmetic at the card's peaks
    wrong: bool = False


def read(folder: Path) -> dict[tuple[str, str], Row]:
    """Rows by op and shape. Of rows of one name the first counts, files in alphabetical order; what beside benches lies
    there (of a replay, of the Python package) has no "results"."""
    rows: dict[tuple[str, str], Row] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            for row in json.loads(file.read_text(encoding="utf-8")).get("results", []):
                rows.setdefault((row["op"], row["shape"]), row)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise SystemExit(f"gpu-table: {file} is not a bench's JSON: {e!r}") from e
    if not rows:
        raise SystemExit(f"gpu-table: no bench's JSON in {folder}")
    return rows


def lines(rows: dict[tuple[str, str], Row]) -> Iterator[Line]:
    def line(what: str, op: str, shape: str, against: str, least: float, field: str, unit: str,
             reference: float | None) -> Line:
        """Held against `reference`, in the field's unit; None: not known."""
        row = rows.get((op, shape))
        if row is None:
            return Line(what, shape, "not measured", against, None, least)
        value, wrong = row[field], not row.get("right", True)
        ratio = None
        if reference is not None:
            ratio = reference / value if unit == "us" else value / reference
        digits = 1 if unit == "us" and value < 10000 else 0
        floor = row["floor_us"] / row["us_median"] if "floor_us" in row else row.get("of_floor")
        measured = f"{value:.{digits}f} {unit}" + (" WRONG" if wrong else "")
        return Line(what, shape, measured, against, ratio, least, floor, wrong)

    def us(op: str, shape: str) -> float | None:
        row = rows.get((op, shape))
        return row["us_median"] if row else None

    for shape, peer, peer_us, least in DENSE:
        yield line("dense decode, bf16", "attend_latent", shape, f"{peer}, {peer_us:.4g} us", least,
                   "us_median", "us", peer_us)
    for shape, own, least in FP8:
        own_us = us("attend_latent", own)
        known = f", {own_us:.1f} us" if own_us else ""
        yield line("dense decode, 8 bits", "attend_latent", shape, f"ours in bf16{known}", least,
                   "us_median", "us", own_us)
    for shape, peer_us, most in SPARSE:
        yield line("sparse attention", "attend_sparse", shape, f"{FLASH_MLA}, {peer_us:.4g} us", peer_us / most,
                   "us_median", "us", peer_us)
    for op, shape, peer_us, most in INDEX:
        against = f"{DEEP_GEMM}, {peer_us:.4g} us" if peer_us else f"a mark of {most} us"
        yield line("indexer", op, shape, against, (peer_us or most) / most, "us_median", "us", peer_us or most)
    for begin, what, least in CALLS:
        found = [r for (op, shape), r in rows.items()
                 if op in ("flash_mla", "flash_attn_varlen") and shape.startswith(begin) and "peer_us" in r]
        if not found:
            yield Line("calls from PyTorch", what, "not measured", "best peer of each shape", None, least)
            continue
        ratios = {r["shape"]: r["peer_us"] / r["us_median"] for r in found}
        last = min(ratios, key=lambda shape: ratios[shape])
        yield Line("calls from PyTorch", f"{what}: {len(found)} shapes",
                   f"least {ratios[last]:.2f}: {last.removeprefix(begin).strip()}",
                   "best peer of each shape, mean", math.exp(sum(map(math.log, ratios.values())) / len(ratios)), least,
                   wrong=not all(r["right"] for r in found))
    for shape, rate, least in EXPANDED:
        yield line("expanded prefill, bf16", "attend_expanded", shape, f"{FA3}, {rate:.0f} TFLOP/s",
                   least, "tflop_per_s", "TFLOP/s", rate)
    for shape, rate, mark in EXPANDED_FP8:
        yield line("expanded prefill, e4m3", "attend_expanded_fp8", shape, f"{FA3}, {rate:.0f} TFLOP/s",
                   mark / rate, "tflop_per_s", "TFLOP/s", rate)

    chunked = [r for (op, _), r in rows.items() if op == "context_chunk"
               and (r["tokens"], r["context"], r["heads"]) == (4096, 61440, 128)]
    if not chunked:
        yield Line("prefill over context", "4096 over 61440, h128", "not measured", FA3, None, 1.0)
    else:
        row = min(chunked, key=lambda r: r["us_median"])
        new, context = row["tokens"], row["context"]
        flops = 2 * row["heads"] * (192 + 128) * (new * context + new * (new + 1) / 2)
        for at, rate in CHUNK_PEERS:
            peer_us = row["gather_us"] + row["product_us"] + flops / rate * 1e-6
            yield line("prefill over context", "context_chunk", row["shape"],
                       f"gather, product and FA3 at its {at} rate, {peer_us:.0f} us", 1.0,
                       "us_median", "us", peer_us)

    for op in ROW_OPS:
        least_of: dict[str, Row] = {}
        for (row_op, shape), row in rows.items():
            if row_op != op or row["bytes"] < LARGE:
                continue
            format = "" if shape.startswith("tokens") else shape.split(",")[0]
            if format not in least_of or row["gb_per_s"] < least_of[format]["gb_per_s"]:
                least_of[format] = row
        if not least_of:
            yield Line(f"{op}, 64 MB and more", "", "not measured", "a copy", None, ROW_OPS_LEAST)
        for row in least_of.values():
            yield line(op, op, row["shape"], f"a copy, {COPY_GB_PER_S} GB/s", ROW_OPS_LEAST,
                       "gb_per_s", "GB/s", COPY_GB_PER_S)

    layer = rows.get(("layer", LAYER))
    known = f", {layer['sum_of_ops_us']:.1f} us" if layer else ""
    yield line("layer of deepseek-v3", "layer", LAYER, f"the sum of its ops{known}", 1 / LAYER_MOST,
               "us_median", "us", layer["sum_of_ops_us"] if layer else None)


def replay(folder: Path) -> Iterator[Line]:
    """What steps of a replay took: those of decodes alone, and those with prompts."""
    what, file = "61 layers of deepseek-v3.2", folder / f"{RUN}.json"
    if not file.is_file():
        yield Line(what, f"decode step of {RUN_REQUESTS} requests", "not measured", "a mark", None, 1.0)
        return
    run = json.loads(file.read_text(encoding="utf-8"))
    steps = run["steps_series"]
    each = list(zip(steps["seconds"], steps["prefill_tokens"], steps["decode_tokens"]))
    decodes = [s for s, prompt, decode in each if prompt == 0 and decode == RUN_REQUESTS]
    if decodes:
        ms = 1000 * statistics.median(decodes)
        yield Line(what, f"decode step of {RUN_REQUESTS} requests of 5K", f"{ms:.2f} ms", f"a mark of {STEP_MOST_MS} ms",
                   STEP_MOST_MS / ms, 1.0)
    prompts = [(s, prompt) for s, prompt, _ in each if prompt > 0]
    for shape, rate in [
        ("prompt tokens, steps that have some", sum(n for _, n in prompts) / sum(s for s, _ in prompts)),
        ("prompt tokens, the whole run", run["throughput"]["prompt_tokens_per_second"]),
    ]:
        yield Line(what, shape, f"{rate:.0f} tokens/s", f"a mark of {PROMPT_LEAST} tokens/s", rate / PROMPT_LEAST, 1.0)


HEAD = ("what", "shape", "measured", "of floor", "against", "ratio", "at least", "met")


def cells(line: Line) -> tuple[str, ...]:
    met = "-"
    if line.ratio is not None:
        met = "yes" if line.ratio >= line.least and not line.wrong else "no"
    ratio = "-" if line.ratio is None else f"{line.ratio:.3f}"
    floor = "-" if line.of_floor is None else f"{100 * line.of_floor:.0f}%"
    return (line.what, line.shape, line.measured, floor, line.against, ratio, f"{line.least:.2f}",
            met)


def plain(table: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in table) for i in range(len(HEAD))]
    right = {2, 3, 5, 6}
    return "".join("  ".join(c.rjust(w) if i in right else c.ljust(w)
                             for i, (c, w) in enumerate(zip(row, widths))).rstrip() + "\n"
                   for row in table)


def markdown(table: list[tuple[str, ...]]) -> str:
    rule = ("---", "---", "--:", "--:", "---", "--:", "--:", "---")
    return "".join(f"| {' | '.join(row)} |\n" for row in [table[0], rule, *table[1:]])


def commits(folder: Path) -> str:
    """Which commit each bench's JSON comes from."""
    files: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        if "results" in found or file.stem == RUN:
            files.setdefault(found.get("commit", "unknown"), []).append(file.stem)
    known = [f"{commit}: {', '.join(names)}" for commit, names in files.items()]
    return f"Commits of these figures: {'; '.join(known)}.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="The GPU's benches, beside its marks.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "bench/results/h200")
    page.add_options(parser).add_argument("--markdown", action="store_true", help="as a markdown table")
    options = parser.parse_args()

    table = [HEAD, *map(cells, lines(read(options.folder))), *map(cells, replay(options.folder))]
    if not options.write and not options.check:
        print(markdown(table) if options.markdown else plain(table), end="")
        print("\n" + commits(options.folder), end="")
        return 0
    return page.put(markdown(table) + "\n" + commits(options.folder), BEGIN, END, options.write)


if __name__ == "__main__":
    sys.exit(main())
