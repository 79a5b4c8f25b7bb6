#!/usr/bin/env bash
# Everything that needs a GPU, on this machine's first one: tests, compute-sanitizer's four tools on small shapes, replays
# by the command, the Python package, failing calls of the CUDA driver, benchmarks to JSON, and last the table of what they are held against
# (scripts/gpu-table.py).
#
#   scripts/gpu-check.sh [--bin DIR] [--out DIR] [--only tests,sanitize,run,python,faults,bench] [--gpus N]
#
# --bin: a folder with the programs: test_cuda_* and *_bench, libmla.so where they need it, the command mla, the Python
# package in python/, faults, libmla_faults.so and faults_step, and in COMMIT the commit that they were built from; without it they are built here (build/gpu).
# --out: where the JSON goes, by default bench/results/<card>; each file names its commit. Both as seen from the repository.
# --gpus: with 2 or more, replays and benchmarks over ranks, too, a GPU each; they are left out, and said to be, by default.
# Exit code 1 when a test, a tool or a benchmark's own check failed, whatever the table says of speed.
set -euo pipefail
cd "$(dirname "$0")/.."

bin= out= gpus=1 only=tests,sanitize,run,python,faults,bench
while (($#)); do
  case $1 in
    --bin | --out | --only | --gpus) (($# > 1)) || { echo "gpu-check: $1 needs a value" >&2; exit 2; } ;;&
    --bin) bin=$2 ;;
    --out) out=$2 ;;
    --only) only=$2 ;;
    --gpus) gpus=$2 ;;
    *) echo "gpu-check: unknown option $1" >&2; exit 2 ;;
  esac
  shift 2
done
for part in ${only//,/ }; do
  [[ $part =~ ^(tests|sanitize|run|python|faults|bench)$ ]] ||
    { echo "gpu-check: --only $part, known are tests, sanitize, run, python, faults, bench" >&2; exit 2; }
done
if ! command -v nvidia-smi >/dev/null || ! card=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0 2>/dev/null); then
  echo "gpu-check: no NVIDIA GPU on this machine" >&2
  exit 2
fi
if ! [[ $gpus =~ ^[1-9][0-9]*$ ]] || ((gpus > $(nvidia-smi --list-gpus | wc -l))); then
  echo "gpu-check: --gpus $gpus, this machine has $(nvidia-smi --list-gpus | wc -l)" >&2
  exit 2
fi
if [[ -z $bin ]]; then
  source scripts/setup.sh
  cmake --preset release "${launcher[@]}" -B build/gpu >/dev/null
  cmake --build build/gpu
  bin=build/gpu/programs
  mkdir -p "$bin"
  find build/gpu/tests build/gpu/bench/cuda -maxdepth 2 -type f -perm -u+x \
    \( -name 'test_cuda_*' -o -name '*_bench' \) -exec cp -u {} "$bin" \;
  find build/gpu/src -maxdepth 1 -name 'libmla.so*' -exec cp -uP {} "$bin" \;
  cp -u build/gpu/cli/mla build/gpu/tests/faults/{faults,libmla_faults.so,faults_step} "$bin"
  python3 -m pip install -q --disable-pip-version-check --no-deps --upgrade --target "$bin/python" \
    --config-settings=cmake.define.MLA_LIBRARY_DIR="$PWD/build/gpu" . || rm -rf "$bin/python"  # said below
  git describe --always --dirty --abbrev=12 >"$bin/COMMIT"
fi
bin=$(cd "$bin" && pwd)
MLA_COMMIT=$(cat "$bin/COMMIT" 2>/dev/null || echo unknown)
export MLA_COMMIT
export LD_LIBRARY_PATH=$bin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export MLA_GOLDEN_DIR=$PWD/tests/data/golden
name=$(sed 's/NVIDIA //; s/[^A-Za-z0-9]\+/-/g' <<<"$card" | tr '[:upper:]' '[:lower:]')
out=${out:-bench/results/$name}
mkdir -p "$out"
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
failed=() lines=()
wanted() { [[ ,$only, == *,$1,* ]]; }
say() { printf '%6d s  %s\n' "$SECONDS" "$*"; }  # since the start

