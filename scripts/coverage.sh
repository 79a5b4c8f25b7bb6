#!/usr/bin/env bash
# Coverage of the host code: scripts/coverage.sh [least percent of lines, 90]. Ends with failure below that, or when a
# test fails. The test preset `coverage` leaves out what repeats the same code many times (sweeps over targets, formats
# and golden files, random inputs, verification) and takes long without optimisation, and what cannot be measured: the
# consumer's own build, the faults that strike the counters too, and a limit on files that cuts the counters' off.
cd "$(dirname "$0")/.."
more_packages=(chromium python3)
source scripts/setup.sh
cmake --preset coverage "${launcher[@]}" >/dev/null
cmake --build --preset coverage
find build/coverage -name '*.gcda' -delete
failed=0
ctest --preset coverage -j"$(nproc)" || failed=1
python3 scripts/coverage.py build/coverage --least "${1:-90}"
exit "$failed"
