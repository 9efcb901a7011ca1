#!/usr/bin/env bash
# Which claims does this machine's accelerator keep, how does it add, and how fast is the engine on it? In 8 minutes.
#
#   scripts/device_check.sh [device] [folder]      device: cuda, npu, xpu, mps or cpu; found out unless given
#
# Uses the machine's own python (PYTHON, else python3) and torch, 2.11 or later. Installs nothing: the three packages come
# from this source tree, and modules that the machine lacks from wheels in the folder MP_WHEELS, unpacked beside the results.
set -u
cd "$(dirname "$0")/.." || exit 2
root=$PWD
python=${PYTHON:-python3}
folder=${2:-runs/device}
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) || exit 2
export PYTHONPATH="$root/packages/mp-reference/src:$root/packages/mp-torch/src:$root/packages/mp-conformance/src${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ -n "${MP_WHEELS:-}" ]; then
  mkdir -p "$folder/unpacked"
  for wheel in "$MP_WHEELS"/*.whl; do "$python" -m zipfile -e "$wheel" "$folder/unpacked"; done
  export PYTHONPATH="$PYTHONPATH:$folder/unpacked"
fi

missing=$("$python" - <<'PY'
from importlib.util import find_spec
names = ("torch", "numpy", "ml_dtypes", "hypothesis", "rich", "jinja2", "mpmath", "safetensors")
print(" ".join(name for name in names if find_spec(name) is None))
PY
)
if [ -n "$missing" ]; then
  echo "this python lacks: $missing; put their wheels into a folder and call MP_WHEELS=folder $0, or set PYTHON" >&2
  exit 2
fi

found=$("$python" - <<'PY'
import importlib
import torch
release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if release < (2, 11):
    raise SystemExit(f"torch {torch.__version__} is too old; 2.11 or later is supported")
try:
    importlib.import_module("torch_npu")
except ImportError:
    pass
for name in ("cuda", "npu", "xpu", "mps"):
    module = getattr(torch, name, None)
    if module is not None and module.is_available():
        print(name)
        break
else:
    print("cpu")
PY
) || exit 2
device=${1:-$found}
[ "$device" = cpu ] && echo "no accelerator here: everything below was measured on the CPU" | tee "$folder/note.txt"

step() {  # step NAME SECONDS COMMAND...: run, keep the output, never fail the script
  name=$1; seconds=$2; shift 2
  started=$(date +%s)
  timeout "$seconds" "$@" >"$folder/$name.txt" 2>&1
  status=$?
  printf '%-12s %4d s  exit %d%s\n' "$name" $(($(date +%s) - started)) $status \
    "$([ $status = 124 ] && echo '  (cut off)')" | tee -a "$folder/summary.txt"
}

: >"$folder/summary.txt"
step claims 240 "$python" -m mp_conformance --device "$device" --minutes 3 --quiet \
  --report "$folder/report.html" --json "$folder/report.json"
step probe 60 "$python" -m mp_conformance probe --device "$device" --json "$folder/probe.json"
for benchmark in engine emulate; do
  [ -f "benchmarks/$benchmark.py" ] && step "$benchmark" 80 "$python" "benchmarks/$benchmark.py"
done
{ echo; cat "$folder/claims.txt"; echo; cat "$folder/probe.txt"; } >>"$folder/summary.txt"
tail -n +1 "$folder/summary.txt"
echo "results: $folder (summary.txt, report.html, report.json, probe.json)"
grep -q 'claims .*exit [01]' "$folder/summary.txt"
