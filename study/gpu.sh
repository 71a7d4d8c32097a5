#!/usr/bin/env bash
# bash study/gpu.sh WHAT …, on a machine with a GPU from the repository's root. WHAT, in this order:
# names that scripts/test_on_gpu.py knows, "sanitize", "generate" (a record of generate()'s tokens),
# "time" (the cases in $CASES). Each begins only if time is left (LIMIT seconds in all); logs and new
# records lie in $OUT. Before the first call, here: pack what that machine lacks into .carry/site.tgz
# (a folder "site": pydantic, typer, rich, diffusers; a folder "te": typing_extensions).
mkdir -p /tmp/site; [ -d /tmp/site/site ] || tar xzf .carry/site.tgz -C /tmp/site
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=/tmp/site/te:src:tests:/tmp/site/site
records=results/gpu_tests_h200.jsonl
before=$(wc -l < $records)
left() { echo $((${LIMIT:-575} - SECONDS)); }
for name in "$@"; do
  [ "$(left)" -gt 25 ] || { echo "no time for $name"; continue; }
  started=$SECONDS limit=$(($(left) - 10))
  case $name in
  generate) timeout $limit python3 -m octavo bench generate --config llama-3.1-8b --calls -o "$OUT/generate.jsonl" > "$OUT/generate.txt" 2>&1 ;;
  sanitize) timeout $limit python3 scripts/sanitize_on_gpu.py > "$OUT/sanitize.txt" 2>&1; cp results/sanitizer_h200.jsonl "$OUT/" ;;
  time)
    for case in $CASES; do timeout 60 python3 study/time_attention.py "$case" > /dev/null 2>&1 & done; wait
    timeout $limit python3 study/time_attention.py $CASES > "$OUT/time.txt" 2>&1 ;;
  *) timeout -k 3 $limit python3 scripts/test_on_gpu.py "$name" > "$OUT/$name.txt" 2>&1 ;;
  esac
  tail -n 14 "$OUT/$name.txt" | cut -c1-260
  echo "== $name $((SECONDS - started)) s"
  tail -n +$((before + 1)) $records > "$OUT/gpu_tests.jsonl"
done
cd "$OUT" && tar czf logs.tgz ./*.txt && rm -f ./*.txt
echo "$SECONDS s"
