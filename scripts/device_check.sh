#!/usr/bin/env bash
# Which claims does this machine's accelerator keep, how does it add, and how fast is the engine on it? In 8 minutes.
#
#   scripts/device_check.sh [device] [folder]      device: cuda, npu, xpu, mps or cpu; found out unless given
#
# A device that this torch cannot use is named, and everything runs on the CPU instead.
# Uses the machine's own python (PYTHON, else python3) and torch, 2.11 or later. Installs nothing: the three packages come
# from this source tree, and modules that the machine lacks from wheels in the folder MP_WHEELS, unpacked beside the results.
set -u
root=$(cd "$(dirname "$0")/.." && pwd) || exit 2
python=${PYTHON:-python3}
folder=${2:-$root/runs/device}
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) || exit 2  # names are the caller's, so before the change of folder
[ -n "${MP_WHEELS:-}" ] && { MP_WHEELS=$(cd "$MP_WHEELS" && pwd) || exit 2; }
cd "$root" || exit 2
export PYTHONPATH="$root/packages/mp-reference/src:$root/packages/mp-torch/src:$root/packages/mp-conformance/src${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1  # what is cut off keeps the lines it printed

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

found=$("$python" - "${1:-}" <<'PY'
import importlib
import sys

import torch

wanted, names = sys.argv[1], ("cuda", "npu", "xpu", "mps")
if wanted not in ("", "cpu", *names):
    raise SystemExit(f"device {wanted!r} is not one of {', '.join(names)} or cpu")
release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if release < (2, 11):
    raise SystemExit(f"torch {torch.__version__} is too old; 2.11 or later is supported")
try:
    importlib.import_module("torch_npu")
except ImportError:
    pass
usable = [name for name in names if getattr(torch, name, None) is not None and getattr(torch, name).is_available()]
if wanted == "cpu":
    print("cpu as asked:")
elif wanted in usable or (not wanted and usable):
    print(wanted or usable[0])
else:
    print(f"cpu {wanted or 'no accelerator'}: torch {torch.__version__} can use none here,")
PY
) || exit 2
device=${found%% *}
rm -f "$folder/note.txt"
[ "$device" = cpu ] && echo "${found#* } everything below was measured on the CPU" | tee "$folder/note.txt"

cut_off() {  # cut_off SECONDS COMMAND...: 124 where it took longer; not every system has timeout(1)
  "$python" -c '
import subprocess, sys

running = subprocess.Popen(sys.argv[2:])
try:
    sys.exit(running.wait(float(sys.argv[1])))
except subprocess.TimeoutExpired:
    running.terminate()  # the claims then write what they found
try:
    running.wait(10)
except subprocess.TimeoutExpired:
    running.kill()
sys.exit(124)
' "$@"
}

step() {  # step NAME SECONDS COMMAND...: run, keep the output, never fail the script
  name=$1; seconds=$2; shift 2
  started=$(date +%s)
  cut_off "$seconds" "$@" >"$folder/$name.txt" 2>&1
  status=$?
  printf '%-12s %4d s  exit %d%s\n' "$name" $(($(date +%s) - started)) $status \
    "$([ $status = 124 ] && echo '  (cut off)')" | tee -a "$folder/summary.txt"
}

: >"$folder/summary.txt"
step claims 240 "$python" -m mp_conformance --device "$device" --minutes 3 --quiet \
  --report "$folder/report.html" --json "$folder/report.json"
step probe 60 "$python" -m mp_conformance probe --device "$device" --json "$folder/probe.json"
step engine 70 "$python" benchmarks/engine.py --device "$device"
step emulate 70 "$python" benchmarks/emulate.py  # CPU tensors, whatever the device
for name in claims probe engine emulate; do { echo; cat "$folder/$name.txt"; } >>"$folder/summary.txt"; done
cat "$folder/summary.txt"
echo "results: $folder (summary.txt, report.html, report.json, probe.json)"
grep -q 'claims .*exit [01]' "$folder/summary.txt"
