"""Redoes ablations of papers: our curve beside the published numbers, and a verdict.

  python -m experiments.ablations --list
  python -m experiments.ablations --run=sim --outdir=runs/ablations
  python -m experiments.ablations --run=block_verification,tree_size

"sim" are exact and need tables only, "toy" train small models or run SmolLM2, which takes minutes, "all" are both.
Writes OUTDIR/NAME/result.json, plot.png and plot.svg for each, and OUTDIR/index.html, a page that shows all of them;
prints a line an ablation with its verdict.
"""
import pathlib

from absl import flags
from tqdm import tqdm

from experiments.ablations import base
from experiments.ablations import gallery
from experiments.ablations import registry
from experiments.harness import cli
from experiments.harness import run_folder
from experiments.harness import settings
from experiments.harness import text_table

_LIST = flags.DEFINE_bool("list", False, "Print the ablations there are and run none.")
_RUN = flags.DEFINE_list("run", ["sim"], "Names of ablations, or sim, toy, all; several with commas.")
_OUTDIR = flags.DEFINE_string("outdir", "runs/ablations", "Folder for results, plots and the page.")


def main():
  settings.uses_only(settings.SEED)
  chosen = registry.choose(_RUN.value)
  if _LIST.value:
    print(text_table.Table("Ablations", ("name", "kind", "answers", "title"), [
        (a.name, a.kind, f"{gallery.source(a)}, {a.answers}", a.title) for a in registry.ALL.values()]).text())
    return
  outdir = pathlib.Path(_OUTDIR.value)
  run_folder.check_outdir(_OUTDIR.value)
  outdir.mkdir(parents=True, exist_ok=True)
  found, bar = [], tqdm(total=len(chosen), unit="ablation", leave=False)
  for done in gallery.run(chosen, base.Options(seed=settings.SEED.value), outdir):
    found.append(done)
    bar.set_description(done.ablation.name)
    bar.update()
  bar.close()
  command = f"python -m experiments.ablations --run={','.join(_RUN.value)} --seed={settings.SEED.value}"
  page = gallery.write(found, command, outdir)
  print(gallery.table(found).text())
  for done in found:
    if done.result.verdict != base.AGREES:
      print(f"\n{done.ablation.name} ({done.result.verdict}): {done.result.why}")
  print(f"\npage: {page} ({sum(done.seconds for done in found):.0f} s)")


if __name__ == "__main__":
  cli.run(main)
