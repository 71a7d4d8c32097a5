#!/usr/bin/env bash
# bash study/gpu.sh STAGE [ARGUMENT …], on a machine with a GPU from the repository's root, once
# study/prepare.sh has filled .carry here. Each stage ends within 570 s. What it writes lies in $OUT;
# put $OUT/triton_cache.tgz and $OUT/timing.jsonl into .carry for the next call.
#   first             compile, check in small calls, time the defaults beside the old kernel
#   check [GROUP …]   groups of study/smoke.py, each in a process of its own
#   time ARGUMENT …   study/timing.py with these arguments
#   tests [EXPRESSION …]   tests/kernels/test_attention_gluon.py, one pytest for each -k expression
set -u
OUT=${OUT:?a folder for results}
export PYTHONPATH=src:tests:study:.carry:.carry/site PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/octavo_triton
python3 -c "import pytest, xdist" 2> /dev/null || PYTHONPATH+=:.carry/pytest
started=$SECONDS
mkdir -p "$TRITON_CACHE_DIR" "$OUT"
[ -f .carry/triton_cache.tgz ] && tar xzf .carry/triton_cache.tgz -C "$TRITON_CACHE_DIR"
[ -f .carry/timing.jsonl ] && [ ! -f "$OUT/timing.jsonl" ] && cp .carry/timing.jsonl "$OUT/"

left() { echo $((560 - (SECONDS - started) < ${1:-560} ? 560 - (SECONDS - started) : ${1:-560})); }
groups="codes wide exact causal persistent one-level packed masks three stages"

check() {  # a hang ends its own group within 45 s
  for group in "$@"; do
    [ "$(left)" -gt 10 ] || return
    timeout -k 5 "$(left 75)" python3 study/smoke.py "$group" || echo "== $group: status $?"
  done
}
time_them() {  # after a hang, go on with the next variant
  for _ in 1 2 3 4 5; do
    [ "$(left)" -gt 20 ] || return
    timeout -k 5 "$(left)" python3 study/timing.py -o "$OUT/timing.jsonl" --budget "$(($(left) - 15))" "$@"
    [ $? = 3 ] || return
  done
}
pack() {
  (cd "$TRITON_CACHE_DIR" && find . -name '*.cubin' -o -name '*.json' -o -name '*.so' | tar czf "$OUT/triton_cache.tgz" -T -)
  echo "$((SECONDS - started)) s in all"
}

stage=$1; shift
case $stage in
first)
  nvidia-smi --query-gpu=name,clocks.sm,power.draw --format=csv,noheader
  timeout -k 5 200 python3 study/smoke.py compile
  check codes wide exact causal persistent 2>&1 | tee "$OUT/check.txt"
  time_them --modes codes,exact,old,bf16 2>&1 | tee "$OUT/timing.txt"
  check one-level packed masks three stages 2>&1 | tee -a "$OUT/check.txt"
  time_them d128 d64 d72 d96 d256 --all --only n --modes codes 2>&1 | tee -a "$OUT/timing.txt" ;;
check) check ${*:-$groups} 2>&1 | tee "$OUT/check.txt" ;;
time) time_them "$@" 2>&1 | tee "$OUT/timing.txt" ;;
tests)
  [ $# -gt 0 ] || set -- test_head_dims test_lengths "test_specs" "test_packed or test_nan or test_one_nan" test_a_sink test_other_settings
  for expression in "$@"; do
    [ "$(left)" -gt 20 ] || break
    timeout -k 5 "$(left 150)" python3 -m pytest -q -p no:cacheprovider -m gpu -n 8 --maxfail=8 \
      tests/kernels/test_attention_gluon.py -k "$expression" 2>&1 | tail -25 | cut -c1-220
    echo "== $expression: ${PIPESTATUS[0]}"
  done 2>&1 | tee "$OUT/tests.txt" ;;
*) echo "no stage $stage" >&2; exit 2 ;;
esac
pack
