"""A part of docs/performance.md that a script makes, between two lines of its own."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"


def add_options(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    how.add_argument("--check", action="store_true",
                     help=f"does {PAGE.relative_to(ROOT)} show this table?")
    return how


def put(made: str, begin: str, end: str, write: bool) -> int:
    """Writes what was made between the lines, or compares it with what stands there: the exit code."""
    script = Path(sys.argv[0]).stem
    shown = PAGE.read_text(encoding="utf-8")
    before, found_begin, rest = shown.partition(begin + "\n")
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise SystemExit(f"{script}: {PAGE} has no lines {begin} and {end}")
    page = f"{before}{begin}\n\n{made}\n{end}{after}"  # markdown's tables stand by themselves
    if write:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    sys.stdout.writelines(difflib.unified_diff(shown.splitlines(True), page.splitlines(True),
                                               "shown", "made"))
    if shown != page:
        print(f"{script}: {PAGE.relative_to(ROOT)} differs from the JSON: run it with --write")
    return int(shown != page)
