#!/bin/bash
# On the device: tests of the kernels, then timings.
export NQ_REQUIRE_CUDA=1
W=$PWD; : tests find their data where they were built; link that path to $PWD
mkdir -p /tmp/g; tar -C /tmp/g -xJf .gpu/bin.tar.xz || exit 1
OUT=${OUT:-/tmp/out}; mkdir -p $OUT
t() { local dir=$1 bin=$2; shift 2; local s=$(date +%s); (cd $W/$dir && timeout ${LIMIT:-100} /tmp/g/$bin "$@" > $OUT/last.log 2>&1); local rc=$?
  echo "== $bin $* rc $rc, $(($(date +%s)-s)) s: $(grep '^test result' $OUT/last.log)"; [ $rc = 0 ] || grep -v ' ok$' $OUT/last.log | tail -25; }
t kernels kernels_cuda embeddings products_of_a_step products_of_many_rows gates_and_ups
t kernels kernels_cuda products_of_many_sequences products_of_several_sequences experts
t runtime runtime_cuda
t runtime runtime_cuda_memory
t kernels kernels_cuda
b() { local p=$1; shift; echo "-- $p $*"; timeout 60 /tmp/g/nq bench --preset qwen3-$p --bits 4 --device cuda -p 512 -n 128 --repeats 3 --no-chat "$@" 2>&1 | grep -v '^ *$' | tail -${LINES_SHOWN:-12}; }
b 8b --depth 16; b 8b --depth 16 --mixed; b 8b --depth 16; LINES_SHOWN=40 b 8b --depth 16 --mixed --breakdown
for p in 0.6b 1.7b; do b $p --depth 16; b $p --depth 16 --mixed; done
for n in 8 16; do b 8b --batch $n; b 8b --batch $n --mixed; done
