#!/usr/bin/env bash
# Installs what is missing, builds and runs the tests. Arguments: presets to test, by default release.
cd "$(dirname "$0")/.."
more_packages=(chromium python3 libopenmpi-dev openmpi-bin)  # to open the reports, to check the page of figures, for ranks that are processes
source scripts/setup.sh
presets=("$@")
((${#presets[@]})) || presets=(release)
for preset in "${presets[@]}"; do
  cmake --preset "$preset" "${launcher[@]}" >/dev/null
  cmake --build --preset "$preset"
done
# The Python package is tested over the last of these builds that has no sanitizer.
for ((i = ${#presets[@]} - 1; i >= 0; --i)); do
  case "${presets[i]}" in asan | tsan) continue ;; esac
  scripts/test-python.sh "build/${presets[i]}"
  break
done
for preset in "${presets[@]}"; do
  ctest --preset "$preset" -j"$(nproc)"
done
