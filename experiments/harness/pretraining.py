"""A run of experiments.pretrain: tokenizer, data, first weights, the loop with its progress, the resulting folder."""
import dataclasses
import functools
import json
import pathlib
import time

import jax
import numpy as np
import tqdm

import specjax
from experiments.harness import pretraining_data
from experiments.harness import training_curves
from experiments.harness import training_mesh
from experiments.harness import training_progress
from specjax import checkpoints
from specjax.checkpoints import new_tokenizer
from specjax.models.config import DecoderConfig
from specjax.models.config import MoE
from specjax.models.encoder_decoder_config import EncoderDecoderConfig
from specjax.training import corpus
from specjax.training import fresh
from specjax.training import loop
from specjax.training import pretrain

FAMILIES = ("t5", "mixtral", "llama")
_SENTINELS = 100  # as T5 has
_OPTIMIZER = 1.25  # a step with the optimizer and a share of evaluation and checkpoints, over a gradient alone
# Which flags do not belong to all families.
OPTIONS = {"t5": ("span_corruption",), "mixtral": ("experts", "chosen", "balance"), "llama": ()}


@dataclasses.dataclass(frozen=True)
class Job:
  """The flags of `experiments.pretrain`, which see."""
  family: str
  data: tuple[str, ...]
  outdir: str
  layers: int
  width: int
  heads: int
  mlp_width: int
  experts: int
  chosen: int
  vocab: int
  tokenizer: str | None
  steps: int | None
  minutes: float | None
  batch_tokens: int
  max_tokens: int
  learning_rate: float
  balance: float
  span_corruption: float
  evaluate_every: int
  seed: int

  def facts(self) -> dict:
    """As the run folder records them: the size of the model, the data, the training."""
    kept = {key: value for key, value in dataclasses.asdict(self).items() if key not in ("outdir", "evaluate_every")}
    for name in (name for names in OPTIONS.values() for name in names if name not in OPTIONS[self.family]):
      del kept[name]
    return training_mesh.facts(kept) | {"data": [pathlib.Path(name).name for name in self.data],
                   "tokenizer": self.tokenizer and pathlib.Path(self.tokenizer).name}


def check_read(job: Job, given) -> None:
  """Raises ValueError for a flag of another family, a size that cannot be, and a run folder of another job."""
  for family, names in OPTIONS.items():
    for name in names:
      if name not in OPTIONS[job.family] and not given[name].using_default_value:
        raise ValueError(f"--{name}={given[name].value} is an option of --family={family}, and this is "
                         f"--family={job.family}")
  if job.tokenizer and not given["vocab"].using_default_value:
    raise ValueError(f"--vocab={job.vocab}: the tokenizer of --tokenizer={job.tokenizer} has its own size; leave it "
                     "out")
  if bool(job.steps) == bool(job.minutes):
    raise ValueError("one of --steps and --minutes is needed: how long to train")
  if job.width % job.heads or job.width // job.heads % 2:
    raise ValueError(f"--width={job.width}, --heads={job.heads}: each head has --width over --heads elements, which "
                     "must be an even number")
  training_progress.check_folder(job.outdir, job.facts())


def run(job: Job) -> dict:
  """Trains; the last row of metrics."""
  rows = pretraining_data.read(job.data)
  folder = pathlib.Path(job.outdir)
  tokenizer = _tokenizer(job, rows)
  model = _model(job, tokenizer)
  if job.family == "t5":
    data = pretraining_data.examples(rows, tokenizer, span_share=job.span_corruption, size=job.max_tokens,
                                     tokens=job.batch_tokens)
    loss, kinds = pretrain.answer, lambda: data.shapes(job.seed).values()
  else:
    data = pretraining_data.documents(rows, tokenizer, size=job.max_tokens, tokens=job.batch_tokens)
    loss, kinds = functools.partial(pretrain.next_token, balance=job.balance), lambda: [0]
  _keep(tokenizer, folder / "tokenizer")
  training_progress.open_folder(folder, job.facts(), data)
  batch, places = lambda step: data.batch(step, job.seed), training_mesh.places()
  steps = job.steps or _planned(job, folder, model, loss, batch, kinds)
  held_out = data.evaluation()
  print(f"{data.training_tokens} tokens, {steps} steps, a {job.family} of "
        f"{sum(leaf.size for leaf in jax.tree.leaves(model)) / 1e6:.1f}M weights", flush=True)
  evaluate = _evaluation(loss, held_out) if held_out else None
  with tqdm.tqdm(total=steps, desc=f"training {job.family}", unit="step") as bar:
    def report(row):
      if not bar.n:
        bar.initial = bar.n = row["step"]  # where a run goes on
      if "held_out/cross_entropy" in row:
        bar.write(f"step {row['step'] + 1}: {_shown(row)}")
        training_curves.draw_language(loop.read_metrics(folder), folder / "curves.png", job.family)
      bar.set_postfix({"loss": f"{row['loss']:.3f}"})
      bar.update()

    schedule = loop.Schedule(steps=steps, learning_rate=job.learning_rate, clip=1.0,
                             relative=job.family == "t5", accumulate=training_mesh.accumulate())
    weights = loop.run(folder, model, loss, batch, schedule, evaluate_every=job.evaluate_every, evaluate=evaluate,
                       report=report, places=places)
  specjax.save(folder / "model", weights, tokenizer)
  rows = loop.read_metrics(folder)
  training_curves.draw_language(rows, folder / "curves.png", job.family)
  return rows[-1]


