#!/usr/bin/env bash
# mla run over the processes of an MPI job: one summary, rank 0's files, how it ends when a rank fails or is stopped.
# command.sh MLA MPIEXEC NUMPROC_FLAG RANKS
set -euo pipefail
mla=$1 mpiexec=$2 flag=$3 ranks=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() {
  echo "FAILED: $1" >&2
  for f in out err; do echo "--- $f" >&2; cat $f >&2 || true; done
  exit 1
}
# Runs it; the exit code is in $code.
job() {
  code=0
  timeout 120 "$mpiexec" "$flag" "$ranks" "$mla" "$@" >out 2>err </dev/null || code=$?
}
expect_no_files() {
  for f in run.json run.html trace.json .mla-*; do [[ ! -e $f ]] || fail "$1 left $f"; done
}
model=(--model deepseek-v2-lite --heads 8 --layers 2 --input-len 60 --page-size 16 --threads 1)
few=(--requests 6 --output-len 6)
run=(run --comm mpi --tp "$ranks" "${model[@]}")

# Heads alone, then the cache, too: verified, one of each line, files of rank 0.
for dcp in $(printf "%s\n" 1 2 "$ranks" | sort -un); do
  ((ranks % dcp == 0)) || continue
  job "${run[@]}" "${few[@]}" --dcp "$dcp" --verify 12 --json run.json --report run.html --chrome-trace trace.json
  [[ $code == 0 ]] || fail "exit code $code"
  [[ $(grep -c '^trace  ' out) == 1 ]] || fail "not one summary"
  grep -q "$ranks ranks, processes of an MPI job" out || fail "the summary does not name the ranks"
  grep -q '^verified   12 rows .*, 0 failed' out || fail "nothing was verified"
  python3 - "$ranks" "$dcp" <<'PY' || fail "run.json"
import json, sys
j = json.load(open("run.json"))
ranks, dcp = int(sys.argv[1]), int(sys.argv[2])
assert j["model"]["link"] == "mpi" and j["model"]["tensor_parallel"] == ranks and j["model"]["context_parallel"] == dcp
assert j["trace"]["finished"] == 6 and j["verification"]["rows"] == 12 and j["verification"]["failed"] == 0
assert json.load(open("trace.json"))["traceEvents"]
PY
  [[ -s run.html ]] || fail "no report"
  rm run.json run.html trace.json
done

# What calls take, as --link of mla plan.
job bench comm --comm mpi --bytes 1024,65536 --min-time 0 --json run.json
[[ $code == 0 ]] || fail "exit code $code"
[[ $(grep -c '^--link ' out) == 1 && $(grep -c '^all_reduce ' out) == 2 ]] || fail "bench comm"
"$mla" plan --model deepseek-v3 --tp "$ranks" --link "$(sed -n 's/^--link \([^:]*\):.*/\1/p' out)" >out 2>err || fail "plan"
! grep -q 'link unknown' out || fail "plan without a link"
rm run.json
job bench comm --comm mpi --ranks $((ranks + 1))
[[ $code == 2 && $(grep -c '^mla: --ranks is' err) == 1 ]] || fail "a bad --ranks"

# What cannot be: one line of one rank.
job run --comm mpi --tp $((ranks + 1)) "${model[@]}" "${few[@]}" --json run.json
[[ $code == 2 ]] || fail "exit code $code"
[[ $(grep -c '^mla: ' err) == 1 ]] || fail "not one message"
grep -q -- "--tp is $((ranks + 1)), the MPI job has $ranks processes: start it as mpirun -n $((ranks + 1))" err || fail "message"
expect_no_files "a bad --tp"
job "${run[@]}" "${few[@]}" --json nowhere/run.json
[[ $code == 2 && $(grep -c '^mla: ' err) == 1 ]] || fail "a file that cannot be written"

# One rank gets another trace: it is named, by rank 0.
cat >odd <<'SH'
#!/bin/sh
seed=1
[ "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}" = 1 ] && seed=2
exec "$MLA" "$@" --seed $seed
SH
chmod +x odd
code=0
MLA=$mla timeout 120 "$mpiexec" "$flag" "$ranks" ./odd "${run[@]}" "${few[@]}" --json run.json >out 2>err </dev/null || code=$?
[[ $code == 2 ]] || fail "exit code $code"
grep -q "^mla: barrier of step 'trace and options'.*\|^mla: rank 1 is at barrier of step 'trace and options'.*their plans differ" err || fail "message"
expect_no_files "another trace"

# SIGTERM of one rank, or of the launcher: the summary so far, files, 143.
long=("${run[@]}" --requests 100000 --output-len 400 --pages 200 --json run.json)
signal() {
  rm -f run.json
  "$mpiexec" "$flag" "$ranks" "$mla" "${long[@]}" >out 2>err </dev/null &
  local launcher=$! pids=()
  for ((i = 0; i < 300; ++i)); do
    mapfile -t pids < <(pgrep -P $launcher -x mla | sort -n)
    [[ ${#pids[@]} == "$ranks" ]] && break
    sleep 0.1
  done
  [[ ${#pids[@]} == "$ranks" ]] || fail "${#pids[@]} ranks were started"
  # Steps run once rank 0 says how far it is, after 5 s of them.
  for ((i = 0; i < 600; ++i)); do
    if grep -q ' ETA ' err; then break; fi
    sleep 0.1
  done
  grep -q ' ETA ' err || fail "no progress"
  "$1" "$launcher" "${pids[@]}"
  code=0
  for ((i = 0; i < 400; ++i)); do kill -0 $launcher 2>/dev/null || break; sleep 0.1; done
  if kill -0 $launcher 2>/dev/null; then kill -KILL "${pids[@]}" $launcher; fail "the job hangs"; fi
  wait $launcher || code=$?
}
one() { kill -TERM "$3"; }
signal one
[[ $code == 143 ]] || fail "exit code $code"
[[ $(grep -c '^trace  ' out) == 1 ]] || fail "no summary"
[[ $(grep -c ' ETA ' err) -le 3 ]] || fail "progress of more than one rank"
[[ -s run.json ]] || fail "no run.json"

# A rank that hangs: the others end by the deadline, the job does not.
long+=(--comm-seconds 5)
hang() { kill -STOP "$3"; }
signal hang
[[ $code != 0 ]] || fail "exit code $code"
grep -Eq "rank 1 did not (come|take what was sent to it) before rank [0-9]+'s deadline" err || fail "message"
expect_no_files "a rank that hangs"

# One that dies.
dies() { kill -KILL "$3"; }
signal dies
[[ $code != 0 ]] || fail "exit code $code"
[[ ! -e run.json ]] || fail "a rank that dies left run.json"
