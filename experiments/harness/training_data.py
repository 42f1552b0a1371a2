"""Answers of a target to a list of prompts, batch by batch, into a corpus that a killed run goes on with."""
import dataclasses
import json
import pathlib

import jax
import numpy as np

import specjax
from experiments import workloads
from experiments.harness import sharded
from specjax import proposers
from specjax.models import base as models
from specjax.training import corpus
from specjax.training import features
from specjax.training import recorder
from specjax.training import trainers

PLAIN_TEXT = "plain_text"
_BATCHES = 8  # batches of one file
_OWN_TOKENS = 48  # of a prompt that the target writes: two thirds end by then, and batches wait for the longest
_OWN_TRIES = 8    # times as many are written, at most, as are wanted
_OWN_SEEDS = 1 << 28  # those of prompts lie behind those of answers


@dataclasses.dataclass(frozen=True)
class Job:
  """What is written: see the flags of `experiments.write_training_data`."""
  target: str
  prompts: tuple[str, ...]
  temperatures: tuple[float, ...]
  max_new_tokens: int
  max_prompt_tokens: int
  max_prompts: int | None
  batch_size: int
  seed: int
  own_prompts: int = 0
  keep_features: bool = False

  def facts(self) -> dict:
    """As the corpus records them; file names without their folders."""
    return json.loads(json.dumps(dataclasses.asdict(self) | {"prompts": [pathlib.Path(p).name for p in self.prompts]}))


def temperatures(texts: list[str]) -> tuple[float, ...]:
  """Of the flag.

  Raises:
    ValueError: names what is no temperature.
  """
  found = []
  for text in texts:
    try:
      value = float(text)
    except ValueError:
      value = -1
    if not 0 <= value < float("inf"):
      raise ValueError(f"--temperatures: {text!r} is no temperature; give numbers of 0 (greedy) or more, such as 0,0.7")
    found.append(value)
  return tuple(found)


def write(job: Job, folder, *, progress) -> dict:
  """Writes the corpus; files that are there stay as they are.

  Args:
    progress: has `update(tokens)`.

  Returns:
    Counts: sequences, tokens, answer tokens, prompts that were too long.
  """
  requests = _requests(job.prompts) if job.prompts else []
  folder = corpus.open_folder(folder, job.facts())
  target, tokenizer = sharded.load(job.target)
  if models.encodes(target):
    _check_encoder(job, target)
  sequences, prompts, long = [], [], 0
  for request in requests:
    if request["category"] == PLAIN_TEXT:
      if models.encodes(target):
        raise ValueError(f"--prompts: a row of the category {PLAIN_TEXT} has nothing that {type(target).__name__} reads "
                         "with its encoder; leave such rows out")
      ids = tokenizer.encode(request["prompt"])
      size = job.max_prompt_tokens + job.max_new_tokens
      sequences += [(ids[i:i + size], 0) for i in range(0, len(ids), size) if len(ids[i:i + size]) > 8]
      continue
    text = request.get("prompt") or request["turns"][0]
    ids = _prompt(target, tokenizer, text)
    if len(ids) > job.max_prompt_tokens or models.room(target, len(ids)) < job.max_new_tokens:
      long += 1
    else:
      prompts.append(ids)
  rng = np.random.default_rng(job.seed)
  prompts = [prompts[i] for i in rng.permutation(len(prompts))[:job.max_prompts]]
  index, size = 0, job.batch_size * _BATCHES
  if sequences and not prompts:
    sequences = [sequences[i] for i in rng.permutation(len(sequences))[:job.max_prompts]]
  done = set(corpus.indices(folder))
  for begin in range(0, len(sequences), size):
    if index not in done:
      corpus.write(folder, index, corpus.pack(sequences[begin:begin + size]))
    progress.update(sum(len(ids) for ids, _ in sequences[begin:begin + size]))
    index += 1
  for begin in range(0, len(prompts), size):
    if index not in done:
      _write_answers(job, target, folder, index, prompts[begin:begin + size], begin, progress)
    index += 1
  for begin in range(0, job.own_prompts, size):
    if index not in done:
      own = _own_prompts(job, target, tokenizer, begin, min(begin + size, job.own_prompts), progress)
      if own:
        _write_answers(job, target, folder, index, own, begin, progress)
    index += 1
  found = [corpus.read(folder, i) for i in corpus.indices(folder)]
  return {"sequences": sum(map(len, found)), "tokens": sum(len(s.tokens) for s in found),
          "answer_tokens": sum(int((np.diff(s.offsets) - s.starts)[s.starts > 0].sum()) for s in found),
          "prompts_too_long": long}


def _prompt(target, tokenizer, text):
  if models.encodes(target):
    return tokenizer.encode(text, add_special_tokens=True)
  return tokenizer.chat([{"role": "user", "content": text}]) if tokenizer.has_chat_template else tokenizer.encode(text)


