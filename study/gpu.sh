# bash study/gpu.sh smoke|study1|study2|study3|areas NAME… ; on the GPU machine, from the repository's root, ≤ 600 s each
export PYTHONPATH=src:.carry/site PYTHONUNBUFFERED=1
T=tests/kernels/test_attention_gluon.py
case $1 in
smoke)  # a hang costs the call: each has its own limit
  for k in "test_head_dims and 128 and codes and not promote" "test_other_settings and 64" "test_a_sink or test_nan" "test_head_dims" "test_specs" "test_other_settings"; do
    timeout 150 python3 -m pytest -q -p no:cacheprovider -n 14 -m gpu -x --maxfail=12 $T -k "$k" 2>&1 | grep -v "^\.\|^$" | tail -25 | cut -c1-220; echo "== $k: $?"; done ;;
study1) timeout 560 python3 study/attention_study.py d128 d64 d72 d96 c128 --modes codes,exact -j 14 --budget 540 -o $OUT/study.jsonl ;;
study2) timeout 560 python3 study/attention_study.py d192 d256 c192 c256 short s64 b2 mid c64 --modes codes --budget 540 -j 14 -o $OUT/study.jsonl ;;
study3) timeout 560 python3 study/attention_study.py d128 d64 d192 d256 c128 --modes codes1 --budget 540 -j 14 -o $OUT/study.jsonl ;;
areas) shift; (while true; do cp results/gpu_tests_h200.jsonl $OUT/; sleep 3; done) & for n in "$@"; do python3 scripts/test_on_gpu.py $n; done; cp results/gpu_tests_h200.jsonl $OUT/ ;;
esac
