#!/usr/bin/env bash
# From a fresh clone to a table: installs, fetches the default weights (93 MB), and measures plain decoding, prompt
# lookup and the EAGLE-3 head that comes with it on one bundled prompt a category. About five minutes on two cores the
# first time. See launch/environment.sh for PYTHON and VENV. Further flags go to the benchmark.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare ""
echo "== measuring one prompt a category with each method (compiling comes first)"
"$VENV/bin/python" -m experiments.benchmark --limit=1 --max_new_tokens=64 --repeats=1 --nocosts \
  --methods=plain,ngram,eagle3 --outdir=runs/quickstart --overwrite "$@"
cat <<TEXT

The whole bundled workload, 72 requests with 128 tokens, takes about 15 minutes on two cores:
  $VENV/bin/python -m experiments.benchmark --outdir=runs/bundled
Lookup where it finds something and the head elsewhere, beside both alone:
  $VENV/bin/python -m experiments.benchmark --methods=plain,suffix,eagle3,fallback --fallback=suffix,eagle3 \
    --tree_nodes=4 --tree_depth=3 --tree_beam=3 --outdir=runs/heads
One answer, streamed:
  $VENV/bin/python -m experiments.generate --prompt="Name three rivers." --method=eagle3
TEXT
