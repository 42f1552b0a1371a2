"""Rows of .jsonl files as what a model is trained on from nothing: texts for a tokenizer, documents, pairs, pieces.

A row has a `prompt` or `turns`, and maybe a `reference`, the answer to it. Prompts are given as they stand, as the
experiments give them to a model: their own wording says what is asked, in the place of T5's prefixes.
"""
import dataclasses
import json
import pathlib
import zlib

from experiments import workloads
from specjax.checkpoints import new_tokenizer
from specjax.training import packed
from specjax.training import pairs

_HELD_OUT, _LEAST = 50, 8  # one prompt in so many is held out; pieces of fewer tokens are left out


@dataclasses.dataclass(frozen=True)
class Row:
  """One row: `reference` is None where there is none."""
  prompt: str
  reference: str | None

  @property
  def held(self) -> bool:
    """Whether it is for evaluation only, which follows from its prompt."""
    return zlib.crc32(self.prompt.encode()) % _HELD_OUT == 0


def read(paths) -> list[Row]:
  """Rows of all files. Raises ValueError for what is measured, and for a row without text."""
  bundled = pathlib.Path(workloads.__file__).with_name("bundled.jsonl")
  rows = []
  for path in map(pathlib.Path, paths):
    if "eval" in path.resolve().parts[:-1] or path.resolve() == bundled:
      raise ValueError(f"--data: {path} is the bundled workload or lies in a folder named eval: a model that was "
                       "trained on what is measured makes its numbers worthless; use training data")
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
      if line.strip():
        rows.append(_row(line, f"{path}, line {number}"))
  if not rows:
    raise ValueError("--data: the files hold no rows")
  return rows


def _row(line, place):
  try:
    found = json.loads(line)
    text = "\n".join(found["turns"]) if "turns" in found else found["prompt"]
    if not isinstance(text, str) or not text.strip() or not isinstance(found.get("reference", ""), str):
      raise ValueError("no text")
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f"{place}: is no row with a prompt or turns, and a text as reference if any ({error})") from error
  return Row(text, found.get("reference") or None)


def texts(rows: list[Row]):
  """What a tokenizer learns from; held-out rows are not in it."""
  for row in rows:
    if not row.held:
      yield row.prompt
      if row.reference:
        yield row.reference


def documents(rows: list[Row], tokenizer, *, size: int, tokens: int) -> packed.RowData:
  """For a decoder: prompts, with the reference behind a blank line where there is one."""
  ids = lambda held: [tokenizer.encode("\n\n".join(filter(None, (row.prompt, row.reference)))) for row in rows
                      if row.held == held]
  return packed.RowData(documents=ids(False), held=ids(True), eos=tokenizer.eos_ids[0], size=size, tokens=tokens)


def examples(rows: list[Row], tokenizer, *, span_share: float, size: int, tokens: int) -> pairs.PairData:
  """For an encoder-decoder: rows with a reference are pairs, the prompts of others are cut into pieces of `size`."""
  def some(held):
    chosen = [row for row in rows if row.held == held]
    plain = [tokenizer.encode(row.prompt) for row in chosen if row.reference is None]
    pieces = [ids[at:at + size] for ids in plain for at in range(0, len(ids), size)]
    return pairs.Examples(pairs=[(tokenizer.encode(row.prompt), tokenizer.encode(row.reference)) for row in chosen
                                 if row.reference is not None],
                          pieces=[ids for ids in pieces if len(ids) >= _LEAST])
  return pairs.PairData(examples=some(False), held=some(True), span_share=span_share, eos=tokenizer.eos_ids[0],
                        sentinels=new_tokenizer.sentinels(tokenizer), tokens=tokens, max_tokens=size)
