"""A training run of a head: features, draft vocabulary, the loop with its progress and curves, the head that results."""
import dataclasses
import functools
import json
import pathlib

import numpy as np
import tqdm

import specjax
from experiments.harness import model_card
from experiments.harness import training_curves
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
from specjax.training import trainers
from specjax.training import vocabulary

LOSSES = tuple(losses.BY_NAME)
# Which flags do not belong to all kinds.
HEADS = {"eagle3": ("passes",), "eagle": ("passes", "noise"), "medusa": ("heads",),
         "hydra": ("heads", "blocks", "prefix_attention"), "dflash": ("block", "head_layers"),
         "dspark": ("block", "head_layers", "markov_rank")}
PASSES = {"eagle3": 4, "eagle": 1}
_PROMPTS, _NEW_TOKENS = 12, 64  # held-out prompts that are drafted for, and output tokens of each


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
  start: str | None
  noise: float
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
  path = pathlib.Path(job.outdir) / "config.json"
  if path.exists():
    known, wanted = json.loads(path.read_text()), _facts(job)
    wrong = sorted(key for key in wanted if known.get(key) != wanted[key])
    if wrong:
      raise ValueError(f"{job.outdir} holds a run with {wrong[0]}={known.get(wrong[0])!r}, not {wanted[wrong[0]]!r}: go "
                       "on with the flags that began it, or choose another folder")


def run(job: Job) -> dict:
  """Trains; the last row of metrics."""
  known = [{"name": pathlib.Path(folder).name, **corpus.facts(folder)} for folder in job.corpora]
  for folder, facts in zip(job.corpora, known):
    if facts["target"] != job.target:
      raise ValueError(f"{folder} was written by {facts['target']!r}, not by {job.target!r}: a head learns from its own "
                       "target")
  target, _ = specjax.load(job.target)
  models.decoder_only(target, "training a head")
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
  trainer, covered = _trainer(job, target, data, start)
  folder = _folder(job, data)
  steps = job.steps or max(round(job.epochs * data.epoch_steps()), 1)
  schedule = loop.Schedule(steps=steps, learning_rate=job.learning_rate)
  evaluate_text, prompts = trainers.held_out(trainer), _prompts(data, target.max_context - _NEW_TOKENS)
  print(f"{data.training_tokens} tokens, {steps} steps, draft ids hold {covered:.1%} of the tokens", flush=True)

  def evaluate(step, params):
    del step
    proposer = trainer.proposer(trainer.head(params))
    counted = [specjax.generate(target, proposer, [prompt], max_new_tokens=_NEW_TOKENS) for prompt in prompts]
    total = lambda name: sum(int(np.sum(getattr(result.counters, name))) for result in counted)
    return evaluate_text(params) | {"tokens_per_step": total("output_tokens") / max(total("steps"), 1)}

  with tqdm.tqdm(total=steps, desc=f"training {job.head}", unit="step") as bar:
    def report(row):
      if not bar.n:
        bar.initial = bar.n = row["step"]  # where a run goes on
      shown = {"loss": f"{row['loss']:.3f}", **{f"acc{i}": f"{row[f'accuracy_{i}']:.2f}" for i in range(3)
                                                if f"accuracy_{i}" in row}}
      if "held_out/tokens_per_step" in row:
        bar.write(f"step {row['step'] + 1}: held-out text {row['held_out/expected_tokens']:.3f} expected, prompts "
                  f"{row['held_out/tokens_per_step']:.3f} tokens a step")
        if row["step"] + 1 < steps:  # drawn once more at the end
          training_curves.draw(loop.read_metrics(folder), folder / "curves.png", job.head)
      bar.set_postfix(shown)
      bar.update()

    params = loop.run(folder, trainer.params, trainer.loss, trainer.batch, schedule, arguments=trainer.arguments,
                      evaluate_every=job.evaluate_every, evaluate=evaluate, report=report)
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
  if job.head == "medusa":
    return trainers.train_medusa(target, data, ids, medusa.Recipe(**common), job.seed, heads=job.heads, start=start), covered
  if job.head == "hydra":
    return trainers.train_hydra(target, data, ids, hydra.Recipe(**common), job.seed, heads=job.heads, blocks=job.blocks,
                                prefix=job.prefix_attention, start=start), covered
  mask = vocabulary.unused(job.corpora, total) if start is None else start.config.mask_id
  if job.head == "dspark":
    return trainers.train_dspark(target, data, ids, dspark.Recipe(**common), job.seed, layers=job.head_layers,
                                 block=job.block, mask_id=mask, rank=job.markov_rank, start=start), covered
  return trainers.train_dflash(target, data, ids, dflash.Recipe(**common), job.seed, layers=job.head_layers,
                               block=job.block, mask_id=mask, start=start), covered


