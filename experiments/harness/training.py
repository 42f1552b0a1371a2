"""A training run of a head: features, draft vocabulary, the loop with its progress and curves, the head that results."""
import dataclasses
import pathlib

import numpy as np
import tqdm

from experiments.harness import model_card
from experiments.harness import training_curves
from experiments.harness import training_mesh
from experiments.harness import training_progress
from specjax.checkpoints import heads
from specjax.models import base as models
from specjax.training import batches
from specjax.training import corpus
from specjax.training import dflash
from specjax.training import dspark
from specjax.training import eagle
from specjax.training import eagle3
from specjax.training import features
from specjax.training import hydra
from specjax.training import loop
from specjax.training import losses
from specjax.training import medusa
from specjax.training import mtp
from specjax.training import peagle
from specjax.training import trainers
from specjax.training import vocabulary

LOSSES = (*losses.BY_NAME, losses.TEXT)
_FROM_TEXT = "eagle3", "mtp", "medusa", "hydra"  # whose loss may be that
# Which flags do not belong to all kinds.
HEADS = {"eagle3": ("passes",), "eagle": ("passes", "noise"), "mtp": ("passes", "pass_decay"), "medusa": ("heads",),
         "hydra": ("heads", "blocks", "prefix_attention"), "dflash": ("block", "head_layers", "causal"),
         "dspark": ("block", "head_layers", "markov_rank"), "peagle": ("depths", "head_layers")}
PASSES = {"eagle3": 4, "eagle": 1, "mtp": 3}


@dataclasses.dataclass(frozen=True)
class Job:
  """The flags of `experiments.train`, which see."""
  head: str
  target: str
  corpora: tuple[str, ...]
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
  blocks: int
  prefix_attention: bool
  block: int
  head_layers: int
  markov_rank: int
  depths: int
  causal: bool
  start: str | None
  noise: float
  pass_decay: float
  evaluate_every: int
  seed: int


def check_read(job: Job, given) -> None:
  """Raises ValueError for a flag of another kind of head, and for a run folder of another job."""
  for name in dict.fromkeys(name for names in HEADS.values() for name in names):
    if name not in HEADS[job.head] and not given[name].using_default_value:
      readers = " and ".join(f"--head={kind}" for kind, names in HEADS.items() if name in names)
      raise ValueError(f"--{name}={given[name].value} is an option of {readers}, and this is --head={job.head}")
  if job.start and not given["draft_vocab"].using_default_value:
    raise ValueError(f"--draft_vocab={job.draft_vocab}: the head of --start_from={job.start} has its ids; leave it out")
  if job.loss == losses.TEXT and job.head not in _FROM_TEXT:
    raise ValueError(f"--loss={job.loss} is for --head={' or '.join(_FROM_TEXT)}, and this is --head={job.head}")
  training_progress.check_folder(job.outdir, _facts(job))


def run(job: Job) -> dict:
  """Trains; the last row of metrics."""
  known = [{"name": pathlib.Path(folder).name, **corpus.facts(folder)} for folder in job.corpora]
  for folder, facts in zip(job.corpora, known):
    if facts["target"] != job.target:
      raise ValueError(f"{folder} was written by {facts['target']!r}, not by {job.target!r}: a head learns from its own "
                       "target")
  places = training_mesh.places()
  target, _ = training_mesh.target(job.target)
  if models.encodes(target) and job.head != "eagle3":
    raise ValueError(f"--head={job.head}: of a target with an encoder a head of the kind eagle3 is trained, which has a "
                     "vocabulary matrix of its own")
  models.attends(target, "training a head")
  start = _start(job, target)
  layers = getattr(start, "features", ()) or trainers.layers_of_eagle3(target.config.layers)
  with tqdm.tqdm(desc="features", unit="token") as bar:
    for name in job.corpora:
      features.compute(target, name, layers, job.max_tokens, progress=bar)
  data = batches.Data(folders=job.corpora, layers=layers, width=target.config.width, tokens=job.batch_tokens,
                      max_tokens=job.max_tokens, limit=job.limit)
  if not data.held:
    raise ValueError(f"{', '.join(job.corpora)}: one in {data.held_out} sequences is held out, and these are too few; "
                     "write more")
  trainer, covered = _trainer(job, training_mesh.beginning(target), data, start)
  folder = training_progress.open_folder(job.outdir, _facts(job), data)
  steps = training_mesh.steps(job.steps, job.epochs, data.epoch_steps())
  schedule = loop.Schedule(steps=steps, learning_rate=job.learning_rate, accumulate=training_mesh.accumulate())
  evaluate_text, prompts = trainers.held_out(trainer), training_progress.prompts(data, target)
  print(f"{data.training_tokens} tokens, {steps} steps, draft ids hold {covered:.1%} of the tokens", flush=True)

  def evaluate(step, params):
    del step
    return evaluate_text(params) | training_progress.drafted(target, trainer.proposer(trainer.head(params)), prompts)

  params = training_progress.train(folder, trainer, schedule, title=job.head, evaluate_every=job.evaluate_every,
                                   evaluate=evaluate, places=places)
  head = trainer.head(params)
  if job.head in ("medusa", "hydra") and data.held:
    ids = np.arange(target.config.num_tokens) if head.ids is None else np.asarray(head.ids)
    head = trainers.with_accuracy(head, data, target, ids)
  heads.save_head(head, folder / "head", dtype="bfloat16")
  rows = loop.read_metrics(folder)
  training_curves.draw(rows, folder / "curves.png", job.head)
  model_card.write(folder / "head", head=job.head, target=job.target, facts=_facts(job), corpora=known, rows=rows,
                   counts={"training_tokens": data.training_tokens, "held_out": data.held_out, "covered": covered,
                           "draft_vocab": head.config.draft_vocab, "prompts": len(prompts)},
                   size=sum(file.stat().st_size for file in (folder / "head").glob("*.safetensors")))
  return rows[-1]


