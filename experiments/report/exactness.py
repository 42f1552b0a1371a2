"""The page of `experiments.exactness`: one table of verifiers against draft rules, and all that stands behind it."""
import pathlib

import jinja2
import markupsafe

_HERE = pathlib.Path(__file__).parent


def write(path: pathlib.Path, result: dict, groups: list[dict]) -> None:
  """Writes the page.

  Args:
    path: of the page. result: what `exactness.json` holds.
    groups: of `harness.exactness.groups`.
  """
  environment = jinja2.Environment(loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True,
                                   lstrip_blocks=True, undefined=jinja2.StrictUndefined)
  verifiers = list(dict.fromkeys(group["verifier"] for group in groups))
  drafts = list(dict.fromkeys(group["draft"] for group in groups))
  html = environment.get_template("exactness.html.j2").render(
      result=result, verifiers=verifiers, drafts=drafts, cell=_matrix(groups), settings=_settings(result["cells"]),
      names=list(dict.fromkeys(line["processors"] for line in result["cells"])),
      lossless=[line for line in result["cells"] if line["lossless"]],
      best=_best(result["cells"]), style=markupsafe.Markup((_HERE / "report.css").read_text(encoding="utf-8")))
  path.write_text(html, encoding="utf-8")


def _matrix(groups):
  return {(group["verifier"], group["draft"]): group for group in groups}


def _settings(lines):
  """By (verifier, processors): the greatest error of lossless cells, the greatest total variation of lossy ones."""
  found = {}
  for line in lines:
    key = line["verifier"], line["processors"]
    value = line["max_error"] if line["lossless"] else line["total_variation"]
    found[key] = max(found.get(key, 0.0), value)
  return found


def _best(lines):
  """Cells whose optimum is known, without processors: what each rule reaches of the best possible."""
  found = {}
  for line in lines:
    if line["best_possible"] is not None and line["processors"] == "none" and line["lossless"]:
      entry = found.setdefault((line["tree"], line["draft"]), {"best": line["best_possible"], "rules": {}})
      entry["rules"][line["verifier"]] = line["expected_accepted"]
  return found