def _check_encoder(job, target):
  """Raises ValueError for what a target with an encoder does not write."""
  name = type(target).__name__
  if job.own_prompts:
    raise ValueError(f"--own_prompts: {name} reads prompts with an encoder and writes none; give files, --prompts")
  if not job.keep_features:
    raise ValueError(f"--nokeep_features: features of {name} are kept while it answers, and not computed later; leave "
                     "it out")


def _own_prompts(job, target, tokenizer, begin, end, progress):
  """Prompts `begin` to `end` that the target writes where a user would: those that it ended, each once; fewer where it
  seldom ends one.

  Drawn at temperature 1 from the most probable 95%; their tokens count as progress, for they take as long as answers.
  """
  wanted, first_seed = end - begin, _OWN_SEEDS + begin * _OWN_TRIES
  mark = "\u2042"
  opening = tokenizer.chat_text([{"role": "user", "content": mark}]).split(mark)[0]
  ids, found = tokenizer.encode(opening), {}
  for tried in range(0, _OWN_TRIES * wanted, job.batch_size):
    if len(found) >= wanted:
      break
    seeds = list(range(first_seed + tried, first_seed + tried + job.batch_size))
    params = specjax.SamplingParams(temperature=1.0, top_p=0.95, seed=seeds)
    result = specjax.generate(target, proposers.Plain(), [ids] * job.batch_size, params,
                              max_new_tokens=min(_OWN_TOKENS, job.max_prompt_tokens), key=jax.random.key(job.seed))
    for written, reason in zip(result.token_ids, result.finish_reasons):
      progress.update(len(written))
      text = tokenizer.decode(written).strip()
      prompt = tokenizer.chat([{"role": "user", "content": text}])
      if reason == "stop" and len(text) > 2 and len(prompt) <= job.max_prompt_tokens:
        found[text] = prompt
  return list(found.values())[:wanted]


def _write_answers(job, target, folder, index, prompts, first_seed, progress):
  """File `index`: prompts with their answers, written in batches of prompts of about one length; with what the target
  computed meanwhile, if it is kept: of every token but the last, which is left out then. Of a target with an encoder
  prompts are its inputs, and sequences begin with the decoder's opening."""
  opening = list(models.opening(target))
  layers = trainers.layers_of_eagle3(target.config.layers)
  proposer = recorder.Recorder(layers) if job.keep_features else proposers.Plain()
  places = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
  written = {}
  for first in range(0, len(places), job.batch_size):
    batch = places[first:first + job.batch_size]
    rows = batch + [batch[-1]] * (job.batch_size - len(batch))  # always one shape
    seeds = [first_seed + place for place in rows]
    temperature = [job.temperatures[seed % len(job.temperatures)] for seed in seeds]
    params = specjax.SamplingParams(seed=seeds, temperature=temperature)
    result = specjax.generate(target, proposer, [prompts[place] for place in rows], params,
                              max_new_tokens=job.max_new_tokens, key=jax.random.key(job.seed))
    kept = recorder.recorded(target, result.proposer_state) if job.keep_features else [None] * len(rows)
    for place, answer, file in zip(batch, result.token_ids, kept):
      begin = opening or prompts[place]
      ids = [*begin, *answer]
      ids = ids if file is None else ids[:len(file.top)]
      if file is not None and len(ids) != len(begin) + len(answer) - 1:
        raise RuntimeError(f"{len(file.top)} features were kept of {len(begin) + len(answer)} tokens")
      written[place] = ids, len(begin), file
      progress.update(len(answer))
  found = [written[place] for place in sorted(written)]
  inputs = [prompts[place] for place in sorted(written)] if opening else None
  if job.keep_features:
    features.write(folder, index, layers, features.File(values=np.concatenate([file.values for *_, file in found]),
                                                        top=np.concatenate([file.top for *_, file in found])))
  corpus.write(folder, index, corpus.pack([(ids, start) for ids, start, _ in found], inputs))


def _requests(paths):
  """Rows of all files, each checked. Raises ValueError for what is measured, or for a row without text."""
  bundled = pathlib.Path(workloads.__file__).with_name("bundled.jsonl")
  rows = []
  for path in map(pathlib.Path, paths):
    if "eval" in path.resolve().parts[:-1] or path.resolve() == bundled:
      raise ValueError(f"--prompts: {path} is the bundled workload or lies in a folder named eval: a head that was "
                       "trained on what is measured makes its numbers worthless; use training prompts")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
      if not line.strip():
        continue
      try:
        row = json.loads(line)
        text = row.get("prompt") or row["turns"][0]
        if not isinstance(text, str) or not isinstance(row.get("category"), str):
          raise ValueError("no text")
      except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}, line {number}: is no request with a category and a prompt or turns ({error})") from error
      rows.append(row)
  if not rows:
    raise ValueError("--prompts: the files hold no requests")
  return rows
