#!/bin/bash
# Fill .gpu with what gpu_first_day.sh carries to a machine without a network: bash benchmarks/gpu_bundle.sh [3.12]
# Numba, numba-cuda and their bindings for that machine's Python, stripped: site.tar.xz and libllvmlite.so.xz.
# numpy, torch and NVIDIA's libraries (NVVM, nvJitLink, NVRTC) are the machine's own.
set -e
VERSION=${1:-3.12}; OUT=$(cd "$(dirname "$0")/.." && pwd)/.gpu; WORK=$(mktemp -d); trap 'rm -rf "$WORK"' EXIT
mkdir -p "$OUT" "$WORK/wheels" "$WORK/site"
tags=$(for glibc in 28 27 26 24 17; do printf -- '--platform manylinux_2_%s_x86_64 ' $glibc; done)
for package in numba==0.68.1 llvmlite==0.50.0 numba-cuda==0.30.4 cuda-core==1.2.2 cuda-bindings==13.5.0 \
    cuda-pathfinder==1.9.1 ml_dtypes==0.6.0 packaging==25.0 click==8.3.1 rich==14.2.0 markdown-it-py==4.0.0 mdurl==0.1.2 pygments==2.19.2; do
    # shellcheck disable=SC2086
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$VERSION" --implementation cp \
        $tags --platform manylinux2014_x86_64 -d "$WORK/wheels" $package
done
for wheel in "$WORK"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$WORK/site"; done
cd "$WORK/site"
strip -s -o "$WORK/libllvmlite.so" llvmlite/binding/libllvmlite.so
tar --sort=name --owner=0 --group=0 --mtime=@1700000000 --exclude='*/tests' --exclude='*.pxd' --exclude='*.pyi' \
    --exclude='*.pyx' --exclude='*.h' --exclude='*.hpp' --exclude='cuda/core/cu12' --exclude='*nvfatbin*' \
    --exclude='*cufile*' --exclude='*cudla*' --exclude=libllvmlite.so -cf "$WORK/site.tar" .
xz -c --x86 --lzma2=preset=9 "$WORK/site.tar" >"$OUT/site.tar.xz"
xz -c -T1 --x86 --lzma2=preset=9e,dict=192MiB "$WORK/libllvmlite.so" >"$OUT/libllvmlite.so.xz"  # minutes, 2 GB
size=$(cat "$OUT"/*.xz | wc -c); echo "$OUT: $size bytes"
[ "$size" -lt $((45 << 20)) ] || { echo "expected less than 45 MiB"; exit 1; }