# ---- programs in the background: start NAME LIMIT COMMAND..., at most one a core; then finish, then judge NAME ----------
cores=$(nproc) running=0
start() {
  local job=$logs/$1 limit=$2
  shift 2
  if ((running >= cores)); then wait -n || true; else running=$((running + 1)); fi
  (
    begin=$SECONDS code=0
    timeout -k 10 "$limit" "$@" >"$job.log" 2>&1 </dev/null || code=$?
    echo "$code $((SECONDS - begin))" >"$job.end"
    say "${job##*/}: $((SECONDS - begin)) s, exit code $code"
  ) &
}
finish() {
  wait
  running=0
}
# Exit code 0 and at least one test passed? Otherwise what it printed last, and `failed` grows.
judge() {
  local job=$logs/$1 code
  read -r code _ <"$job.end"
  if ((code != 0)); then
    echo "== $1: exit code $code$( ((code != 124)) || echo ', it took too long')"
    tail -40 "$job.log"
  elif ! grep -qE 'PASSED  \] [1-9]' "$job.log"; then
    echo "== $1: no test ran"
  else
    return 0
  fi
  failed+=("$1")
  return 1
}
seconds() { cut -d' ' -f2 "$logs/$1.end"; }

# ---- compute-sanitizer --------------------------------------------------------------------------------------------------
# Small shapes only: the tools slow a kernel down a hundredfold and more, racecheck most.
tools=()
port=49152
# sanitize NAME TOOL PROGRAM FILTER [VARIABLE=VALUE]...: NAME is TOOL.PROGRAM, with .what behind it if there are several.
sanitize() {
  local name=$1 tool=$2 program=$3 filter=$4
  shift 4
  [[ -x $bin/$program ]] || return 0
  port=$((port + 16))  # every one listens on ports of its own
  tools+=("$name")
  # A failing exit code on findings; leaks are the driver's own at exit.
  start "$name" 240 env "$@" compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 1000 --port "$port" \
    --launch-timeout 60 "$bin/$program" --gtest_brief=1 --gtest_filter="$filter"
}
start_sanitizers() {
  # Longest first.
  for shard in 0 1 2; do  # attend_latent's races are looked for below
    sanitize racecheck.test_cuda_ops.$shard racecheck test_cuda_ops '*EveryOpOnGpu*-*/attend_latent:*/expand:*/select_topk' \
      MLA_TEST_MAX_FLOPS=3e5 GTEST_TOTAL_SHARDS=3 GTEST_SHARD_INDEX=$shard
  done
  sanitize racecheck.test_cuda_ops.expand racecheck test_cuda_ops '*EveryOpOnGpu*/expand' MLA_TEST_MAX_FLOPS=3e6
  sanitize racecheck.test_cuda_ops.select_topk racecheck test_cuda_ops '*EveryOpOnGpu*/select_topk' MLA_TEST_MAX_FLOPS=3e4
  local narrow='Shapes/*/one_block:Shapes/*/one_position:Shapes/*/h16_4k:Shapes/*/h16_none'
  local wide='WideShapes/*/h64_*_block*:WideShapes/*/h128_one_block:RowByRow/*_three_blocks'  # by boxes; row by row
  local calls='*Paged*/h16:*Paged*/f16_h128_gap:*Paged*/fp8_codes_h128_scales:*ListAttention*/h16_q1_lengths:*Schedule*'
  local fp8='*_one_position_*:*/fp8_h16_4k_*:*/ds_h16_4k_*:*_h128_one_block_*'
  local codes='*codes_one_position_*:*codes_h64_one_position_*:*codes_h128_one_block_*:*codes_h20_q3_*'
  for tool in memcheck initcheck synccheck; do
    sanitize $tool.test_cuda_ops $tool test_cuda_ops '*EveryOpOnGpu*' MLA_TEST_MAX_FLOPS=3e6
    sanitize $tool.test_cuda_sparse $tool test_cuda_sparse '*.Heads/*:*WithoutRope*' MLA_TEST_MAX_FLOPS=3e6
    sanitize $tool.test_cuda_attend_latent $tool test_cuda_attend_latent "$narrow:$wide"
    sanitize $tool.test_cuda_device_attention $tool test_cuda_device_attention "$calls"
  done
  sanitize memcheck.test_cuda_layer memcheck test_cuda_layer 'Files/GoldenFile.*/tiny'
  sanitize memcheck.test_cuda_step memcheck test_cuda_step 'CapturedStep.*'
  sanitize racecheck.test_cuda_sparse racecheck test_cuda_sparse '*.TwoCaches/fp8_ds*' MLA_TEST_MAX_FLOPS=3e8
  sanitize racecheck.test_cuda_attend_latent.narrow racecheck test_cuda_attend_latent "$narrow"
  # Without the graph that forks: there racecheck ends the process without a word.
  sanitize racecheck.test_cuda_device_attention racecheck test_cuda_device_attention '*Paged*/h16'
  sanitize racecheck.test_cuda_attend_latent.wide racecheck test_cuda_attend_latent "$wide"
  if ((gpus >= 2)); then
    for tool in memcheck initcheck synccheck; do  # nothing of them lies in shared memory
      sanitize $tool.test_cuda_ranks $tool test_cuda_ranks '*GpuRanks.EveryCall*/peer2*:*GpuRanks.Rows*/peer2*'
    done
  fi
  for tool in memcheck racecheck initcheck synccheck; do
    if [[ $tool == racecheck ]]; then  # a kernel of its own, with exchanges of its own
      sanitize racecheck.test_cuda_attend_latent_fp8 racecheck test_cuda_attend_latent_fp8 "$fp8-*codes_*"
      sanitize racecheck.test_cuda_attend_latent_fp8.codes racecheck test_cuda_attend_latent_fp8 "$codes"
    else
      sanitize $tool.test_cuda_attend_latent_fp8 $tool test_cuda_attend_latent_fp8 "$fp8:$codes"
    fi
    sanitize $tool.test_cuda_attend_expanded $tool test_cuda_attend_expanded \
      'AttendExpanded.NoKeysAtAll:AttendExpanded.MergesIntoEveryOutputType:AttendExpanded.LastPartsBecomeCodes'
    sanitize $tool.test_cuda_attend_expanded_fp8 $tool test_cuda_attend_expanded_fp8 \
      'AttendExpandedFp8.NoKeysAtAll:AttendExpandedFp8.PartsMergeIntoTheWhole:AttendExpandedFp8.LastPartsBecomeCodes'
  done
}
# racecheck's false reports, of pairs of instructions in one kernel, at most so many in each way that it is compiled:
# exchanges of attend_latent's wide kernel's warpgroups and of those of its kernel of codes, and scales of attend_expanded's e4m3 kernel, which are read in
# front of the turns' barriers (their READMEs, at the end). Anything else it reports is a failure.
#   judge_known NAME KERNEL MOST
judge_known() {
  local job=$logs/$1 kernel=$2 allowed=$3 races others most
  grep -qE 'PASSED  \] [1-9]' "$job.log" || failed+=("$1: no test passed")
  # A line for each pair of instructions: kernel and place of one, a tab, kernel and place of the other.
  races=$(awk '/ access at / {
      place = $0; sub(/.* access at /, "", place); sub(/ \[[0-9]+ hazards?\]$/, "", place)
      if (/Race reported between/) first = place; else print first "\t" place
    }' "$job.log" | sort -u)
  others=$(grep -cvP "^[^\t]*\b$kernel<.*\t.*\b$kernel<" <<<"$races" || true)
  most=$(sed 's/>(.*//' <<<"$races" | sort | uniq -c | sort -rn | awk 'NR == 1 {print $1}')
  lines+=("$(printf '%-46s %4d s  %d pairs in %s, at most %d in one form; documented are %d' "$1" "$(seconds "$1")" \
    "$(($(wc -l <<<"$races") - others))" "$kernel" "$most" "$allowed")")
  if ((others > 0 || most > allowed)); then
    echo "== $1"
    echo "$races"
    failed+=("$1: more than the documented report")
  fi
}

