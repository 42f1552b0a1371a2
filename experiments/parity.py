"""specjax beside Hugging Face Transformers: the same files, logits and greedy texts.

  python -m experiments.parity                                        # every family, beside stored values
  python -m experiments.parity --live --models=smollm2-135m,gemma3-270m  # beside the installed Transformers

Without --live nothing but specjax is needed: `tests/fixtures` holds a tiny random checkpoint of every family and what
Transformers computed from it. With it (`pip install -e .[peers]`), models are read by both, continue the first turns of
the bundled workload greedily, plain and with drafts by lookup, and logits of these texts are compared. Exit code 1 where
an error is over its bar, or a text differs elsewhere than at a near tie.
"""
import json
import pathlib
import sys

from absl import flags
import tqdm

from experiments import workloads
from experiments.harness import cli
from experiments.harness import parity
from experiments.harness import peers
from experiments.harness import settings
import specjax
from specjax.models import base

_LIVE = flags.DEFINE_bool("live", False, "Compare with the installed Transformers.")
_MODELS = flags.DEFINE_list("models", None, "Names, GGUF files or folders to compare live. Default: the tiny ones of "
                            "every family.")
_PROMPTS = flags.DEFINE_integer("prompts", 20, "Prompts of the bundled workload that are continued.", lower_bound=1)
_OUTDIR = flags.DEFINE_string("outdir", None, "Folder to write parity.json into.")


def main():
  settings.uses_only(settings.MAX_NEW_TOKENS)
  if not _LIVE.value and (_MODELS.value or not flags.FLAGS["prompts"].using_default_value):
    raise ValueError("--models and --prompts are of a comparison with the installed Transformers: add --live")
  known = parity.stored()
  rows = []
  for name in _MODELS.value or known:
    rows.append(_live(name, known) if _LIVE.value else parity.against_stored(name, *known[name]))
    print(rows[-1].line(), flush=True)
  worst = max(rows, key=lambda row: max(row.errors.values()))
  print(f"{sum(row.met for row in rows)} of {len(rows)} within {parity.BAR:g}; the greatest error is "
        f"{max(worst.errors.values()):.1e} ({worst.name})")
  if _OUTDIR.value:
    path = pathlib.Path(_OUTDIR.value) / "parity.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([{**vars(row), "met": row.met} for row in rows], indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
  if not all(row.met for row in rows):
    sys.exit(1)


def _live(name, known):
  """The row of one model beside the installed Transformers."""
  path = known[name][0] if name in known else specjax.checkpoints.resolve(name)
  peer = parity.Peer(*peers.load_model(path))
  target, tokenizer = specjax.load(str(path))
  if name in known:
    prompts = parity.prompts(known[name][1])
  else:
    requests = workloads.read_workload(workloads.BUNDLED)[::2][:_PROMPTS.value]
    prompts = [_prompt(tokenizer, request.turns[0])[-600:] for request in requests]
  proposers = {"plain": specjax.proposers.Plain(), "ngram": specjax.proposers.NGram()}
  new = min(settings.MAX_NEW_TOKENS.value, base.room(
      target, max(map(len, prompts)) if base.sound(target) is None else target.max_inputs))
  return parity.against_live(name if name in known else path.stem, peer, target, prompts, new, proposers,
                             lambda items: tqdm.tqdm(items, desc=f"{name}", unit="prompt", leave=False))


def _prompt(tokenizer, text):
  if tokenizer.has_chat_template:
    return tokenizer.chat([{"role": "user", "content": text}])
  return tokenizer.encode(text, add_special_tokens=True)


if __name__ == "__main__":
  cli.run(main)
