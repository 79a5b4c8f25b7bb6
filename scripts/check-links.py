#!/usr/bin/env python3
"""Exit code 1 when a relative link of a markdown file of this checkout leads nowhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    # Not what builds and environments bring along.
    files = [f for f in ROOT.rglob("*.md")
             if not any(p.startswith((".", "build")) for p in f.relative_to(ROOT).parts)]
    broken = 0
    for file in sorted(files):
        for link in re.findall(r"\]\(([^)\s]+)\)", file.read_text(encoding="utf-8")):
            target = link.split("#")[0]
            if not target or re.match(r"[a-z]+:", link) or (file.parent / target).exists():
                continue
            print(f"{file.relative_to(ROOT)}: {link} is not there")
            broken += 1
    print(f"check-links: {len(files)} files, {broken} broken links")
    return int(broken > 0 or not files)


if __name__ == "__main__":
    sys.exit(main())
