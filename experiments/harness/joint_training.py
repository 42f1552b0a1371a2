"""A run of experiments.train_joint: heads first, then heads and target, and the folders of both."""
import dataclasses
import pathlib

import numpy as np

import specjax
from experiments.harness import training_curves
from experiments.harness import training_mesh
from experiments.harness import training_progress
from specjax.checkpoints import folder_writer
from specjax.checkpoints import heads
from specjax.training import corpus
from specjax.training import loop
from specjax.training import losses
from specjax.training import medusa
from specjax.training import medusa2
from specjax.training import texts
from specjax.training import trainers
from specjax.training import vocabulary

LOSSES, BACKBONE = tuple(losses.BY_NAME), medusa2.BACKBONE


@dataclasses.dataclass(frozen=True)
class Job:
  """The flags of `experiments.train_joint`, which see."""
  target: str
  corpora: tuple[str, ...]
  outdir: str
  steps: int
  heads_first: int
  limit: int | None
  learning_rate: float
  heads_rate: float
  heads_weight: float
  backbone: str
  batch_tokens: int
  max_tokens: int
  draft_vocab: int
  heads: int
  start: str | None
  loss: str
  evaluate_every: int
  seed: int

  def facts(self) -> dict:
    """As the run folder records them."""
    kept = {key: value for key, value in dataclasses.asdict(self).items() if key not in ("outdir", "evaluate_every")}
    return training_mesh.facts(kept) | {"corpora": [pathlib.Path(name).name for name in self.corpora]}


def run(job: Job) -> dict:
  """Trains; the last row of metrics."""
  training_progress.check_folder(job.outdir, job.facts())
  schedule = medusa2.Schedule(steps=job.steps, learning_rate=job.learning_rate, heads_first=job.heads_first,
                              heads_rate=job.heads_rate, accumulate=training_mesh.accumulate())
  recipe = medusa2.Recipe(heads_weight=job.heads_weight, backbone=job.backbone, loss=job.loss)
  known = [corpus.facts(folder) for folder in job.corpora]
  for folder, facts in zip(job.corpora, known):
    if facts["target"] != job.target:
      raise ValueError(f"{folder} was written by {facts['target']!r}, not by {job.target!r}: heads learn from their "
                       "own target")
  places = training_mesh.places()
  target, tokenizer = specjax.load(job.target)  # it is trained itself, and lies as `places` says
  folder_writer.require_written(target.config)
  if job.max_tokens > target.max_context:
    raise ValueError(f"--max_tokens={job.max_tokens}: the target's context has {target.max_context} tokens")
  data = texts.Texts(folders=job.corpora, tokens=job.batch_tokens, max_tokens=job.max_tokens, limit=job.limit)
  if not data.held:
    raise ValueError(f"{', '.join(job.corpora)}: one in {data.held_out} sequences is held out, and these are too few; "
                     "write more")
  start, ids, covered = _start(job, target, data)
  trainer = trainers.train_joint(target, start, data, ids, recipe, schedule, job.seed)
  folder = training_progress.open_folder(job.outdir, job.facts(), data)
  evaluate_text, prompts = trainers.held_out(trainer), training_progress.prompts(data, target)
  print(f"{data.training_tokens} tokens, {job.steps} steps, {job.heads_first} of them with heads alone, draft ids hold "
        f"{covered:.1%} of the tokens", flush=True)

  def evaluate(step, weights):
    del step
    joint = trainer.head(weights)
    return evaluate_text(weights) | training_progress.drafted(joint.target, trainer.proposer(joint), prompts)

  weights = training_progress.train(folder, trainer, schedule, title="Medusa-2", evaluate_every=job.evaluate_every,
                                    evaluate=evaluate, places=places)
  joint = trainer.head(weights)
  specjax.save(folder / "target", joint.target, tokenizer)
  heads.save_head(joint.heads, folder / "head")
  rows = loop.read_metrics(folder)
  training_curves.draw(rows, folder / "curves.png", "Medusa-2")
  return rows[-1]


def _start(job, target, data):
  """Heads at the start, their ids, and the share of the corpus that these hold."""
  total = target.config.num_tokens
  if not job.start:
    size = min(job.draft_vocab or total, total)
    ids, covered = vocabulary.frequent(data.answers(), size, total)
    return medusa.init(target, ids, job.heads), ids, covered
  start = heads.load_head(job.start, target=target)
  kind = heads.kind_of(start)
  if kind != "medusa":
    raise ValueError(f"--start_from={job.start} is a head of the kind {kind}, and Medusa's heads are trained here")
  if start.config.heads != job.heads:
    raise ValueError(f"--heads={job.heads}: the head of --start_from={job.start} has {start.config.heads}")
  if start.ids is None and start.config.draft_vocab != total:
    raise ValueError(f"--start_from={job.start} has logits of {start.config.draft_vocab} ids, which fill up the "
                     f"target's {total}: training goes on only from heads that name their ids")
  ids = np.arange(total) if start.ids is None else np.asarray(start.ids)
  return start, ids, vocabulary.frequent(data.answers(), len(ids), total, keep=tuple(ids.tolist()))[1]