def _trainer(job, target, data, start):
  """The trainer, and the share of the corpus that the draft ids hold."""
  total = target.config.num_tokens
  size = min(job.draft_vocab or total, total)
  keep = () if start is None else range(total) if start.ids is None else np.asarray(start.ids).tolist()
  ids, covered = vocabulary.frequent(data.answers(), len(keep) or size, total, keep=tuple(keep))
  common = dict(loss=job.loss, answers_only=job.answers_only)
  if job.head == "eagle3":
    return trainers.train_eagle3(target, data, ids, eagle3.Recipe(passes=job.passes, **common), job.seed, start), covered
  if job.head == "eagle":
    recipe = eagle.Recipe(passes=job.passes, noise=job.noise, **common)
    return trainers.train_eagle(target, data, ids, recipe, job.seed, start), covered
  if job.head == "mtp":
    recipe = mtp.Recipe(passes=job.passes, decay=job.pass_decay, **common)
    return trainers.train_mtp(target, data, ids, recipe, job.seed, start), covered
  if job.head == "medusa":
    return trainers.train_medusa(target, data, ids, medusa.Recipe(**common), job.seed, heads=job.heads, start=start), covered
  if job.head == "hydra":
    return trainers.train_hydra(target, data, ids, hydra.Recipe(**common), job.seed, heads=job.heads, blocks=job.blocks,
                                prefix=job.prefix_attention, start=start), covered
  if start is None:
    mask = vocabulary.unused(job.corpora, total)
  else:
    mask = start.mask_id if job.head == "peagle" else start.config.mask_id
  if job.head == "peagle":
    return trainers.train_peagle(target, data, ids, peagle.Recipe(**common), job.seed, layers=job.head_layers,
                                 depths=job.depths, mask_id=mask, start=start), covered
  if job.head == "dspark":
    return trainers.train_dspark(target, data, ids, dspark.Recipe(**common), job.seed, layers=job.head_layers,
                                 block=job.block, mask_id=mask, rank=job.markov_rank, start=start), covered
  return trainers.train_dflash(target, data, ids, dflash.Recipe(**common), job.seed, layers=job.head_layers,
                               block=job.block, mask_id=mask, causal=job.causal, start=start), covered


def _start(job, target):
  """The head to go on from, None without one. Raises ValueError for one of another kind or of other sizes."""
  if not job.start:
    return None
  head = heads.load_head(job.start, target=target)
  kind = heads.kind_of(head)
  if kind != job.head:
    raise ValueError(f"--start_from={job.start} is a head of the kind {kind}, and this is --head={job.head}")
  own = {"medusa": lambda: {"heads": head.config.heads}, "eagle3": lambda: {}, "eagle": lambda: {}, "mtp": lambda: {},
         "hydra": lambda: {"heads": head.config.heads, "blocks": head.config.blocks,
                           "prefix_attention": head.prefix is not None},
         "dflash": lambda: {"block": head.config.block, "head_layers": head.config.layers,
                            "causal": head.config.causal},
         "dspark": lambda: {"block": head.config.block, "head_layers": head.config.layers, "markov_rank": head.rank},
         "peagle": lambda: {"depths": head.depths, "head_layers": head.depth}}[kind]()
  for name, size in own.items():
    if getattr(job, name) != size:
      raise ValueError(f"--{name}={getattr(job, name)}: the head of --start_from={job.start} has {size}")
  if head.ids is None and head.config.draft_vocab != target.config.num_tokens:
    raise ValueError(f"--start_from={job.start} has logits of {head.config.draft_vocab} ids, which fill up the "
                     f"target's {target.config.num_tokens}: training goes on only from heads that name their ids")
  return head


def _facts(job):
  # Options of other kinds say nothing of the run, which goes on where it was when such a kind is new.
  others = {name for names in HEADS.values() for name in names} - set(HEADS[job.head])
  kept = {key: value for key, value in dataclasses.asdict(job).items() if key not in ("outdir", "evaluate_every", *others)}
  return training_mesh.facts(kept) | {"corpora": [pathlib.Path(name).name for name in job.corpora]}
