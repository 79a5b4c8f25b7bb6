#!/usr/bin/env python3
"""What `mla bench` measured on a CPU, beside the machine's peaks.

    scripts/cpu-table.py [FILE]            the rows of FILE, by default bench/results/cpu/zen5-2-threads.json
    scripts/cpu-table.py [FILE] --write    puts them into docs/performance.md
    scripts/cpu-table.py [FILE] --check    exit code 1 when the page shows others
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import page
from page import ROOT

BEGIN, END = "<!-- made by scripts/cpu-table.py --write -->", "<!-- end of the CPU's table -->"
# Layouts of the same codes, whose rows are like the plain one's.
VARIANTS = ("_column", "_tma", "_packed", "_ue8m0", "fp8_64")


def time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def bound(row: dict[str, Any], roof: dict[str, float]) -> str:
    """Which of the two peaks the row's roof is."""
    if not row["bytes"] and not row["flops"]:
        return "-"
    if row["of_roof"] is not None and row["of_f32"] > 1.2 * row["of_roof"]:
        return "arithmetic"  # against bf16's peak: against f32's it would be that much more
    memory, arithmetic = row["bytes"] / roof["read_gbps"], row["flops"] / roof["fma_gflops"]
    return "memory" if memory > arithmetic else "arithmetic"


def table(found: dict[str, Any]) -> str:
    roof, machine = found["roof"], found["machine"]
    out = [f"**{machine['cpu']}, {found['options']['threads']} threads, target {machine['target']}**\n\n",
           "| row | median | bound by | of that roof |\n", "| --- | --: | --- | --: |\n"]
    for row in found["rows"]:
        if any(v in row["name"] for v in VARIANTS):
            continue
        share = row["of_roof"]  # none: operands that lay in caches moved faster than memory does
        of_roof = "above it" if share is None else f"{100 * share:.0f}%" if share else "-"
        out.append(f"| {row['name']} | {time(row['median_s'])} | {bound(row, roof)} | {of_roof} |\n")
    out.append(f"\nRead {roof['read_gbps']:.1f} GB/s, f32 multiply-add {roof['fma_gflops']:.0f} GFLOP/s, "
               f"bf16 {roof['bf16_gflops']:.0f} GFLOP/s, in one run with the rows. Commit {found['commit']}, {found['date'][:10]}.\n")
    return "".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description="CPUs' benches, beside their peaks.")
    parser.add_argument("files", nargs="*", type=Path, help="by default all of bench/results/cpu")
    page.add_options(parser)
    options = parser.parse_args()

    made = []
    for file in options.files or sorted((ROOT / "bench/results/cpu").glob("*.json")):
        try:
            made.append(table(json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise SystemExit(f"cpu-table: {file} is not a bench's JSON: {e!r}") from e
    if not options.write and not options.check:
        print("\n".join(made), end="")
        return 0
    return page.put("\n".join(made), BEGIN, END, options.write)


if __name__ == "__main__":
    sys.exit(main())
