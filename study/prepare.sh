#!/usr/bin/env bash
# bash study/prepare.sh [GET_SITE]: fill .carry, what the kernel's machine lacks, before the first
# call there. GET_SITE: a script that unpacks pydantic and typer into the folder it is given. The
# attention kernel as it was before this branch goes to .carry/old_attention, to be timed beside;
# pytest is there in case the machine has none.
set -euo pipefail
cd "$(dirname "$0")/.."
old=$(git log --format=%H --diff-filter=A -1 -- src/octavo/kernels/attention/gluon_roles.py)^
mkdir -p .carry/old_attention
touch .carry/old_attention/__init__.py
for name in config gluon_sm90; do
  git show "$old:src/octavo/kernels/attention/$name.py" |
    sed 's/octavo\.kernels\.attention\.config/old_attention.config/' > ".carry/old_attention/$name.py"
done
[ -d .carry/pytest ] || python3 -m pip install -q --target .carry/pytest pytest pytest-xdist
[ $# = 0 ] || [ -d .carry/site ] || bash "$1" .carry/site
rm -rf .carry/pytest/pygments  # .carry/site has it
find .carry -name __pycache__ -exec rm -rf {} +
du -sh .carry/*
