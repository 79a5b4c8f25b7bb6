#!/usr/bin/env bash
# Installs the Python package into a fresh virtual environment and runs its tests. Argument: a build folder whose library
# and command it takes; without one, pip builds both. Tests that need PyTorch or transformers are skipped unless these are
# asked for: MLA_PYTHON_EXTRAS=test,transformers.
cd "$(dirname "$0")/.."
more_packages=(python3-dev python3-venv)
source scripts/setup.sh
venv=build/python-venv
options=()
if (($#)); then options+=("--config-settings=cmake.define.MLA_LIBRARY_DIR=$(realpath "$1")"); fi
if ((${#launcher[@]})); then options+=("--config-settings=cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache"); fi
python3 -m venv --clear "$venv"
"$venv/bin/pip" install -q --disable-pip-version-check "${options[@]}" ".[${MLA_PYTHON_EXTRAS:-test}]"
if (($#)); then export MLA_FAULTS=$(realpath "$1")/tests/faults; fi
"$venv/bin/python" -m pytest -q
