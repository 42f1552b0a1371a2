"""Side-by-side timing against Hugging Face Transformers: same weights, prompts, token accounting and threads.

An *arm* is a way of decoding: a function from prompt ids to output ids, the end-of-sequence id included. Arms are timed
end to end (prefill included), in turn on each prompt, so that what slows the machine for a while slows all of them.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import os
import pathlib
import statistics
import time

import numpy as np

Arm = Callable[[Sequence[int]], list[int]]

TRANSFORMERS_ARMS = (
  "transformers f32", "transformers f32 lookup", "transformers bf16", "transformers bf16 lookup")
SPECJAX_ARMS = ("specjax plain", "specjax ngram")

# (arm, peer, prompt, least ratio that the project set itself; None: shown without a bar)
BARS = (
  *(("specjax plain", "transformers f32", prompt, 2.0) for prompt in ("chat", "summary", "code")),
  ("specjax ngram", "transformers f32 lookup", "chat", None),
  ("specjax ngram", "transformers f32 lookup", "summary", 2.0),
  ("specjax ngram", "transformers f32 lookup", "code", 1.6),
  ("specjax ngram", "transformers bf16 lookup", "chat", None),
  ("specjax ngram", "transformers bf16 lookup", "summary", 1.2),
  ("specjax ngram", "transformers bf16 lookup", "code", 1.2),
)

# A machine that others use slows PyTorch, whose threads wait for each other by spinning, several times more than XLA:
# ratios measured there flatter specjax (11 instead of 2.5 was seen). So no bar is judged unless the machine was quiet.
_MOST_FOREIGN = 0.1  # Share of the machine that other processes may use during a timed run.
_MOST_SPREAD = 1.3   # Fastest repeat over slowest; about 1.1 on a quiet machine.


class PeersMissingError(ValueError):
  """The packages of the `peers` extra are not installed."""


@dataclasses.dataclass
class Cell:
  """One arm on one prompt.

  Attributes:
    arm: The arm's name.
    prompt: The prompt's name.
    tokens: Output ids, the same in every repeat.
    seconds: End-to-end time of each repeat.
    foreign: Share of the machine's cores that other processes used meanwhile (0 where the system does not tell).
  """

  arm: str
  prompt: str
  tokens: list[int]
  seconds: list[float] = dataclasses.field(default_factory=list)
  foreign: list[float] = dataclasses.field(default_factory=list)

  @property
  def rates(self) -> list[float]:
    """Tokens per second of each repeat."""
    return [len(self.tokens) / s for s in self.seconds]

  @property
  def quiet(self) -> bool:
    """Whether the machine was quiet enough for the times to be compared."""
    return max(self.foreign) <= _MOST_FOREIGN and max(self.rates) <= _MOST_SPREAD * min(self.rates)

  def to_json(self) -> dict[str, object]:
    """The cell as it stands in compare.json."""
    return {**dataclasses.asdict(self), "tokens_per_second": statistics.median(self.rates),
            "tokens_per_second_range": [min(self.rates), max(self.rates)], "quiet": self.quiet}


def cores() -> int:
  """The number of cores that this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _others() -> float:
  """CPU seconds that all other processes, and other guests of the same host, have used since the start."""
  stat = pathlib.Path("/proc/stat")
  if not stat.exists():
    return 0.0
  user, nice, system, _, _, irq, softirq, steal, *_ = map(int, stat.read_text().split("\n", 1)[0].split()[1:])
  return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()


def _packages():
  """(torch, transformers), quiet, with a thread a core; raises PeersMissingError."""
  try:
    import accelerate  # pylint: disable=unused-import
    import gguf  # pylint: disable=unused-import
    import torch
    import transformers
  except ImportError as error:
    raise PeersMissingError(
      f"the comparison needs PyTorch and Transformers ({error}); install them with: pip install -e .[peers]") from error
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  torch.set_num_threads(cores())
  return torch, transformers


def load_model(path: pathlib.Path, dtype=None):
  """(model, torch): a GGUF file or a model folder as Transformers reads it, float32 unless a `dtype` of torch is given.

  Raises:
    PeersMissingError: PyTorch, Transformers or what it reads GGUF files with is missing.
  """
  torch, transformers = _packages()
  where = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
  # Loaded in its type rather than cast: a cast would also round the rotary frequencies, which stay f32 here.
  kind = transformers.AutoModelForCausalLM
  if path.is_dir() and transformers.AutoConfig.from_pretrained(path).is_encoder_decoder:
    kind = transformers.AutoModelForSeq2SeqLM
    if transformers.AutoConfig.from_pretrained(path).model_type == "whisper":
      kind = transformers.AutoModelForSpeechSeq2Seq
  model = kind.from_pretrained(
      where[0], **where[1], dtype=dtype or torch.float32, attn_implementation="eager" if dtype is None else None)
  return model.eval(), torch


def transformers_arms(path: pathlib.Path, max_new_tokens: int, names: Sequence[str]) -> dict[str, Arm]:
  """Loads the chosen ones of `TRANSFORMERS_ARMS` from a GGUF file or a model folder.

  Args:
    path: The weights that the other arms use.
    max_new_tokens: The most tokens an answer has.
    names: Arms to make.

  Returns:
    The arms by name. Each of them decodes greedily, batch 1, and sets the threads of PyTorch to `cores()`.

  Raises:
    PeersMissingError: PyTorch, Transformers or what it reads GGUF files with is missing.
  """
  torch, transformers = _packages()

  def make(model, lookup: bool) -> Arm:
    options = {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 3} if lookup else {}

    def run(ids: Sequence[int]) -> list[int]:
      prompt = torch.tensor([list(ids)])
      with torch.inference_mode():
        out = model.generate(
          prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_new_tokens, **options)
      return out[0, len(ids):].tolist()
    return run

  arms = {}
  for kind, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
    wanted = [name for name in names if name.startswith(f"transformers {kind}")]
    if wanted:
      model = load_model(path, dtype)[0]
      arms.update({name: make(model, name.endswith("lookup")) for name in wanted})
  return {name: arms[name] for name in names if name in arms}


