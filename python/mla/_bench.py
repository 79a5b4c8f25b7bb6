"""mla.bench: the rows of `mla bench`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ._command import command_path
from ._mla import Error


def bench(*ops: str, **options: Any) -> list[dict[str, Any]]:
    """Measures ops, by default every one at its standing shapes, and gives a row for each.

    ops and options are those of `mla bench --help`:
    `bench("attend_latent", heads=16, context=4096)`. True gives a flag without a value. A row has
    name, op, median_s, p90_s, bytes, flops, of_roof (the share of this machine's roof), error and
    bound against float64, ok, and params. Raises Error with the command's message when it refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "bench.json"
        arguments = [str(command_path()), "bench", *ops]
        for name, value in options.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                arguments.append(flag)
            elif value is not False and value is not None:
                arguments += [flag, str(value)]
        arguments += ["--json", str(report)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        # Exit code 1: a row is wrong, which its "ok" says.
        if done.returncode not in (0, 1):
            raise Error(done.stderr.strip() or f"mla bench ended with exit code {done.returncode}")
        rows: list[dict[str, Any]] = json.loads(report.read_text())["rows"]
        return rows
