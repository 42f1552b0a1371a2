#!/usr/bin/env bash
# Makes the pictures of README.md, in experiments/pictures: a benchmark, a sweep and the ablations, some 40 minutes on two
# cores, and pictures of their pages by Debian's chromium and chromium-driver. See launch/environment.sh for PYTHON, VENV.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare test
mkdir -p experiments/pictures
run() { "$VENV/bin/python" -m "experiments.$@"; }
run benchmark --methods=plain,ngram,suffix,eagle3 --trace=1 --outdir=runs/default --overwrite
run sweep --vary=draft_tokens:1,3,7,15 --methods=ngram --limit=1 --max_new_tokens=64 --outdir=runs/draft_tokens \
  --overwrite
run ablations --run=sim --outdir=runs/ablations
"$VENV/bin/python" launch/picture.py runs/default/report.html runs/default/explorer.png --of=explorer --click=trace-next \
  --times=12 --height=640
"$VENV/bin/python" launch/picture.py runs/ablations/index.html runs/ablations/gallery.png
# Sixty-four colours are enough for charts, and a quarter of the bytes.
"$VENV/bin/python" - <<'PYTHON'
import pathlib
from PIL import Image
for source in ("default/plots/speedup", "default/plots/predicted", "default/explorer", "draft_tokens/plots/speedup",
               "ablations/gallery"):
  path = pathlib.Path("runs", f"{source}.png")
  picture = Image.open(path).convert("RGB")
  picture.thumbnail((1200, 1200))
  picture.quantize(64).save(f"experiments/pictures/{path.relative_to('runs').parts[0]}_{path.name}", optimize=True)
PYTHON
ls -l experiments/pictures
