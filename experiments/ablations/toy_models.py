"""A small target that is trained here, once a process, and its text: what every ablation of kind "toy" stands on.

The text is what SmolLM2-135M wrote (`experiments/corpora`), as ids: its most frequent ids keep one each, all others
share the last. Nothing is downloaded and no tokenizer is needed. The target is a decoder with Llama's parts, trained
from nothing by `specjax.training.pretrain`. One in twelve prompts is held out, with its answer, from the target and
from every head. All that is measured is measured there, on text that the target itself writes behind the first 64
tokens of those sequences, see `toy_acceptance`. It writes at temperature 1: half of what so small a target says
greedily is loops.

Letters: S tokens of a sequence.
"""
import atexit
import dataclasses
import functools
import pathlib
import shutil
import tempfile
import zlib

import jax
import numpy as np
import tqdm

import experiments
import specjax
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.training import batches
from specjax.training import corpus
from specjax.training import features
from specjax.training import fresh
from specjax.training import loop
from specjax.training import packed
from specjax.training import pretrain
from specjax.training import texts

CORPORA = ("smollm2-135m-own", "smollm2-135m-own-1")
HELD_OUT = 12        # one prompt in so many
OPENING, LONGEST = 64, 128  # tokens that the target goes on from, and of a sequence; in between, all have one shape
VALIDATION = 40      # one sequence in so many of those for training is kept for tables that choose trees


@dataclasses.dataclass(frozen=True)
class Size:
  """How much is trained.

  Attributes:
    ids: of the target, those for rare ones and for the end of a text included. layers, width, attention: its layers,
      width and heads of attention.
    sequences: read of the corpora, or None for all. tokens: of a batch.
    target_tokens, target_steps, target_rate: of a batch of the target's, its steps, and their greatest size.
    passes_over: of the text by a head. head_rate: its greatest step.
    passes: of the training-time test. self_fed: places over which features are fed back when they are measured. heads:
      Medusa's and Hydra's.
    draft_steps: of a draft model before it is distilled, and again while it is. draft_width: its width.
  """
  ids: int = 1024
  layers: int = 4
  width: int = 128
  attention: int = 4
  sequences: int | None = None
  tokens: int = 1024
  target_tokens: int = 2048
  target_steps: int = 400
  target_rate: float = 3e-3
  passes_over: float = 0.5
  head_rate: float = 2e-3
  passes: int = 4
  self_fed: int = 8
  heads: int = 5
  draft_steps: int = 160
  draft_width: int = 64


DEFAULT = Size()
TINY = Size(ids=64, layers=3, width=16, attention=2, sequences=96, tokens=256, target_tokens=256, target_steps=2,
            passes_over=.05, passes=2, self_fed=3, heads=3, draft_steps=2, draft_width=8)


@dataclasses.dataclass(frozen=True)
class Lab:
  """The target and its text.

  Attributes:
    fused, last: layers whose inputs EAGLE-3 reads, and the one that stands for the last one's output.
    folder: of the text for training; its features are those of `fused` and of `last`.
    written: of the held-out text, the same.
    rows: what the target was trained on, and what was held out.
  """
  size: Size
  seed: int
  target: Decoder
  fused: tuple[int, ...]
  last: tuple[int, ...]
  folder: pathlib.Path
  written: pathlib.Path
  rows: packed.RowData

  def data(self, layers: tuple[int, ...] | None = None, share: float = 1.0) -> batches.Data:
    """Batches for training a head that reads `layers`, of a share of the text."""
    whole = self._data(batches.Data, self.folder, layers or self.last)
    return whole if share == 1 else self._data(batches.Data, self.folder, layers or self.last,
                                               limit=int(share * whole.training_tokens))

  def texts(self) -> texts.Texts:
    """Batches for training a draft model."""
    return texts.Texts(folders=(str(self.folder),), tokens=self.size.tokens, max_tokens=LONGEST, held_out=VALIDATION)

  def measured(self, layers: tuple[int, ...] | None = None) -> list[batches.Batch]:
    """All held-out text, the same sequences in the same places whatever the layers."""
    data = self._data(batches.Data, self.written, layers or self.last, held_out=0)
    return [data.batch(step, 0) for step in range(data.epoch_steps())]

  def _data(self, kind, folder, layers, **more):
    return kind(folders=(str(folder),), layers=layers, width=self.size.width, tokens=self.size.tokens,
                max_tokens=LONGEST, **{"held_out": VALIDATION, **more})


