"""What training runs share: their folder, their loop under a progress bar with curves, and drafts that are measured."""
import functools
import json
import pathlib

import numpy as np
import tqdm

import specjax
from experiments.harness import training_curves
from specjax.training import corpus
from specjax.training import loop
from specjax.verifiers import point

_PROMPTS, _NEW_TOKENS = 12, 64  # held-out prompts that are drafted for, and output tokens of each


def check_folder(outdir, facts: dict) -> None:
  """Raises ValueError for a run folder of other `facts`: a run goes on with the flags that began it."""
  path = pathlib.Path(outdir) / "config.json"
  if path.exists():
    known = json.loads(path.read_text())
    wrong = sorted(key for key in facts if known.get(key) != facts[key])
    if wrong:
      raise ValueError(f"{outdir} holds a run with {wrong[0]}={known.get(wrong[0])!r}, not {facts[wrong[0]]!r}: go "
                       "on with the flags that began it, or choose another folder")


def open_folder(outdir, facts: dict, data) -> pathlib.Path:
  """The run folder, with the facts of the run. Raises ValueError where a run began with other data."""
  folder = pathlib.Path(outdir)
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / "config.json"
  facts = facts | {"training_tokens": data.training_tokens, "corpus_tokens": data.corpus_tokens}
  known = json.loads(path.read_text()) if path.exists() else facts
  if known.get("corpus_tokens") != facts["corpus_tokens"]:  # draft ids and what is held out follow from all of them
    raise ValueError(f"{folder} holds a run that began with {known.get('corpus_tokens')} tokens of text, and the "
                     f"corpus has {facts['corpus_tokens']} now: choose another folder")
  corpus.write_whole(path, lambda file: file.write(json.dumps(facts, indent=1).encode()))
  return folder


def train(folder, trainer, schedule: loop.Schedule, *, title: str, evaluate_every: int, evaluate, places=None):
  """Runs the loop of a `trainers.Trainer` and draws its curves now and then; the trained weights. `places` as in
  `loop.run`."""
  with tqdm.tqdm(total=schedule.steps, desc=f"training {title}", unit="step") as bar:
    def report(row):
      if not bar.n:
        bar.initial = bar.n = row["step"]  # where a run goes on
      shown = {"loss": f"{row['loss']:.3f}", **{f"acc{i}": f"{row[f'accuracy_{i}']:.2f}" for i in range(3)
                                                if f"accuracy_{i}" in row}}
      if "held_out/tokens_per_step" in row:
        bar.write(f"step {row['step'] + 1}: held-out text {row['held_out/expected_tokens']:.3f} expected, prompts "
                  f"{row['held_out/tokens_per_step']:.3f} tokens a step")
        if row["step"] + 1 < schedule.steps:  # drawn once more at the end
          training_curves.draw(loop.read_metrics(folder), folder / "curves.png", title)
      bar.set_postfix(shown)
      bar.update()

    return loop.run(folder, trainer.params, trainer.loss, trainer.batch, schedule, arguments=trainer.arguments,
                    prepare=trainer.prepare, evaluate_every=evaluate_every, evaluate=evaluate, report=report, places=places)


def drafted(target, proposer, prompts, params=None, verifier=point.Point()) -> dict:
  """The tokens of a step that a proposer makes behind some prompts."""
  counted = [specjax.generate(target, proposer, [prompt], params, max_new_tokens=_NEW_TOKENS, verifier=verifier)
             for prompt in prompts]
  total = lambda name: sum(int(np.sum(getattr(result.counters, name))) for result in counted)
  return {"tokens_per_step": total("output_tokens") / max(total("steps"), 1)}


def prompts(data, target) -> list[list[int]]:
  """What held-out sequences begin with or answer, evenly spaced: the prompt, of plain text one half, as long as an
  answer fits."""
  read, found, most = functools.cache(corpus.read), [], target.max_context - _NEW_TOKENS
  for folder, index, which, length in data.held[::max(len(data.held) // _PROMPTS, 1)][:_PROMPTS]:
    sequences = read(folder, index)
    begun = sequences.prompt(which) if sequences.starts[which] else sequences[which][:length // 2]
    found.append(begun[:most].tolist())
  return found
