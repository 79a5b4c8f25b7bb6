#!/usr/bin/env bash
# Coverage of the host code under the test suite: scripts/coverage.sh [least percent of lines, 90]. Ends with failure
# below that, or when a test fails. Some half an hour on two cores.
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