@functools.cache
def lab(size: Size, seed: int) -> Lab:
  """Trains the target and lets it write; once a process."""
  documents, held, ends = _text(size)
  rows = packed.RowData(documents=[ids for ids, _ in documents], held=[ids for ids, _ in held], eos=ends,
                        size=LONGEST, tokens=size.target_tokens)
  loss = functools.partial(pretrain.next_token, balance=0.0)
  target = run("target", fresh.decoder(config(size, size.layers, size.width), seed), loss,
               lambda step: rows.batch(step, seed), size.target_steps, size.target_rate)
  folder = pathlib.Path(tempfile.mkdtemp(prefix="specjax-toy-"))
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  train, written = folder / "train", folder / "written"
  _keep(train, [(ids[:LONGEST], min(start, LONGEST)) for ids, start in documents if len(ids) > OPENING])
  _keep(written, _written(target, [ids[:OPENING] for ids, _ in held if len(ids) >= OPENING], size, seed))
  fused, last = tuple(range(1, size.layers)), (size.layers,)
  for place in (train, written):
    _features(target, place, fused, last)
  return Lab(size=size, seed=seed, target=target, fused=fused, last=last, folder=train, written=written, rows=rows)


def config(size: Size, layers: int, width: int) -> DecoderConfig:
  """Of a decoder with the target's ids."""
  return DecoderConfig(vocab_size=size.ids, num_tokens=size.ids, width=width, layers=layers, heads=size.attention,
                       kv_heads=size.attention, head_width=width // size.attention, mlp_width=3 * width, norm_eps=1e-5,
                       rope_theta=10000.0, max_context=2 * LONGEST, eos_ids=(size.ids - 2,), tied=False)


def run(title: str, params, loss, batch, steps: int, rate: float, *, arguments=(), clip: float = 1.0):
  """`loop.run` in a folder that goes away, under a progress bar that does, too. Returns the trained weights."""
  with tempfile.TemporaryDirectory() as folder, tqdm.tqdm(total=steps, desc=f"training {title}", unit="step",
                                                          leave=False) as bar:
    def report(row):
      bar.set_postfix({"loss": f"{row['loss']:.3f}"}, refresh=False)
      bar.update()

    schedule = loop.Schedule(steps=steps, learning_rate=rate, clip=clip)
    return loop.run(folder, params, loss, batch, schedule, arguments=arguments, save_every=steps, report=report)


def _text(size):
  """Pairs of ids and prompt length for training and held out, and the id of an end of text."""
  folders = [pathlib.Path(experiments.__file__).parent / "corpora" / name for name in CORPORA]
  read = [corpus.read(folder, index) for folder in folders if corpus.facts(folder) for index in corpus.indices(folder)]
  found = [(rows[i], int(rows.starts[i])) for rows in read for i in range(len(rows))][:size.sequences]
  is_held = [zlib.crc32(ids[:start].tobytes()) % HELD_OUT == 0 for ids, start in found]
  sides = {side: [pair for pair, held in zip(found, is_held) if held == side] for side in (False, True)}
  known, counts = np.unique(np.concatenate([ids for ids, _ in sides[False]]), return_counts=True)
  frequent = np.sort(known[np.argsort(-counts, kind="stable")[:size.ids - 2]])
  ends, rare = size.ids - 2, size.ids - 1

  def mapped(ids):
    place = np.minimum(np.searchsorted(frequent, ids), len(frequent) - 1)
    return np.where(frequent[place] == ids, place, rare).astype(np.int32)

  return *([(mapped(ids), start) for ids, start in sides[side]] for side in (False, True)), ends


def _written(target, openings, size, seed):
  """Pairs of ids and `OPENING`: what the target writes behind each opening; those that it leaves empty are left out."""
  result = specjax.generate(target, specjax.proposers.Plain(), [ids.tolist() for ids in openings],
                            specjax.SamplingParams(temperature=1.0), max_new_tokens=LONGEST - OPENING,
                            key=jax.random.key(seed))
  return [(np.concatenate([ids, answer]).astype(np.int32), OPENING)
          for ids, answer in zip(openings, result.token_ids) if len(answer) > 1]


def _keep(folder, sequences):
  folder.mkdir()
  corpus.write(folder, 0, corpus.pack(sequences))


def _features(target, folder, fused, last):
  """Those of both sets of layers, from one pass over the text."""
  features.compute(target, folder, fused + last, LONGEST)
  both = features.read(folder, 0, fused + last)
  width = target.config.width
  of_fused = np.concatenate([both.values[:, :len(fused) * width], both.values[:, -width:]], axis=1)
  for layers, values in ((fused, of_fused), (last, both.values[:, -2 * width:])):
    features.write(folder, 0, layers, features.File(values=values, top=both.top))
  features.path(folder, 0, fused + last).unlink()
