"""A training run of a head: features, draft vocabulary, the loop with its progress and curves, and the head that results."""
import dataclasses
import json
import pathlib

import numpy as np
import tqdm

import specjax
from experiments.harness import training_curves
from specjax.checkpoints import heads
from specjax.training import batches
from specjax.training import corpus
from specjax.training import dflash
from specjax.training import eagle3
from specjax.training import features
from specjax.training import loop
from specjax.training import losses
from specjax.training import medusa
from specjax.training import trainers
from specjax.training import vocabulary

LOSSES = tuple(losses.BY_NAME)
# Which flags belong to one kind alone, and the layout that its heads are written in.
HEADS = {"eagle3": ("passes",), "medusa": ("heads",), "dflash": ("block", "head_layers")}
_LAYOUTS = {"eagle3": "safeailab", "medusa": "medusa", "dflash": "dflash"}
_PROMPTS, _NEW_TOKENS = 12, 64  # held-out prompts that are drafted for, and output tokens of each


@dataclasses.dataclass(frozen=True)
class Job:
  """The flags of `experiments.train`, which see."""
  head: str
  target: str
  corpus: str
  outdir: str
  epochs: float
  steps: int | None
  limit: int | None
  learning_rate: float
  batch_tokens: int
  max_tokens: int
  draft_vocab: int
  loss: str
  answers_only: bool
  passes: int
  heads: int
  block: int
  head_layers: int
  start: str | None
  evaluate_every: int
  seed: int


def check_read(job: Job, given) -> None:
  """Raises ValueError for a flag of another kind of head, and for a run folder of another job."""
  for kind, names in HEADS.items():
    for name in names:
      if kind != job.head and not given[name].using_default_value:
        raise ValueError(f"--{name}={given[name].value} is an option of --head={kind}, and this is --head={job.head}")
  path = pathlib.Path(job.outdir) / "config.json"
  if path.exists():
    known, wanted = json.loads(path.read_text()), _facts(job)
    wrong = sorted(key for key in wanted if known.get(key) != wanted[key])
    if wrong:
      raise ValueError(f"{job.outdir} holds a run with {wrong[0]}={known.get(wrong[0])!r}, not {wanted[wrong[0]]!r}: go on "
                       "with the flags that began it, or choose another folder")


def run(job: Job) -> dict:
  """Trains; the last row of metrics."""
  known = corpus.facts(job.corpus)
  if known["target"] != job.target:
    raise ValueError(f"{job.corpus} was written by {known['target']!r}, not by {job.target!r}: a head learns from its own "
                     "target")
  folder = pathlib.Path(job.outdir)
  folder.mkdir(parents=True, exist_ok=True)
  corpus.write_whole(folder / "config.json", lambda file: file.write(json.dumps(_facts(job), indent=1).encode()))
  target, _ = specjax.load(job.target)
  layers = trainers.layers_of_eagle3(target.config.layers)
  with tqdm.tqdm(desc="features", unit="token") as bar:
    features.compute(target, job.corpus, layers, job.max_tokens, progress=bar)
  data = batches.Data(folder=job.corpus, layers=layers, width=target.config.width, tokens=job.batch_tokens,
                      max_tokens=job.max_tokens, limit=job.limit)
  start = heads.load_head(job.start, target=target) if job.start else None
  trainer, covered = _trainer(job, target, data, start)
  steps = job.steps or max(round(job.epochs * data.epoch_steps()), 1)
  schedule = loop.Schedule(steps=steps, learning_rate=job.learning_rate)
  evaluate_text, prompts = trainers.held_out(trainer), _prompts(data)
  print(f"{data.training_tokens} tokens, {steps} steps, draft ids hold {covered:.1%} of the tokens", flush=True)

  def evaluate(step, params):
    del step
    proposer = trainer.proposer(trainer.head(params))
    counted = [specjax.generate(target, proposer, [prompt], max_new_tokens=_NEW_TOKENS) for prompt in prompts]
    tokens, passes = (sum(int(np.sum(getattr(r.counters, name))) for r in counted) for name in ("output_tokens", "steps"))
    return evaluate_text(params) | {"tokens_per_step": tokens / max(passes, 1)}

  with tqdm.tqdm(total=steps, desc=f"training {job.head}", unit="step", initial=len(loop.read_metrics(folder))) as bar:
    def report(row):
      shown = {"loss": f"{row['loss']:.3f}", **{f"acc{i}": f"{row[f'accuracy_{i}']:.2f}" for i in range(3)
                                                if f"accuracy_{i}" in row}}
      if "held_out/tokens_per_step" in row:
        bar.write(f"step {row['step'] + 1}: held-out text {row['held_out/expected_tokens']:.3f} expected, prompts "
                  f"{row['held_out/tokens_per_step']:.3f} tokens a step")
        training_curves.draw(loop.read_metrics(folder), folder / "curves.png", job.head)
      bar.set_postfix(shown)
      bar.update()

    params = loop.run(folder, trainer.params, trainer.loss, trainer.batch, schedule, arguments=trainer.arguments,
                      evaluate_every=job.evaluate_every, evaluate=evaluate, report=report)
  heads.save_head(trainer.head(params), folder / "head", dialect=_LAYOUTS[job.head], dtype="bfloat16")
  rows = loop.read_metrics(folder)
  training_curves.draw(rows, folder / "curves.png", job.head)
  return rows[-1]


def _trainer(job, target, data, start):
  """The trainer, and the share of the corpus that the draft ids hold."""
  total = target.config.num_tokens
  size = min(job.draft_vocab or total, total)
  ids, covered = vocabulary.frequent(job.corpus, size, total)
  if start is not None and start.ids is not None:
    ids = np.asarray(start.ids)
  common = dict(loss=job.loss, answers_only=job.answers_only)
  if job.head == "eagle3":
    return trainers.train_eagle3(target, data, ids, eagle3.Recipe(passes=job.passes, **common), job.seed, start), covered
  if job.head == "medusa":
    return trainers.train_medusa(target, data, ids, medusa.Recipe(**common), job.seed, heads=job.heads, start=start), covered
  return trainers.train_dflash(target, data, ids, dflash.Recipe(**common), job.seed, layers=job.head_layers,
                               block=job.block, mask_id=vocabulary.unused(job.corpus, total), start=start), covered


def _prompts(data):
  """Prompts of held-out sequences, evenly spaced."""
  places = [place for place in data.held if corpus.read(data.folder, place[0]).starts[place[1]] > 1]
  chosen = places[::max(len(places) // _PROMPTS, 1)][:_PROMPTS]
  found = []
  for index, which, _ in chosen:
    sequences = corpus.read(data.folder, index)
    found.append(sequences[which][:sequences.starts[which]].tolist())
  return found


def _facts(job):
  return {key: value for key, value in dataclasses.asdict(job).items() if key not in ("outdir", "evaluate_every")}
