#!/usr/bin/env python3
"""What `mla bench` measured on a CPU, beside the machine's peaks.

    scripts/cpu-table.py [FILE ...]          the rows of the files, a column each, by default of all of bench/results/cpu
    scripts/cpu-table.py [FILE ...] --write  puts them into docs/performance.md
    scripts/cpu-table.py [FILE ...] --check  exit code 1 when the page shows others
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


def cell(row: dict[str, Any]) -> str:
    share = row["of_roof"]  # none: operands that lay in caches moved faster than memory does
    of_roof = ", above" if share is None else f", {100 * share:.0f}%" if share else ""
    return time(row["median_s"]) + of_roof


def table(machines: list[dict[str, Any]]) -> str:
    """A row for each row of any machine's bench, in the order of the one that has most; a column for each machine."""
    title = [f"{m['machine']['cpu']}{m.get('kind', '')}, {m['options']['threads']} threads" for m in machines]
    of = [{row["name"]: row for row in m["rows"]} for m in machines]
    names = dict.fromkeys(name for rows in sorted(of, key=len, reverse=True) for name in rows)
    out = [f"| row | bound by | {' | '.join(title)} |\n", f"| --- | --- |{' --: |' * len(machines)}\n"]
    for name in names:
        if any(v in name for v in VARIANTS):
            continue
        bounds = dict.fromkeys(bound(rows[name], m["roof"]) for rows, m in zip(of, machines) if name in rows)
        cells = (cell(rows[name]) if name in rows else "" for rows in of)
        out.append(f"| {name} | {' or '.join(bounds)} | {' | '.join(cells)} |\n")
    out.append("\n| peaks, in one run with the rows | read | f32 multiply-add | bf16 | kernels | commit |\n")
    out.append("| --- | --: | --: | --: | --- | --- |\n")
    for name, m in zip(title, machines):
        roof = m["roof"]
        out.append(f"| {name} | {roof['read_gbps']:.1f} GB/s | {roof['fma_gflops']:.0f} GFLOP/s | "
                   f"{roof['bf16_gflops']:.0f} GFLOP/s | {m['machine']['target']} | {m['commit']}, {m['date'][:10]} |\n")
    return "".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description="CPUs' benches, beside their peaks.")
    parser.add_argument("files", nargs="*", type=Path, help="by default all of bench/results/cpu")
    page.add_options(parser)
    options = parser.parse_args()

    machines = []
    files = options.files or sorted((ROOT / "bench/results/cpu").glob("*.json"))
    for file in files:
        try:
            machines.append(json.loads(file.read_text(encoding="utf-8")))
            table(machines[-1:])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise SystemExit(f"cpu-table: {file} is not a bench's JSON: {e!r}") from e
    # CPUs of one name are told apart by what their files are called after.
    names = [(m["machine"]["cpu"], m["options"]["threads"]) for m in machines]
    for name, machine, file in zip(names, machines, files):
        if names.count(name) > 1:
            machine["kind"] = f" ({file.stem.split('-')[0]})"
    made = table(machines)
    if not options.write and not options.check:
        print(made, end="")
        return 0
    return page.put(made, BEGIN, END, options.write)


if __name__ == "__main__":
    sys.exit(main())
