#!/usr/bin/env bash
# Installs what is missing, builds, and runs the main job: a request trace through a model's attention.
# Arguments go to `mla run`: scripts/run.sh --trace FILE --layers 2 --verify 20
cd "$(dirname "$0")/.."
source scripts/setup.sh
cmake --preset release "${launcher[@]}" -DMLA_BUILD_TESTS=OFF -DMLA_BUILD_EXAMPLES=OFF -DMLA_BUILD_C=OFF -B build/run >/dev/null
cmake --build build/run --target mla_cli
exec build/run/cli/mla run "$@"
