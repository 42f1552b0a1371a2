"""Runs ablations, writes what they give, and the page that shows them all."""
from collections.abc import Iterable, Iterator
import dataclasses
import json
import pathlib
import time

import jinja2
import markupsafe

from experiments.ablations import base
from experiments.ablations import plots
from experiments.harness import text_table
from experiments.report import figures
from specjax import checkpoints

_STYLE = pathlib.Path(figures.__file__).parent / "report.css"


@dataclasses.dataclass(frozen=True)
class Done:
  """An ablation that has run: what it gave, how long it took, and its plot as an SVG element."""
  ablation: base.Ablation
  result: base.Result
  seconds: float
  svg: str


def run(ablations: Iterable[base.Ablation], options: base.Options, outdir: pathlib.Path) -> Iterator[Done]:
  """Runs each and writes `NAME/result.json`, `NAME/plot.png` and `NAME/plot.svg`.

  One whose model cannot be had cannot say anything; its result says why, and the others go on.
  """
  for ablation in ablations:
    begin = time.perf_counter()
    try:
      result = ablation.run(options)
    except checkpoints.CheckpointError as error:
      result = base.Result("", "", (), (), base.CANNOT_SAY, str(error))
    folder = outdir / ablation.name
    folder.mkdir(parents=True, exist_ok=True)
    done = Done(ablation, result, time.perf_counter() - begin, plots.draw(ablation, result, folder))
    (folder / "result.json").write_text(json.dumps(record(done, options), indent=1) + "\n", encoding="utf-8")
    yield done


def record(done: Done, options: base.Options) -> dict:
  """What `result.json` holds."""
  about = {field: getattr(done.ablation, field) for field in ("name", "title", "paper", "answers", "items", "kind")}
  return {"schema": 1, **about, "seed": options.seed, "seconds": round(done.seconds, 2),
          **dataclasses.asdict(done.result)}


def table(found: list[Done]) -> text_table.Table:
  """A line an ablation, with its verdict."""
  return text_table.Table(
      "Ablations", ("ablation", "answers", "kind", "seconds", "verdict"),
      [(done.ablation.name, f"{source(done.ablation)}, {done.ablation.answers}", done.ablation.kind,
        f"{done.seconds:.1f}", done.result.verdict) for done in found])


def source(ablation: base.Ablation) -> str:
  """The paper, as it is cited."""
  return f"arXiv {ablation.paper}" if ablation.paper[:1].isdigit() else ablation.paper


def write(found: list[Done], command: str, outdir: pathlib.Path) -> pathlib.Path:
  """Writes `index.html`, which needs no network and no other file, and returns its path."""
  environment = jinja2.Environment(loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), autoescape=True,
                                   trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
  verdicts = {verdict: sum(done.result.verdict == verdict for done in found) for verdict in base.VERDICTS}
  html = environment.get_template("gallery.html.j2").render(
      found=found, verdicts=verdicts, command=command, seconds=sum(done.seconds for done in found), source=source,
      items=sorted({item for done in found for item in done.ablation.items}),
      picture=lambda done: markupsafe.Markup(done.svg), marks={base.AGREES: "good", base.DIFFERS: "bad",
                                                              base.CANNOT_SAY: "soft"},
      style=markupsafe.Markup(_STYLE.read_text(encoding="utf-8")))
  path = outdir / "index.html"
  path.write_text(html, encoding="utf-8")
  return path
