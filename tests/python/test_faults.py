"""Failing calls of the system: the driver of tests/faults over a step in Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = os.environ.get("MLA_FAULTS")
STEP = Path(__file__).parents[1] / "faults" / "step.py"


@pytest.mark.skipif(not FOLDER, reason="MLA_FAULTS names no build folder of tests/faults")
def test_every_fault_is_an_exception(tmp_path):
    driver, injector = Path(FOLDER, "faults"), Path(FOLDER, "libmla_faults.so")
    if not (driver.exists() and injector.exists()):
        pytest.skip(f"{FOLDER} holds no faults and libmla_faults.so")
    run = subprocess.run(
        [driver, injector, "/bin/true", "-", tmp_path, "--python", sys.executable, STEP]
        + ["--seconds", "16", "--only", "Python: a step"],
        capture_output=True, text=True, timeout=300, check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Python: a step" in run.stdout
