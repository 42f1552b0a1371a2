"""A run of experiments.distill: the draft model it begins with, the loop, and the folder of the one that results."""
import dataclasses
import json
import pathlib

import jax

import specjax
from experiments.harness import training_curves
from experiments.harness import training_mesh
from experiments.harness import training_progress
from specjax.checkpoints import folder_writer
from specjax.checkpoints import vocabulary_map
from specjax.training import corpus
from specjax.training import distill
from specjax.training import loop
from specjax.training import losses
from specjax.training import texts
from specjax.training import trainers
from specjax.verifiers import point
from specjax.verifiers import rejection

LOSSES = tuple(losses.BY_NAME)


@dataclasses.dataclass(frozen=True)
class Job:
  """The flags of `experiments.distill`, which see."""
  target: str
  draft: str | None
  draft_layers: tuple[int, ...]
  corpora: tuple[str, ...]
  outdir: str
  epochs: float
  steps: int | None
  limit: int | None
  learning_rate: float
  batch_tokens: int
  max_tokens: int
  loss: str
  on_policy: float
  own_temperature: float
  temperature: float
  drafted: int
  evaluate_every: int
  seed: int

  def facts(self) -> dict:
    """As the run folder records them."""
    kept = {key: value for key, value in dataclasses.asdict(self).items() if key not in ("outdir", "evaluate_every")}
    return training_mesh.facts(kept) | {"draft_layers": list(self.draft_layers),
                                        "corpora": [pathlib.Path(name).name for name in self.corpora]}


def layers(names: list[str]) -> tuple[int, ...]:
  """Of --draft_layers. Raises ValueError for what is no list of layers in ascending order."""
  found = tuple(int(name) if name.strip().isdecimal() else -1 for name in names)
  if min(found, default=0) < 0 or list(found) != sorted(set(found)):
    raise ValueError(f"--draft_layers={','.join(names)}: it takes layers, each once and in order, such as 0,1,28,29")
  return found


def run(job: Job) -> tuple[dict, dict]:
  """Trains; held-out numbers before the first step, and the last row of metrics."""
  training_progress.check_folder(job.outdir, job.facts())
  recipe = distill.Recipe(loss=job.loss, on_policy=job.on_policy, own_temperature=job.own_temperature,
                          temperature=job.temperature, drafted=job.drafted)
  known = [corpus.facts(folder) for folder in job.corpora]
  places = training_mesh.places()
  target, tokenizer = training_mesh.target(job.target, whole_vocabulary=True)
  if job.max_tokens > target.max_context:
    raise ValueError(f"--max_tokens={job.max_tokens}: the target's context has {target.max_context} tokens")
  for folder, facts in zip(job.corpora, known):
    if facts["target"] != job.target:
      raise ValueError(f"{folder} was written by {facts['target']!r}, not by {job.target!r}: what is measured on "
                       "held-out answers would not be of this target")
  draft = _draft(job, training_mesh.beginning(target), tokenizer)
  folder_writer.require_written(draft.config)
  data = texts.Texts(folders=job.corpora, tokens=job.batch_tokens, max_tokens=job.max_tokens, limit=job.limit)
  if not data.held:
    raise ValueError(f"{', '.join(job.corpora)}: one in {data.held_out} sequences is held out, and these are too few; "
                     "write more")
  trainer = trainers.train_draft_model(target, draft, data, recipe, job.seed)
  folder = training_progress.open_folder(job.outdir, job.facts(), data)
  steps = training_mesh.steps(job.steps, job.epochs, data.epoch_steps())
  evaluate_text, prompts = trainers.held_out(trainer), training_progress.prompts(data, target)
  params = specjax.SamplingParams(temperature=job.temperature)
  verifier = rejection.Rejection() if job.temperature else point.Point()
  size = sum(leaf.size for leaf in jax.tree.leaves(draft))
  print(f"{data.training_tokens} tokens, {steps} steps, a draft model of {draft.config.layers} layers and "
        f"{size / 1e6:.1f}M weights", flush=True)

  def evaluate(step, weights):
    del step
    proposer = trainer.proposer(trainer.head(weights))
    return evaluate_text(weights) | training_progress.drafted(target, proposer, prompts, params, verifier)

  before = folder / "before.json"
  if not before.exists():
    numbers = evaluate(0, trainer.params)
    corpus.write_whole(before, lambda file: file.write(json.dumps(numbers, indent=1).encode()))
  schedule = loop.Schedule(steps=steps, learning_rate=job.learning_rate, accumulate=training_mesh.accumulate())
  weights = training_progress.train(folder, trainer, schedule, title="draft model", evaluate_every=job.evaluate_every,
                                    evaluate=evaluate, places=places)
  specjax.save(folder / "draft", trainer.head(weights), tokenizer)
  rows = loop.read_metrics(folder)
  training_curves.draw(rows, folder / "curves.png", "draft model")
  return json.loads(before.read_text()), rows[-1]


def _draft(job, target, tokenizer):
  """The draft model at the start. Raises ValueError for one of another vocabulary, or none."""
  model = target
  if job.draft:
    model, theirs = specjax.load(job.draft)
    vocabulary_map.require_same(tokenizer, theirs)
  if not job.draft_layers:
    return model
  try:
    return model.keep(job.draft_layers)
  except ValueError as error:
    raise ValueError(f"--draft_layers={','.join(map(str, job.draft_layers))}: {error}") from error
