"""Builds the datastore of the retrieval method: the tokens of a corpus and their suffix array.

  python -m experiments.build_datastore --corpus=a.jsonl,b.txt --target=smollm2-135m --out=datastore.npz

A .jsonl file gives one text a row, the field "prompt", "text", "content", "output" or "response" (all that a row has,
in this order); any other file is one text. What is measured must not be in the datastore: a path with a folder named
eval is refused.
"""
import json
import pathlib

from absl import flags
import tqdm

from experiments.harness import cli
from experiments.harness import settings
from experiments import workloads
from specjax import checkpoints
from specjax.proposers import retrieval

_CORPUS = flags.DEFINE_list("corpus", None, "Files to build it from, separated by commas.")
_OUT = flags.DEFINE_string("out", "datastore.npz", "The file to write.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 1_000_000, "Tokens of the datastore, at most; the rest of the corpus "
                                   "is left out.", lower_bound=2, upper_bound=retrieval.MOST_TOKENS)
_FIELDS = ("prompt", "text", "content", "output", "response")


def main():
  settings.uses_only(settings.TARGET)
  paths = [pathlib.Path(name) for name in _CORPUS.value or ()]
  if not paths:
    raise ValueError("--corpus is empty; name the files to build the datastore from, separated by commas")
  for path in paths:
    if "eval" in path.resolve().parts[:-1] or path.resolve() == (pathlib.Path(workloads.__file__).with_name("bundled.jsonl")):
      raise ValueError(f"--corpus: {path} is the bundled workload or lies in a folder named eval: a datastore that holds what is measured makes "
                       "its numbers worthless; use training data")
  texts = [text for path in paths for text in _texts(path)]
  tokenizer = checkpoints.load(settings.TARGET.value)[2]
  tokens, kept, cut, room = [], 0, 0, _MAX_TOKENS.value
  for text in tqdm.tqdm(texts, desc="tokenizing", unit="text"):
    if room < 2:
      break
    ids = tokenizer.encode(text)
    cut += max(len(ids) - (room - 1), 0)
    ids = ids[:room - 1]
    tokens.append(ids)
    kept, room = kept + 1, room - len(ids) - 1
  corpus = retrieval.join(tokens)
  array = retrieval.suffix_array(corpus, progress=lambda turns: tqdm.tqdm(turns, desc="sorting", unit="turn"))
  retrieval.save(_OUT.value, corpus, array, tokenizer)
  print(f"{_OUT.value}: {len(corpus)} tokens of {kept} texts" + (
      f"; --max_tokens={_MAX_TOKENS.value} cut {cut} tokens off the last text and left {len(texts) - kept} texts out"
      if cut or kept < len(texts) else ""))


def _texts(path):
  """The texts of a file; raises ValueError for a row without one."""
  content = path.read_text(encoding="utf-8")
  if path.suffix != ".jsonl":
    return [content]
  found = []
  for number, line in enumerate(content.splitlines(), 1):
    try:
      row = json.loads(line) if line.strip() else {"text": ""}
      parts = [row[field] for field in _FIELDS if isinstance(row.get(field), str)]
    except (ValueError, AttributeError) as error:
      raise ValueError(f"{path}, line {number}: is no JSON object ({error})") from error
    if not parts:
      raise ValueError(f"{path}, line {number}: has none of the fields {', '.join(_FIELDS)}")
    found.append("\n".join(parts))
  return found


if __name__ == "__main__":
  cli.run(main)