def _start(job, target):
  """The head to go on from, None without one. Raises ValueError for one of another kind or of other sizes."""
  if not job.start:
    return None
  head = heads.load_head(job.start, target=target)
  kind = heads.kind_of(head)
  if kind != job.head:
    raise ValueError(f"--start_from={job.start} is a head of the kind {kind}, and this is --head={job.head}")
  own = {"medusa": lambda: {"heads": head.config.heads}, "eagle3": lambda: {}, "eagle": lambda: {},
         "hydra": lambda: {"heads": head.config.heads, "blocks": head.config.blocks,
                           "prefix_attention": head.prefix is not None},
         "dflash": lambda: {"block": head.config.block, "head_layers": head.config.layers},
         "dspark": lambda: {"block": head.config.block, "head_layers": head.config.layers, "markov_rank": head.rank}}[kind]()
  for name, size in own.items():
    if getattr(job, name) != size:
      raise ValueError(f"--{name}={getattr(job, name)}: the head of --start_from={job.start} has {size}")
  if head.ids is None and head.config.draft_vocab != target.config.num_tokens:
    raise ValueError(f"--start_from={job.start} has logits of {head.config.draft_vocab} ids, which fill up the "
                     f"target's {target.config.num_tokens}: training goes on only from heads that name their ids")
  return head


def _folder(job, data):
  """The run folder, with the facts of the run. Raises ValueError where a run began with other data."""
  folder = pathlib.Path(job.outdir)
  folder.mkdir(parents=True, exist_ok=True)
  path, facts = folder / "config.json", _facts(job) | {"training_tokens": data.training_tokens,
                                                                "corpus_tokens": data.corpus_tokens}
  known = json.loads(path.read_text()) if path.exists() else facts
  if known.get("corpus_tokens") != facts["corpus_tokens"]:  # draft ids and what is held out follow from all of them
    raise ValueError(f"{folder} holds a run that began with {known.get('corpus_tokens')} tokens of text, and the corpus "
                     f"has {facts['corpus_tokens']} now: choose another folder")
  corpus.write_whole(path, lambda file: file.write(json.dumps(facts, indent=1).encode()))
  return folder


def _prompts(data, most):
  """Beginnings of held-out sequences, evenly spaced: the prompt, of plain text one half; `most` tokens at most."""
  read, found = functools.cache(corpus.read), []
  for folder, index, which, length in data.held[::max(len(data.held) // _PROMPTS, 1)][:_PROMPTS]:
    sequences = read(folder, index)
    found.append(sequences[which][:min(int(sequences.starts[which]) or length // 2, most)].tolist())
  return found


def _facts(job):
  # Options of other kinds say nothing of the run, which goes on where it was when such a kind is new.
  others = {name for names in HEADS.values() for name in names} - set(HEADS[job.head])
  kept = {key: value for key, value in dataclasses.asdict(job).items() if key not in ("outdir", "evaluate_every", *others)}
  return kept | {"corpora": [pathlib.Path(name).name for name in job.corpora]}