def summary(row: dict) -> str:
  """The end of a run in a line."""
  return _shown(row) if "held_out/cross_entropy" in row else f"cross entropy {row['cross_entropy']:.3f}, none held out"


def _shown(row):
  text = f"held-out cross entropy {row['held_out/cross_entropy']:.3f}, accuracy {row['held_out/accuracy']:.3f}"
  return text + (f", busiest expert {row['held_out/busiest']:.2f} of the mean" if "held_out/busiest" in row else "")


def _tokenizer(job, rows):
  """That of the run that goes on, of --tokenizer, or a new one."""
  folder = pathlib.Path(job.outdir)
  if (folder / "config.json").exists():  # of this very job; written behind the tokenizer
    return checkpoints.Tokenizer.from_folder(folder / "tokenizer")
  if not job.tokenizer:
    return new_tokenizer.train(pretraining_data.texts(rows), job.vocab, _SENTINELS if job.family == "t5" else 0)
  tokenizer = checkpoints.Tokenizer.from_folder(job.tokenizer)
  if not tokenizer.eos_ids:
    raise ValueError(f"--tokenizer={job.tokenizer}: it has no end of sequence, with which documents and answers end")
  if job.family == "t5" and tokenizer.tokens()[new_tokenizer.PAD] != new_tokenizer.PAD_TOKEN:
    raise ValueError(f"--tokenizer={job.tokenizer}: id {new_tokenizer.PAD} is {tokenizer.tokens()[new_tokenizer.PAD]!r}; "
                     f"a T5 begins with it, and it must be {new_tokenizer.PAD_TOKEN!r}")
  return tokenizer


def _keep(tokenizer, folder):
  folder.mkdir(parents=True, exist_ok=True)
  for name, text in tokenizer.files().items():
    corpus.write_whole(folder / name, lambda file, text=text: file.write(text.encode()))


def _model(job, tokenizer):
  shared = dict(vocab_size=tokenizer.vocab_size, num_tokens=tokenizer.vocab_size, width=job.width, layers=job.layers,
                heads=job.heads, head_width=job.width // job.heads, mlp_width=job.mlp_width, eos_ids=tokenizer.eos_ids)
  if job.family == "t5":
    return fresh.encoder_decoder(EncoderDecoderConfig(
        encoder_layers=job.layers, norm_eps=1e-6, buckets=32, max_distance=128, opening=(new_tokenizer.PAD,),
        scaled_head=True, **shared), job.seed)
  moe = MoE(experts=job.experts, chosen=job.chosen, width=job.mlp_width, renormalised=True)
  return fresh.decoder(DecoderConfig(
      kv_heads=job.heads, norm_eps=1e-5, rope_theta=10000.0, max_context=job.max_tokens, family=job.family,
      moe=moe if job.family == "mixtral" else None, **shared), job.seed)


def _planned(job, folder, model, loss, batch, kinds):
  """Steps that fit into --minutes, found once a run: by the time of a gradient of each shape of batch. `kinds` gives a
  step of each."""
  path = folder / "steps.json"
  if not path.exists():
    gradient = jax.jit(jax.grad(lambda params, given: loss(params, given)[0]))
    seconds = {}
    for given in map(batch, kinds()):
      times = []
      for _ in range(3):
        begin = time.perf_counter()
        jax.block_until_ready(gradient(model, given))
        times.append(time.perf_counter() - begin)
      seconds[_shapes(given)] = min(times[1:])
    mean = np.mean([seconds.get(_shapes(batch(step)), max(seconds.values())) for step in range(64)])
    steps = max(int(job.minutes * 60 / (_OPTIMIZER * mean * training_mesh.accumulate())), 1)
    corpus.write_whole(path, lambda file: file.write(json.dumps({"steps": steps, "seconds": float(mean)}).encode()))
  return json.loads(path.read_text())["steps"]


def _shapes(batch):
  return tuple(np.shape(leaf) for leaf in jax.tree.leaves(batch))


def _evaluation(loss, batches):
  measure = jax.jit(lambda params, batch: loss(params, batch)[1])

  def evaluate(step, params):
    del step
    found = [jax.device_get(measure(params, batch)) for batch in batches]
    weights = [max(row["counted"], 1e-9) for row in found]
    return {name: float(np.average([row[name] for row in found], weights=weights)) for name in found[0]
            if name != "counted"}

  return evaluate