# ---- tests and tools: all at once, but for the program that watches the GPU's free memory -------------------------------
tests=()
if wanted tests; then
  for test in "$bin"/test_cuda_*; do
    [[ -x $test ]] || { echo "gpu-check: no programs test_cuda_* in $bin" >&2; exit 2; }
    tests+=("$(basename "$test")")
  done
  for test in "${tests[@]}"; do
    case $test in
      test_cuda_step) ;;
      test_cuda_layer)  # the longest by far
        for shard in 0 1 2 3; do
          start "$test.$shard" 600 env GTEST_TOTAL_SHARDS=4 GTEST_SHARD_INDEX=$shard "$bin/$test" --gtest_brief=1
        done ;;
      *) start "$test" 600 "$bin/$test" --gtest_brief=1 ;;
    esac
  done
fi
if wanted sanitize; then
  if command -v compute-sanitizer >/dev/null; then start_sanitizers; else lines+=("compute-sanitizer is not here: skipped"); fi
fi
finish
if [[ " ${tests[*]} " == *" test_cuda_step "* ]]; then
  start test_cuda_step 600 "$bin/test_cuda_step" --gtest_brief=1
  finish
fi
for test in "${tests[@]}"; do
  for part in "$logs/$test".end "$logs/$test".[0-9].end; do
    [[ ! -e $part ]] || judge "$(basename "$part" .end)" || true
  done
