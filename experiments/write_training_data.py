"""Writes what draft heads are trained on: a target's own answers to prompts, or plain text cut to length.

  python -m experiments.write_training_data --prompts=a.jsonl,b.jsonl --corpus=data/smollm2 --temperatures=0,0.7

Prompt files are workloads (see `experiments.workloads`; the first turn of each request is taken). Rows of the category
plain_text become training text as they are, without an answer. With --own_prompts the target writes prompts itself, behind
the opening of a user's turn, and then answers them: text as it meets it, as much as is wanted (Magpie, arXiv 2406.08464).
A run that was stopped goes on where it was. Prompts that are measured must not be trained on: a path with a folder named
eval is refused.
"""
import json

from absl import flags
import tqdm

from experiments.harness import cli
from experiments.harness import settings
from experiments.harness import training_data

_PROMPTS = flags.DEFINE_list("prompts", None, "Workload files, separated by commas.")
_OWN = flags.DEFINE_integer("own_prompts", 0, "Prompts that the target writes itself and then answers.", lower_bound=0)
_CORPUS = flags.DEFINE_string("corpus", None, "Folder to write into.")
_TEMPERATURES = flags.DEFINE_list("temperatures", ["0"], "Answers are written at these in turn; 0 is greedy.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Prompts answered together.", lower_bound=1)
_FEATURES = flags.DEFINE_bool("keep_features", True, "Keep what training reads of the target while it answers, 4 "
                              "widths in float16 a token, so that no second pass computes it; answers lose their last "
                              "token.")
_MAX_PROMPT = flags.DEFINE_integer("max_prompt_tokens", 256, "Longer prompts are left out.", lower_bound=2)
_MAX_PROMPTS = flags.DEFINE_integer("max_prompts", None, "Prompts to take, at most, of the shuffled files.",
                                    lower_bound=1)


def main():
  settings.uses_only(settings.TARGET, settings.MAX_NEW_TOKENS, settings.SEED)
  if not _CORPUS.value or not (_PROMPTS.value or _OWN.value):
    raise ValueError("--corpus is needed, the folder to write into, and --prompts, files of them, or --own_prompts")
  job = training_data.Job(
      target=settings.TARGET.value, prompts=tuple(_PROMPTS.value or ()), own_prompts=_OWN.value,
      temperatures=training_data.temperatures(_TEMPERATURES.value), max_new_tokens=settings.MAX_NEW_TOKENS.value,
      max_prompt_tokens=_MAX_PROMPT.value,
      max_prompts=_MAX_PROMPTS.value, batch_size=_BATCH_SIZE.value, seed=settings.SEED.value,
      keep_features=_FEATURES.value)
  with tqdm.tqdm(desc="writing", unit="token", smoothing=0.05) as bar:
    found = training_data.write(job, _CORPUS.value, progress=bar)
  print(f"{_CORPUS.value}: {json.dumps(found)}")


if __name__ == "__main__":
  cli.run(main)
