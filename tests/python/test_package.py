"""What is installed: version, stub, command; what calls cost and leave behind."""

import gc
import importlib.metadata
import inspect
import re
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import mla
from mla import _mla
from mla.flash_mla import flash_mla_with_kvcache

PACKAGE = Path(mla.__file__).parent


def python(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, **options
    )


def test_version_and_metadata():
    if PACKAGE.parent.name != "site-packages":
        pytest.skip("not installed: a build folder's package has no metadata")
    found = importlib.metadata.metadata("mla")
    assert found["Version"] == mla.__version__
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.10"


def test_all_names_exist():
    for name in mla.__all__:
        assert getattr(mla, name) is not None
    assert dir(mla) == sorted(mla.__all__)


def test_stub_says_what_the_module_has():
    assert (PACKAGE / "py.typed").is_file()
    stub: dict = {}
    source = (PACKAGE / "_mla.pyi").read_text()
    exec(compile("from __future__ import annotations\n" + source, "_mla.pyi", "exec"), stub)
    for name, value in vars(_mla).items():
        if name.startswith("__"):
            continue
        assert name in stub, name
        if not inspect.isclass(value):
            continue
        for member in vars(value):
            if not member.startswith("__"):
                assert hasattr(stub[name], member), f"{name}.{member}"


def test_the_examples_of_the_readme():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(examples) == 2
    done = python("-c", "".join(examples))
    assert done.returncode == 0 and done.stdout.startswith("plan: "), done.stderr


def test_command():
    path = mla.command_path()
    direct = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    done = python("-m", "mla", "--version")
    assert done.returncode == 0 and done.stdout == direct.stdout
    assert done.stdout.split()[0] == mla.__version__
    done = python("-m", "mla", "nonsense")
    assert done.returncode == 2 and done.stderr.startswith("mla: unknown command")


def test_bench():
    rows = mla.bench("norm", threads=1, rounds=4, min_time=0, requests=2)
    assert rows and all(r["op"] == "norm" and r["ok"] and r["median_s"] > 0 for r in rows)
    assert rows[0]["params"]["requests"] == 2
    with pytest.raises(mla.Error, match="unknown op 'nothing'"):
        mla.bench("nothing")


def empty_step(model, stream):
    weights = mla.prepare(model, mla.random_layer(model))
    cache = mla.Cache(mla.cache_spec(model), 1)
    batch = mla.Batch([0], [], np.zeros((0, 1), np.int32), [])
    step = mla.plan(model, cache, batch, stream=stream)
    hidden = np.zeros((1, model.hidden), np.float32)
    return step, weights, mla.RotaryTable(model, 8), cache, hidden, np.zeros_like(hidden)


def test_a_call_costs_less_than_ten_microseconds(small_model, stream):
    """A step without tokens: all that is left is the binding, and the layer's own checks."""
    arguments = empty_step(small_model, stream)
    calls, best = 1000, np.inf
    for _ in range(20):  # the best of them: this machine may be busy
        start = time.perf_counter()
        for _ in range(calls):
            mla.forward(*arguments, stream=stream)
        best = min(best, (time.perf_counter() - start) / calls)
    print(f"\nmla.forward of nothing: {1e6 * best:.2f} us")
    assert best < 10e-6


def test_calls_leave_nothing_behind(small_model, stream):
    arguments = empty_step(small_model, stream)
    q = np.ones((1, 1, 2, 576), np.float32)
    cache = np.ones((2, 16, 1, 576), np.float32)
    table, lengths = np.array([[0, 1]], np.int32), np.array([20], np.int32)
    watched = [*arguments, q, cache, table, lengths]

    def work(times):
        for _ in range(times):
            mla.forward(*arguments, stream=stream)
            flash_mla_with_kvcache(q, cache, table, lengths)
            with pytest.raises(mla.ShapeError):
                mla.forward(*arguments[:4], q, stream=stream)
            with pytest.raises(mla.ShapeError):
                flash_mla_with_kvcache(q, cache, table, lengths + 100)
            mla.Cache(arguments[3].spec, memory=arguments[3].memory)
            mla.plan(
                small_model, arguments[3],
                mla.Batch([0, 1], [1], np.zeros((1, 1), np.int32), [0]), stream=stream,
            )

    work(200)
    gc.collect()
    references = [sys.getrefcount(x) for x in watched]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work(2000)
    gc.collect()
    assert [sys.getrefcount(x) for x in watched] == references
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 4096  # KiB


def test_nothing_is_alive_at_exit(tmp_path):
    script = tmp_path / "script.py"
    # In a function: NumPy gives back no borrowed memory once the interpreter is ending.
    script.write_text(
        "import numpy as np, mla\n"
        "from mla.flash_mla import flash_mla_with_kvcache\n"
        "def main():\n"
        "    model = mla.preset('deepseek-v3.2')\n"
        "    cache = mla.Cache(mla.cache_spec(model), 2)\n"
        "    other = mla.Cache(cache.spec, memory=cache.memory)\n"
        "    index = mla.IndexCache(model, other)\n"
        "    batch = mla.Batch([0, 1], [1], np.zeros((1, 1), np.int32), [0])\n"
        "    step = mla.plan(model, cache, batch)\n"
        "    flash_mla_with_kvcache(np.ones((1, 1, 1, 576), 'f4'), np.ones((1, 1, 1, 576), 'f4'),\n"
        "                           np.zeros((1, 1), 'i4'), np.ones(1, 'i4'))\n"
        "main()\n"
    )
    done = python(str(script))
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_other_threads_run_meanwhile(stream):
    """While a call works, Python does too: were the lock held, nothing would be counted."""
    q = np.ones((1, 64, 64, 576), np.float32)
    cache = np.ones((64, 64, 1, 576), np.float32)
    table, lengths = np.arange(64, dtype=np.int32)[None], np.array([4096], np.int32)
    counted, done = [0], threading.Event()

    def count():
        while not done.is_set():
            counted[0] += 1
            time.sleep(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    before, start = counted[0], time.perf_counter()
    out, _ = flash_mla_with_kvcache(q, cache, table, lengths)
    took, meanwhile = time.perf_counter() - start, counted[0] - before
    done.set()
    counter.join()
    np.testing.assert_allclose(out[0, 0, 0, :4], 1, rtol=1e-5)
    assert took > 0.02 and meanwhile > 3, (took, meanwhile)


def test_forked_children_start_anew():
    script = (
        "import os, numpy as np\n"
        "from mla.flash_mla import flash_mla_with_kvcache\n"
        "a = (np.ones((1, 1, 1, 576), 'f4'), np.ones((1, 1, 1, 576), 'f4'),\n"
        "     np.zeros((1, 1), 'i4'), np.ones(1, 'i4'))\n"
        "flash_mla_with_kvcache(*a)\n"
        "if os.fork() == 0:\n"
        "    os._exit(int(flash_mla_with_kvcache(*a)[0].sum() != 512))\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    assert python("-c", script, timeout=60).returncode == 0