done
for tool in "${tools[@]}"; do
  if [[ $tool =~ ^racecheck.test_cuda_(attend_latent(.wide|_fp8)|sparse)$ && $(cut -d' ' -f1 "$logs/$tool.end") == 9 ]]; then
    judge_known "$tool" wide_kernel 4
  elif [[ $tool == racecheck.test_cuda_attend_latent_fp8.codes && $(cut -d' ' -f1 "$logs/$tool.end") == 9 ]]; then
    judge_known "$tool" codes_kernel 4
  elif [[ $tool == racecheck.test_cuda_attend_expanded_fp8 && $(cut -d' ' -f1 "$logs/$tool.end") == 9 ]]; then
    judge_known "$tool" attend_expanded_fp8_kernel 3
  else
    judge "$tool" || true
    lines+=("$(printf '%-46s %4d s  %s' "$tool" "$(seconds "$tool")" \
      "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$logs/$tool.log" | tail -1 | sed 's/=* *//')")")
  fi
done

# ---- the command and the package: whole replays, sparse ones among them, and frameworks' captures; none may hang --------
launcher=() device=cuda  # launcher: of processes that are ranks
replay() {  # NAME ARGUMENT...
  local name=run.$1
  shift
  echo "== $name"
  if ! timeout -k 10 180 "${launcher[@]}" "$bin/mla" run --device "$device" --verify 4 --json "$logs/$name.json" "$@" >"$logs/$name.log" 2>&1 ||
    ! grep -q 'verified.* 0 failed' "$logs/$name.log"; then
    tail -20 "$logs/$name.log"
    failed+=("$name")
  fi
  say "$name"
}
if wanted run; then
  if [[ -x $bin/mla ]]; then
    replay dense --model deepseek-v2-lite --layers 2 --requests 8 --input-len 500 --output-len 8 --rate 0
    # Contexts beyond topk: rows select, in steps that are profiled and in steps that are not.
    replay sparse --model deepseek-v3.2 --layers 1 --requests 2 --input-len 3000 --output-len 6 --rate 0 --token-budget 8192
    replay sparse_ds_mla --model deepseek-v3.2 --layers 2 --requests 3 --input-len 2500 --output-len 20 --rate 0 \
      --cache fp8_ds_mla --token-budget 4096
    if ((gpus >= 2)); then
      device=cuda:1
      replay second --model deepseek-v2-lite --layers 1 --requests 2 --input-len 100 --output-len 4 --rate 0
      device=cuda
      groups=("$gpus")  # ranks that share a cache: all, and half of them where there are four
      ((gpus % 4 != 0)) || groups+=($((gpus / 2)))
      for link in peer nccl; do
        for group in "${groups[@]}"; do
          replay "ranks_$link.$gpus.$group" --model deepseek-v2-lite --layers 2 --requests 8 --input-len 500 --output-len 8 --rate 0 \
            --tp "$gpus" --dcp "$group" --comm "$link"
          replay "ranks_sparse_$link.$gpus.$group" --model deepseek-v3.2 --layers 1 --requests 2 --input-len 3000 --output-len 6 \
            --rate 0 --token-budget 8192 --tp "$gpus" --dcp "$group" --comm "$link"
        done
      done
      if command -v mpirun >/dev/null; then
        launcher=(mpirun --allow-run-as-root -n "$gpus")
        replay "ranks_processes.$gpus" --model deepseek-v2-lite --layers 2 --requests 8 --input-len 500 --output-len 8 --rate 0 \
          --tp "$gpus" --dcp "$gpus" --comm mpi
        launcher=()
      else
        echo "ranks that are processes: left out, mpirun is not here"
      fi
    else
      echo "ranks: left out, on one GPU (--gpus 2)"
    fi
  else
    failed+=("run: no program mla in $bin")
  fi
