#!/usr/bin/env bash
# Everything that needs a GPU, on this machine's first one: tests, compute-sanitizer's four tools on small shapes,
# benchmarks to JSON, and a short table last.
#
#   scripts/gpu-check.sh [--bin DIR] [--out DIR] [--only tests,sanitize,bench]
#
# --bin: a folder with the programs; without it they are built here (build/gpu). --out: where the JSON goes, by default
# bench/results/<card>. Exit code 1 when a test, a tool or a benchmark's own check failed.
set -euo pipefail
cd "$(dirname "$0")/.."

bin= out= only=tests,sanitize,bench
while (($#)); do
  case $1 in
    --bin) bin=$2 ;;
    --out) out=$2 ;;
    --only) only=$2 ;;
    *) echo "gpu-check: unknown option $1" >&2; exit 2 ;;
  esac
  shift 2
done
if ! command -v nvidia-smi >/dev/null || ! card=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0 2>/dev/null); then
  echo "gpu-check: no NVIDIA GPU on this machine" >&2
  exit 2
fi
if [[ -z $bin ]]; then
  source scripts/setup.sh
  cmake --preset release "${launcher[@]}" -B build/gpu >/dev/null
  cmake --build build/gpu
  bin=build/gpu/programs
  mkdir -p "$bin"
  find build/gpu/tests/cuda build/gpu/tests/capi build/gpu/bench/cuda -maxdepth 1 -type f -perm -u+x \
    \( -name 'test_cuda_*' -o -name '*_bench' \) -exec cp -u {} "$bin" \;
  cp -uP build/gpu/src/libmla.so* "$bin"
fi
name=$(sed 's/NVIDIA //; s/[^A-Za-z0-9]\+/-/g' <<<"$card" | tr '[:upper:]' '[:lower:]')
out=${out:-bench/results/$name}
mkdir -p "$out"
export MLA_GOLDEN_DIR=$PWD/tests/data/golden
failed=() lines=()
wanted() { [[ ,$only, == *,$1,* ]]; }

if wanted tests; then
  for test in "$bin"/test_cuda_*; do
    echo "== $(basename "$test")"
    "$test" --gtest_brief=1 || failed+=("$(basename "$test")")
  done
fi

# Small shapes only: the tools slow a kernel down a hundredfold and more.
if wanted sanitize; then
  if command -v compute-sanitizer >/dev/null; then
    export MLA_TEST_MAX_FLOPS=3e6
    for tool in memcheck racecheck initcheck synccheck; do
      for run in "test_cuda_ops *EveryOpOnGpu*" "test_cuda_attend_latent *AttendLatentCases*/0:*AttendLatentCases*/1:*AttendLatentCases*/2" \
        "test_cuda_attend_latent_fp8 *AttendLatentFp8*/0:*AttendLatentFp8*/1:*AttendLatentFp8*/2" \
        "test_cuda_attend_expanded AttendExpanded.NoKeysAtAll:AttendExpanded.MergesIntoEveryOutputType" \
        "test_cuda_step CapturedStep.LargerStepsAreRefusedByName"; do
        read -r program filter <<<"$run"
        [[ -x $bin/$program ]] || continue
        echo "== $tool $program"
        log=$(mktemp)
        # A failing exit code on findings; leaks are the driver's own at exit.
        if ! timeout 240 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 "$bin/$program" \
          --gtest_brief=1 --gtest_filter="$filter" >"$log" 2>&1; then
          tail -25 "$log"
          failed+=("$tool $program")
        elif ! grep -qE 'PASSED  \] [1-9]' "$log"; then
          failed+=("$tool $program: no test ran")
        fi
        lines+=("$(printf '%-12s %-28s %s' "$tool" "$program" "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1 | sed 's/=* *//')")")
        rm -f "$log"
      done
    done
    unset MLA_TEST_MAX_FLOPS
  else
    lines+=("compute-sanitizer is not here: skipped")
  fi
fi

if wanted bench; then
  for bench in "$bin"/*_bench; do
    op=$(basename "$bench" _bench)
    echo "== $op"
    case $op in
      attend_expanded | context_chunk) "$bench" "$out/$op.json" ;;
      *) "$bench" json="$out/$op.json" ;;
    esac || failed+=("$op")
  done
fi

echo
echo "$card"
printf '%s\n' "${lines[@]}"
if ((${#failed[@]})); then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "gpu-check: all passed"
