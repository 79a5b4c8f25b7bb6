#!/usr/bin/env bash
# The reports of a run and of a benchmark in headless Chromium, at the widths of a desktop and of a phone: each page
# checks itself (#selftest) and says "ok"; the console stays empty.
#
#   browser.sh MLA WORK
set -euo pipefail
mla=$1 work=$2
if ! browser=$(command -v chromium || command -v chromium-browser); then
  echo "no chromium here: skipped"
  exit 77
fi
rm -rf "$work"
mkdir -p "$work"
cd "$work"

# Names that would be markup if they were read as such. The lengths make more steps than the charts have places.
cat >config.json <<'END'
{"model_type": "</script><script>alert(1)</script>", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
 "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
 "rms_norm_eps": 1e-6, "rope_theta": 10000}
END
"$mla" run --model config.json --allow-unknown --requests 60 --input-len 60 --output-len 24 --rate 0 --token-budget 6 --page-size 16 \
  --verify 5 --report long.html >/dev/null
"$mla" run --model config.json --allow-unknown --requests 3 --input-len 20 --output-len 4 --report short.html >/dev/null
# As from a GPU, whose ops are a sample that adds up to more than the steps.
sed 's/"device":"cpu"/"device":"NVIDIA H200, sm_90"/; s/\("simulated":[^,]*,"steps":\)[^}]*}/\11e-6}/' long.html >gpu.html
grep -q '"steps":1e-6}' gpu.html && grep -q '"device":"NVIDIA' gpu.html || { echo "long.html is not as expected"; exit 1; }
bench=(bench norm rope gather attend_latent --heads 4 --context 100 --rounds 4 --min-time 0)
"$mla" "${bench[@]}" --json bench.json >/dev/null
name=$(sed -n 's/^ *"name": \("attend_latent.*"\),$/\1/p' bench.json)
[[ -n $name ]] || { echo "bench.json names no row of attend_latent"; exit 1; }
echo "[{\"row\": $name, \"peer\": \"<img src=x onerror=alert(1)>\", \"us\": 100},
       {\"row\": $name, \"peer\": \"another\", \"us\": 3.5}]" >peers.json
"$mla" "${bench[@]}" --peers peers.json --report bench.html >/dev/null

# The check must be able to fail: a page with an error, one with too wide an element.
sed 's|</body>|<script>console.error("on purpose")</script></body>|' bench.html >noisy.html
sed 's|</main>|<div style="width:3000px">wide</div></main>|' bench.html >wide.html

# Windows do not get as narrow as a phone, frames do.
frame() {
  cat <<END
<!DOCTYPE html><body style="margin:0"><iframe src="$1#selftest" style="border:0;width:390px;height:844px"></iframe>
<script>addEventListener('message', (e) => Object.assign(document.documentElement.dataset, e.data));</script>
END
}

# visit PAGE SIZE: prints the html element's attributes, then what the console says.
visit() {
  local url=file://$PWD/$1 size=$2
  if [[ $size == 390,844 ]]; then
    frame "$1" >frame.html
    url=file://$PWD/frame.html size=1280,900
  else
    url+='#selftest'
  fi
  # Chromium's sandbox starts neither as root nor in most containers; the pages are our own.
  timeout 90 "$browser" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run \
    --user-data-dir="$work/profile" --enable-logging=stderr --virtual-time-budget=20000 --window-size="$size" --dump-dom \
    "$url" 2>log >dom || { echo "chromium failed on $1"; tail -5 log; return 1; }
  grep -o '<html[^>]*>' dom | head -1
  grep 'CONSOLE' log || true
}

failed=0
expect() {  # expect PAGE SIZE CHARTS WIDTH
  local seen
  seen=$(visit "$1" "$2")
  if [[ $seen != *'data-selftest="ok"'* || $seen != *"data-charts=\"$3\""* || $seen != *"data-width=\"$4\""* || $seen == *CONSOLE* ]]; then
    echo "FAILED $1 at $2, $3 charts expected: $seen"
    failed=1
  else
    echo "ok     $1 at $2"
  fi
}
refuse() {
  local seen
  seen=$(visit "$1" 1280,800)
  if [[ $seen == *'data-selftest="ok"'* && $seen != *CONSOLE* ]]; then
    echo "FAILED $1 passes, which it must not"
    failed=1
  fi
}
for page in long short gpu; do
  expect $page.html 1280,800 7 1280
  expect $page.html 390,844 7 390
done
expect bench.html 1280,800 1 1280
expect bench.html 390,844 1 390
refuse noisy.html
refuse wide.html
exit $failed