def specjax_arms(target, max_new_tokens: int, names: Sequence[str]) -> dict[str, Arm]:
  """The chosen ones of `SPECJAX_ARMS` on a loaded target, greedy and batch 1."""
  import specjax

  def make(proposer) -> Arm:
    def run(ids: Sequence[int]) -> list[int]:
      result = specjax.generate(
        target, proposer, [list(ids)], specjax.SamplingParams(temperature=0.0), max_new_tokens=max_new_tokens)
      return np.asarray(result.tokens)[0, :int(result.lengths[0])].tolist()
    return run

  proposers = {
    "specjax plain": specjax.proposers.Plain(),
    "specjax ngram": specjax.proposers.NGram(max_ngram=3, min_ngram=2, num_tokens=7),
  }
  return {name: make(proposers[name]) for name in names if name in proposers}


def measure(arms: dict[str, Arm], prompts: dict[str, Sequence[int]], repeats: int) -> list[Cell]:
  """Times every arm on every prompt `repeats` times after one warm-up each, the arms in turn on each prompt.

  Raises:
    RuntimeError: A greedy arm answered differently in a repeat.
  """
  cells = {(arm, prompt): Cell(arm, prompt, run(ids)) for prompt, ids in prompts.items() for arm, run in arms.items()}
  for _ in range(repeats):
    for prompt, ids in prompts.items():
      for arm, run in arms.items():
        cell, others, begin = cells[arm, prompt], _others(), time.perf_counter()
        tokens = run(ids)
        cell.seconds.append(time.perf_counter() - begin)
        share = (_others() - others) / cell.seconds[-1] / (os.cpu_count() or 1)
        cell.foreign.append(min(1.0, max(0.0, share)))
        if tokens != cell.tokens:
          raise RuntimeError(f"{arm} answered prompt {prompt} greedily in two ways; its times cannot be compared")
  return list(cells.values())


def ratios(cells: Sequence[Cell]) -> list[dict[str, object]]:
  """The ratios of `BARS` whose two arms were measured: median and range over the repeats, each repeat a pair.

  `met` is None where there is no bar, or where the machine was not quiet.
  """
  found = {(cell.arm, cell.prompt): cell for cell in cells}
  rows = []
  for arm, peer, prompt, bar in BARS:
    if (arm, prompt) in found and (peer, prompt) in found:
      ours, theirs = found[arm, prompt], found[peer, prompt]
      pairs = [a / b for a, b in zip(ours.rates, theirs.rates)]
      value, quiet = statistics.median(pairs), ours.quiet and theirs.quiet
      rows.append({"arm": arm, "peer": peer, "prompt": prompt, "ratio": value, "range": [min(pairs), max(pairs)],
                   "bar": bar, "quiet": quiet, "met": value >= bar if bar is not None and quiet else None})
  return rows


def agreement(cells: Sequence[Cell]) -> list[dict[str, object]]:
  """Where each answer first differs from that of the first measured arm; None where the two are the same."""
  rows = []
  for cell in cells:
    reference = next(c for c in cells if c.prompt == cell.prompt)
    length = min(len(cell.tokens), len(reference.tokens))
    first = next((i for i in range(length) if cell.tokens[i] != reference.tokens[i]), length)
    same = cell.tokens == reference.tokens
    rows.append({"arm": cell.arm, "reference": reference.arm, "prompt": cell.prompt,
                 "first_difference": None if same else first})
  return rows


def render(cells: Sequence[Cell]) -> Iterator[str]:
  """Yields the lines of the table and of the ratios."""
  prompts = list(dict.fromkeys(cell.prompt for cell in cells))
  differs = {(row["arm"], row["prompt"]): row["first_difference"] for row in agreement(cells)}
  found = {(cell.arm, cell.prompt): cell for cell in cells}
  yield "end-to-end tokens/s: median (least..most), output tokens"
  yield f"{'arm':<26}" + "".join(f"{prompt:<32}" for prompt in prompts).rstrip()
  for arm in dict.fromkeys(cell.arm for cell in cells):
    line = f"{arm:<26}"
    for prompt in prompts:
      cell, first = found[arm, prompt], differs[arm, prompt]
      mark = "" if first is None else f" *{first}"
      rates = cell.rates
      line += f"{f'{statistics.median(rates):.1f} ({min(rates):.1f}..{max(rates):.1f}), {len(cell.tokens)}{mark}':<32}"
    yield line.rstrip()
  if any(first is not None for first in differs.values()):
    yield f"*k: the answer differs from that of {cells[0].arm} from output token k (counted from 0) on"
  if not all(cell.quiet for cell in cells):
    share = max(max(cell.foreign) for cell in cells)
    yield (f"the machine was not quiet (others used up to {share:.0%} of it, or repeats lie {_MOST_SPREAD:g}x apart), "
           "which slows PyTorch more than XLA: measure again; bars are not judged where this was so")
  for row in ratios(cells):
    low, high = row["range"]
    verdict = {True: "met", False: "MISSED", None: "not judged"}[row["met"]]
    bar = "no bar" if row["bar"] is None else f"bar {row['bar']:.1f}: {verdict}"
    yield (f"{row['arm']} / {row['peer']}, {row['prompt']}: {row['ratio']:.2f} ({low:.2f}..{high:.2f}), {bar}")
