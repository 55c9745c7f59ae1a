#!/bin/bash
# Tell in SECONDS (540) what kvkit_cuda does on this machine's GPU: bash benchmarks/gpu_first_day.sh [SECONDS]
# It runs in a checkout and needs no network. Where numba-cuda does not fit it takes .gpu, which gpu_bundle.sh fills.
# OUT is a folder for the whole output of each part, and for bench.json.
END=$((SECONDS + ${1:-540})); ROOT=$(cd "$(dirname "$0")/.." && pwd); cd "$ROOT" || exit 1
TMP=$(mktemp -d); export TMP OUT=${OUT:-$TMP/out} PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore; mkdir -p "$OUT" "$TMP/path"
ln -sfn "$ROOT/cli" "$TMP/path/kvkit_cli"; export PYTHONPATH=$ROOT:$TMP/path  # where kvkit is not installed
DAY="python3 -m benchmarks.gpu_first_day"
at() { left=$((END - SECONDS)); [ $left -gt 5 ] && timeout -k 5 $(($1 < left ? $1 : left)) "${@:2}"; echo "   rc $? at $SECONDS s"; }

echo "== machine"
nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total,clocks.max.sm,clocks.max.mem --format=csv,noheader
python3 -V; python3 -m pip list 2>/dev/null >"$OUT/pip.txt"
grep -iE '^(numba|llvmlite|numpy|torch|cuda-|ml|nvidia-(nvjit|nvvm|cuda-nvr)|pytest)' "$OUT/pip.txt" | tr -s ' \n' ' ;'; echo
for compiler in "$(readlink -f "$(command -v nvcc)")" /usr/local/cuda*/bin/nvcc; do  # a toolkit, for its NVVM
    home=$(dirname "$(dirname "$compiler")"); [ -d "$home/nvvm/libdevice" ] && export CUDA_HOME=$home && break
done; echo "toolkit ${CUDA_HOME:-none}"

fits() { timeout 90 python3 -c '
from kvkit_cuda.device_runtime import needs; needs.packages()
from kvkit_cuda.device_runtime import host; host.require(); host.require_device(0)
from numba import cuda; print("   fits:", cuda.__file__)'; }
echo "== numba-cuda"
if ! fits 2>"$OUT/own.txt"; then
    tail -1 "$OUT/own.txt"
    if [ -f .gpu/site.tar.xz ]; then
        mkdir -p "$TMP/site/llvmlite/binding"
        python3 -c 'import os, tarfile; tarfile.open(".gpu/site.tar.xz").extractall(os.environ["TMP"] + "/site", filter="tar")' &
        python3 -c 'import lzma, os, shutil
shutil.copyfileobj(lzma.open(".gpu/libllvmlite.so.xz"), open(os.environ["TMP"] + "/site/llvmlite/binding/libllvmlite.so", "wb"))'; wait
        export PYTHONPATH=$PYTHONPATH:$TMP/site; fits || echo "   NOTHING FITS: see above"
    fi
fi

echo "== float16 subnormals in tensor cores: integer codes are wrong on a GPU that takes them for 0"
at 60 $DAY smoke "float16 subnormals" 2>&1 | tail -2
echo "== smoke: every kind of kernel beside the CPU, each in a process of its own"
$DAY names | at 120 xargs -d '\n' -P 14 -I{} sh -c "timeout 110 $DAY smoke '{}' 2>&1 | tail -2 || true"
echo "== bench"; at 150 $DAY bench --json "$OUT/bench.json" 2>&1 | tee "$OUT/bench.txt"
echo "== tests"
at 150 python3 -m pytest --backend gpu -m "not slow" -v -n 14 -p no:cacheprovider --tb=short >"$OUT/tests.txt" 2>&1
for word in PASSED FAILED ERROR; do echo "   $word $(grep -c "\[gw.*$word " "$OUT/tests.txt")"; done  # also where time ran out
grep -E "FAILED|^E   " "$OUT/tests.txt" | cut -c1-160 | head -25
echo "== ncu"
at 45 ncu --clock-control none --kernel-name-base mangled -k regex:attend -c 2 --section SpeedOfLight --section Occupancy \
    --section LaunchStats --section WarpStateStats $DAY smoke "decode float16" >"$OUT/ncu.txt" 2>&1
grep -E 'Duration|Throughput|Registers Per|Achieved Occ|No Eligible|attend' "$OUT/ncu.txt" | cut -c1-110 | head -16
echo "== sanitizer"
for tool in memcheck racecheck; do at 40 compute-sanitizer --tool $tool $DAY smoke "decode int8" 2>&1 | tail -3; done
