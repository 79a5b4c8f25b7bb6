#!/usr/bin/env bash
# Builds the fuzz targets and runs them, one more at a time than there are cores: scripts/fuzz.sh [seconds each, 60] [targets, all].
# With clang they run under libFuzzer; MLA_FUZZ=replay takes the default compiler, and random damage to the corpus.
# MLA_FUZZ_SEED makes a run start as another did; without it every run goes its own way.
# What ends a target is kept in build/<preset>/found and printed in hex, with the command that runs it again. What a
# target learns stays in build/<preset>/corpus for the next run.
cd "$(dirname "$0")/.."
preset=fuzz
[[ ${MLA_FUZZ:-clang} == replay ]] && preset=fuzz-replay
more_packages=()
[[ $preset == fuzz ]] && more_packages=(clang-14 libclang-rt-14-dev)
source scripts/setup.sh
seconds=${1:-60}
shift || true
targets=("$@")
((${#targets[@]})) || targets=(safetensors quantised index config traces batch pages plans tensors)
build=build/$preset
cmake --preset "$preset" "${launcher[@]}" >/dev/null
cmake --build "$build" --target "${targets[@]/#/fuzz_}"
mkdir -p "$build/found"

# Inputs no longer than a target reads, and for plans no schedule that takes longer than they do: of thousands of features
# libFuzzer's entropic one looks through the rare ones for each that it sees.
options() {
  case $1 in
    pages) echo -max_len=256 ;;
    quantised) echo -max_len=96 ;;
    plans) echo -max_len=256 -entropic=0 ;;
  esac
}

fuzz() {
  local name=$1 learnt=$build/corpus/$1 found=$build/found/$1 log=$build/found/$1.log
  mkdir -p "$learnt"
  rm -f "$found"
  if "$build/tests/fuzz/fuzz_$name" -seed="${MLA_FUZZ_SEED:-0}" -max_total_time="$seconds" -rss_limit_mb=3000 -timeout=60 -print_final_stats=1 -verbosity=1 \
    -exact_artifact_path="$found" $(options "$name") "$learnt" "tests/fuzz/corpus/$name" >"$log" 2>&1; then
    echo "fuzz $name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") executions in $seconds s, nothing found"
    return 0
  fi
  tail -n 60 "$log"
  echo "fuzz $name: FAILED"
  if [[ -s $found ]]; then
    echo "input, $(wc -c <"$found") bytes in hex: $(head -c 4096 "$found" | od -An -v -tx1 | tr -d ' \n')"
    echo "again: ASAN_OPTIONS=malloc_context_size=30 $build/tests/fuzz/fuzz_$name $found"
  fi
  return 1
}

failed=0
together=$(($(nproc) + 1))
for ((i = 0; i < ${#targets[@]}; i += together)); do
  running=()
  for name in "${targets[@]:i:together}"; do
    fuzz "$name" &
    running+=($!)
  done
  for pid in "${running[@]}"; do wait "$pid" || failed=$((failed + 1)); done
done
echo "fuzz: $((${#targets[@]} - failed)) of ${#targets[@]} targets found nothing"
((failed == 0))