fi
has_package() { [[ -d $bin/python ]] && python3 -c 'import torch, transformers' 2>/dev/null; }
if wanted python; then
  if ! has_package; then
    failed+=("python: no package in $bin/python, or no torch or transformers here")
  else
    echo "== python"
    PYTHONPATH=$bin/python timeout -k 10 300 scripts/gpu-python.py --json "$out/python.json" || failed+=(gpu-python)
    say python
  fi
fi

# ---- calls of the CUDA driver that fail, as many as fit into a minute ----------------------------------------------------
if wanted faults; then
  if [[ -x $bin/faults ]]; then
    echo "== faults"
    mkdir -p "$logs/faults"
    python=()
    if has_package; then python=(--python "$(command -v python3)" tests/faults/step.py)
    else echo "faults: the step in Python is left out: no package in $bin/python, or no torch or transformers here"; fi
    PYTHONPATH=$bin/python timeout -k 10 300 "$bin/faults" "$bin/libmla_faults.so" "$bin/mla" "$bin/faults_step" "$logs/faults" \
      --gpu "${python[@]}" --seconds 60 ||
      failed+=(faults)
    say faults
  else
    failed+=("faults: no program faults in $bin")
  fi
fi

# ---- benchmarks, one after another --------------------------------------------------------------------------------------
if wanted bench; then
  for bench in "$bin"/*_bench; do
    [[ -x $bench ]] || { echo "gpu-check: no programs *_bench in $bin" >&2; exit 2; }
    op=$(basename "$bench" _bench)
    if [[ $op == ranks ]] && ((gpus < 2)); then
      echo "== ranks: left out, on one GPU (--gpus 2)"
      continue
    fi
    echo "== $op"
    begin=$SECONDS
    "$bench" json="$out/$op.json" || failed+=("${op}_bench")
    say "${op}_bench: $((SECONDS - begin)) s"
  done
  if [[ -x $bin/mla ]]; then  # both paths of a request, and what the plan's choice between them costs
    echo "== fit"
    "$bin/mla" bench --fit --device cuda --json "$out/fit.json" || failed+=("fit")
  fi
  if has_package; then  # the same attention as frameworks call it
    echo "== calls"
    export PYTHONPATH=$bin/python${PYTHONPATH:+:$PYTHONPATH}
    beside=()  # FlashMLA's own, where it is installed
    if python3 -c 'import flash_mla' 2>/dev/null; then beside=(--beside flash_mla); fi
    timeout -k 10 300 scripts/gpu-calls.py "${beside[@]}" --json "$out/calls.json" || failed+=(gpu-calls)
    say calls
  else
    failed+=("calls: no package in $bin/python, or no torch or transformers here")
  fi
fi

echo
echo "$card"
if ((${#lines[@]})); then printf '%s\n' "${lines[@]}"; fi
if wanted bench; then
  echo
  if ! command -v python3 >/dev/null; then echo "python3 is not here: no table"; else scripts/gpu-table.py "$out" || failed+=(gpu-table); fi
  echo
fi
if ((${#failed[@]})); then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
say "gpu-check: all passed"
