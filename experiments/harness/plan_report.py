"""The tables of a plan on paper, as text for a terminal, as Markdown and as what goes into plan.json."""
from collections.abc import Sequence
import dataclasses
import functools
import json
import pathlib

from experiments.harness import text_table
from specjax import decode
from specjax.theory import collectives
from specjax.theory import plan as plan_lib

_BYTES = {"weights": "weights", "draft_weights": "draft weights", "cache": "cache", "draft_cache": "draft cache",
          "in_flight": "in flight", "activations": "activations", "total": "total"}
_LIMIT = 4096  # rows, beyond which no crossing is looked for


@dataclasses.dataclass(frozen=True)
class Report:
  """A plan of one model.

  Attributes:
    name: of the model. deployment, draft: what is planned.
    batches: B of each row of the tables. length: S. acceptances: of a position, to give speedups for.
  """
  name: str
  deployment: plan_lib.Deployment
  draft: plan_lib.Draft
  batches: Sequence[int]
  length: int
  acceptances: Sequence[float]

  @property
  def width(self) -> int:
    """Nodes of the step that verifies a draft: the least of the compiled widths that holds it."""
    return decode.widths_for(self.draft.nodes + 1)[-1]

  @functools.cached_property
  def results(self) -> dict:
    """Every number, by what it is; times are seconds."""
    d, rows = self.deployment, []
    for batch in self.batches:
      found = d.speculation(self.draft, batch, self.length, self.width)
      size = d.device_bytes(batch, self.length, self.width, self.draft)
      sent = collectives.collectives(d.model, d.layout, batch, self.width, itemsize=d.itemsize)
      rows.append({
          "batch_size": batch, "device_bytes": size, "fits": d.fits(size["total"]),
          "plain": dataclasses.asdict(found.plain), "verify": dataclasses.asdict(found.verify),
          "draft": dataclasses.asdict(found.draft), "tokens_needed": found.tokens_needed,
          "acceptance_needed": found.acceptance_needed,
          "speedups": {str(a): found.speedup(a) for a in self.acceptances},
          "collectives": [dataclasses.asdict(each) | {"bytes": each.bytes} for each in sent],
          "step_by_width": {str(w): d.step(batch, self.length, w).total for w in decode.WIDTHS}})
    loses = {str(a): d.break_even_batch(self.draft, self.length, a, limit=_LIMIT, width=self.width)
             for a in self.acceptances}
    return {"schema": 1, "model": self.name, "hardware": d.chips.name, "mesh": d.layout.mesh.text,
            "attention": d.layout.attention, "itemsize": d.itemsize, "memory_efficiency": d.memory_efficiency,
            "flops_efficiency": d.flops_efficiency, "length": self.length, "width": self.width,
            "draft": {"depth": self.draft.depth, "nodes": self.draft.nodes, "divided": self.draft.divided},
            "batches": rows, "loses_from_batch": loses, "notes": self.notes}

  @property
  def heading(self) -> str:
    """What is planned, in a line."""
    d = self.deployment
    return (f"{self.name} on {d.chips.name} ({d.chips.devices} x {d.chips.hardware.name}, "
            f"{'x'.join(map(str, d.chips.shape))}), mesh {d.layout.mesh.text}, {8 * d.itemsize}-bit weights and cache, "
            f"{self.length} tokens a row")

  @property
  def notes(self) -> list[str]:
    """What must be known to read the tables."""
    d, c, hardware = self.deployment, self.deployment.model, self.deployment.chips.hardware
    said = [f"Least times, from published peaks of a chip, without launch costs. {hardware.source}.",
            f"It fits if a tenth of a chip's {hardware.memory_bytes / 1e9:.0f} GB is left; prefill is not in it.",
            "Batches are rows of all devices together."]
    if d.memory_efficiency < 1 or d.flops_efficiency < 1:
      said.append(f"Taken to be reached: {d.memory_efficiency:.0%} of the bandwidth, {d.flops_efficiency:.0%} of the "
                  "arithmetic.")
    if d.layout.query_ways > c.kv_heads:
      said.append(f"{c.kv_heads} key/value heads on {d.layout.query_ways} devices: each is kept by "
                  f"{d.layout.query_ways // c.kv_heads}. --attention=whole plans for all heads on every device.")
    if c.moe is not None:
      said.append("Tokens are taken to choose experts at random; real neighbours share some, so that less is read.")
    return said

  def tables(self) -> list[text_table.Table]:
    """Of the results."""
    rows, width = self.results["batches"], self.width
    first = [str(r["batch_size"]) for r in rows]
    chosen = [str(a) for a in self.acceptances]
    steps = [(batch, w, t) for batch, r in zip(first, rows) for w, t in ((1, r["plain"]), (width, r["verify"]))]
    found = [
        text_table.Table("Bytes on a device, GB", ("batch", *_BYTES.values(), "fits"),
              [(batch, *(f"{r['device_bytes'][name] / 1e9:.2f}" for name in _BYTES), "yes" if r["fits"] else "no")
               for batch, r in zip(first, rows)]),
        text_table.Table("A step, ms", ("batch", "width", "memory", "arithmetic", "collectives", "step", "collectives' share"),
              [(batch, str(w), _ms(t["memory"]), _ms(t["arithmetic"]), _ms(t["collectives"]), _ms(t["total"]),
                f"{t['collectives'] / t['total']:.0%}") for batch, w, t in steps]),
        text_table.Table("A step by its width, ms", ("batch", *(f"width {w}" for w in decode.WIDTHS)),
              [(batch, *map(_ms, r["step_by_width"].values())) for batch, r in zip(first, rows)]),
        text_table.Table(f"Drafts of {self.draft.nodes} tokens, {self.draft.depth} deep, in steps of width {width}",
              ("batch", "plain ms", "verify ms", "draft ms", "tokens needed", "acceptance needed",
               *(f"speedup at {a}" for a in chosen)),
              [(batch, *(_ms(r[part]["total"]) for part in ("plain", "verify", "draft")), f"{r['tokens_needed']:.2f}",
                "none" if r["acceptance_needed"] is None else f"{r['acceptance_needed']:.2f}",
                *(f"{r['speedups'][a]:.2f}" for a in chosen)) for batch, r in zip(first, rows)]),
        text_table.Table("Drafting no longer pays, whether or not it fits", ("acceptance", "from batch"),
              [(acceptance, f"above {_LIMIT}" if at is None else str(at))
               for acceptance, at in self.results["loses_from_batch"].items()]),
        text_table.Table(f"Collectives of a step of width {width}, batch {first[-1]}",
              ("of", "kind", "over", "count", "bytes each", "bytes"),
              [(e["what"], e["kind"], "x".join(e["axes"]), str(e["count"]), f"{e['payload']:,}", f"{e['bytes']:,}")
               for e in rows[-1]["collectives"]])]
    return [table for table in found if table.rows]

  def text(self) -> str:
    """For a terminal."""
    return "\n\n".join([self.heading, *(table.text() for table in self.tables()), "\n".join(self.notes)])

  def write(self, folder: pathlib.Path) -> None:
    """Writes plan.json and plan.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(self.results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    parts = [f"**{self.heading}**", *(table.markdown() for table in self.tables()), "\n".join(self.notes)]
    (folder / "plan.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _ms(seconds):
  return f"{1e3 * seconds:.2f}"
