#!/usr/bin/env bash
# Installs what is missing, builds and runs the tests. Arguments: presets to test, by default release.
cd "$(dirname "$0")/.."
more_packages=(chromium python3 python3-dev python3-venv libopenmpi-dev openmpi-bin)  # to open the reports, to check the page of figures, for the Python package, for ranks that are processes
source scripts/setup.sh
presets=("$@")
((${#presets[@]})) || presets=(release)
for preset in "${presets[@]}"; do
  cmake --preset "$preset" "${launcher[@]}" >/dev/null
  cmake --build --preset "$preset"
done
# The Python package is tested over the last of these builds that has no sanitizer, beside that build's own tests: either
# waits at times, for deadlines and for pip.
python=
for preset in "${presets[@]}"; do
  case $preset in asan | tsan) ;; *) python=$preset ;; esac
done
for preset in "${presets[@]}"; do
  failed=0
  if [[ $preset == "$python" ]]; then
    scripts/test-python.sh "build/$preset" >"build/$preset/python.log" 2>&1 &
    python_tests=$!
  fi
  ctest --preset "$preset" -j"$(nproc)" || failed=1
  if [[ $preset == "$python" ]]; then
    wait "$python_tests" || failed=1
    cat "build/$preset/python.log"
  fi
  ((failed == 0))
done
