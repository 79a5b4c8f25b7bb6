#!/usr/bin/env bash
# Installs what is missing, builds and runs the tests. Arguments: presets to test, by default release.
cd "$(dirname "$0")/.."
more_packages=(chromium python3 python3-dev python3-venv libopenmpi-dev openmpi-bin)  # to open the reports, to check the page of figures, for the Python package, for ranks that are processes
source scripts/setup.sh
presets=("$@")
((${#presets[@]})) || presets=(release)
for preset in "${presets[@]}"; do
  quick=()  # where nothing is built yet: else all would be built again
  if [[ ! -e build/$preset/CMakeCache.txt ]]; then
    quick=(-DMLA_TOGETHER=ON)
    [[ -e /dev/nvidiactl ]] || quick+=(-DMLA_CUDA_FAST_COMPILE=ON)
  fi
  cmake --preset "$preset" "${launcher[@]}" "${quick[@]}" >/dev/null
  cmake --build --preset "$preset"
done
# The Python package is tested over the last of these builds that has no sanitizer, beside the tests of the first build:
# either waits at times, for deadlines and for pip. Alone it goes first.
python=
for preset in "${presets[@]}"; do
  case $preset in asan | tsan) ;; *) python=$preset ;; esac
done
if [[ $python && ${#presets[@]} == 1 ]]; then
  scripts/test-python.sh "build/$python"
  python=
elif [[ $python ]]; then
  scripts/test-python.sh "build/$python" >"build/$python/python.log" 2>&1 &
  python_tests=$!
  trap 'kill "$python_tests" 2>/dev/null || true' EXIT  # not left behind by an end before its own
fi
for preset in "${presets[@]}"; do
  failed=0
  ctest --preset "$preset" -j"$(($(nproc) + 2))" || failed=1  # some wait for deadlines
  if [[ $python ]]; then
    wait "$python_tests" || failed=1
    trap - EXIT
    cat "build/$python/python.log"
    python=
  fi
  ((failed == 0))
done
