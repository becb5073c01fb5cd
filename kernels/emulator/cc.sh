#!/bin/bash
# cc.sh SRC_DIR OUT_DIR name...
NV=target/nvcc-venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc
src=$1; out=$2; shift 2
for n in "$@"; do $(echo $NV) -O3 -std=c++17 -cubin -arch=sm_90a -Xptxas -v -o $out/$n.cubin $src/$n.cu > $out/$n.log 2>&1 || echo "FAIL $n"; done
echo done $(date)
