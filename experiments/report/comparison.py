"""The page of `experiments.compare`: one table a run, in the dress of the report, its titles sortable."""

import base64
from collections.abc import Sequence
import hashlib
import pathlib

import jinja2
import markupsafe

from experiments.harness import comparing

_HERE = pathlib.Path(__file__).parent
_TONES = {comparing.REGRESSION: "bad", comparing.SLOWER: "bad", comparing.FASTER: "good"}


def write_page(outdir: str, runs: Sequence[comparing.Run], cells: Sequence[comparing.Cell], notes: Sequence[str],
               threshold: float) -> pathlib.Path:
  """Writes `compare.html` into a folder, which is made if need be; returns its path."""
  script = (_HERE / "report.js").read_text(encoding="utf-8")
  environment = jinja2.Environment(loader=jinja2.FileSystemLoader(_HERE), autoescape=True,
                                   undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
  html = environment.get_template("compare.html.j2").render(
      first=runs[0].name, runs=[run.name for run in runs[1:]], columns=comparing.COLUMNS, notes=notes,
      threshold=threshold,
      rows={run.name: [(comparing.row(cell), _TONES.get(cell.verdict, "")) for cell in cells if cell.run == run.name]
            for run in runs[1:]},
      regressions=sum(cell.verdict == comparing.REGRESSION for cell in cells),
      script=markupsafe.Markup(script), style=markupsafe.Markup((_HERE / "report.css").read_text(encoding="utf-8")),
      script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode())
  path = pathlib.Path(outdir) / "compare.html"
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(html, encoding="utf-8", errors="xmlcharrefreplace")
  return path
