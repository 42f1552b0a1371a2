"""How far a model's logits and texts are from those that Transformers computes from the same files."""
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import near_ties
import specjax
from specjax.models import base

FIXTURES = pathlib.Path(__file__).parents[2] / "tests" / "fixtures"
BAR = 2e-4       # greatest error of a logit over the greatest logit
CHUNK = 11


@dataclasses.dataclass
class Row:
  """One model: greatest relative error of its logits by how they were computed, and how many texts were equal.

  `gap` is the lead of the best logit over the second where the first text that differs does so, None where none does.
  """
  name: str
  family: str
  errors: dict[str, float]
  texts: int
  equal: int
  gap: float | None = None

  @property
  def met(self) -> bool:
    """Logits within the bar, and no text that differs but for a near tie."""
    return max(self.errors.values(), default=0.0) < BAR and (self.gap is None or self.gap < near_ties.NEAR_TIE)

  def line(self) -> str:
    """The row of the printed table."""
    errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
    gap = "" if self.gap is None else f", first difference where the best logit leads by {self.gap:.1e}"
    return f"{self.name:22} {self.family:12} {errors}; {self.equal} of {self.texts} texts equal{gap}" + (
        "" if self.met else "  MISSED")


def stored() -> dict[str, tuple[pathlib.Path, dict[str, np.ndarray]]]:
  """Name -> folder of a tiny checkpoint, and what Transformers computed from it: ids, logits, continuation, gaps; and
  for a model with an encoder what that read, inputs and lengths."""
  found = {}
  for file, parent in (("golden_tiny.npz", FIXTURES), ("golden_families.npz", FIXTURES / "families"),
                       ("golden_recurrent.npz", FIXTURES / "recurrent"),
                       ("golden_encoder_decoder.npz", FIXTURES / "encoder_decoder")):
    values = dict(np.load(FIXTURES / file))
    for key in values:
      if key.endswith("_ids"):
        name = key.removesuffix("_ids")
        found[name] = parent / name, {part: values[f"{name}_{part}"] for part in (
            "ids", "logits", "continuation", "gaps", "inputs", "lengths") if f"{name}_{part}" in values}
  return found


def prompts(golden) -> list:
  """The prompts of stored values: what the encoder reads or hears, where there is one."""
  if "inputs" in golden and golden["inputs"].ndim == 3:
    return list(golden["inputs"])
  if "inputs" in golden:
    return [row[:length].tolist() for row, length in zip(golden["inputs"], golden["lengths"])]
  return golden["ids"].tolist()


def against_stored(name: str, folder: pathlib.Path, golden) -> Row:
  """A tiny checkpoint beside its stored values: read whole, in chunks and token by token, greedy text."""
  target = specjax.load(str(folder))[0]
  read = prompts(golden) if "inputs" in golden else None
  errors = {kind: _error(logits(target, golden["ids"], width, read), golden["logits"]) for kind, width in (
      ("whole", golden["ids"].shape[1]), ("chunks", CHUNK), ("one by one", 1))}
  texts = generate(target, prompts(golden), golden["continuation"].shape[1])
  row = Row(name, target.config.family, errors, len(texts), 0)
  for text, wanted, gaps in zip(texts, golden["continuation"].tolist(), golden["gaps"].tolist()):
    _count(row, text, wanted, lambda place, gaps=gaps: gaps[place])
  return row


def against_live(name: str, peer, target, prompts, new_tokens: int, proposers, progress=lambda items: items) -> Row:
  """A model beside the installed Transformers.

  Args:
    name: for the table. peer: a `Peer`. target: the same model.
    prompts: lists of ids. new_tokens: output tokens of each.
    proposers: name -> proposer; the text of each is compared.
    progress: wraps what is gone through.
  """
  errors = {"whole": 0.0, "chunks": 0.0}
  row = Row(name, target.config.family, errors, 0, 0)
  for prompt in progress(prompts):
    opening = list(base.opening(target))
    wanted = peer.generate(prompt, new_tokens, opening, getattr(target.config, "banned_ids", ()),
                           base.banned_first(target))
    before, read = (opening, [prompt]) if opening else (prompt, None)  # what the decoder reads in front of its output
    text = np.asarray([[*before, *wanted]], np.int32)
    theirs = peer.logits(text[0].tolist(), prompt if opening else None)
    errors["whole"] = max(errors["whole"], _error(logits(target, text, text.shape[1], read)[0], theirs))
    errors["chunks"] = max(errors["chunks"], _error(logits(target, text, 64, read)[0], theirs))
    best = np.sort(theirs[len(before) - 1:, :target.vocab_size])[:, -2:]
    for proposer in proposers.values():
      row.texts += 1
      got = generate(target, [prompt], new_tokens, proposer)[0]
      _count(row, got, wanted, lambda place, best=best: float(best[place, 1] - best[place, 0]))
  return row


def generate(target, prompts, new_tokens: int, proposer=specjax.proposers.Plain()) -> list[list[int]]:
  """Greedy texts, up to and including what ends them."""
  result = specjax.generate(target, proposer, prompts, max_new_tokens=new_tokens)
  return [row[:length] for row, length in zip(np.asarray(result.tokens).tolist(), result.lengths.tolist())]


def logits(target, texts: np.ndarray, width: int, inputs: list | None = None) -> np.ndarray:
  """f32[B, P, V] of texts i32[B, P], read `width` tokens at a time into a cache that grows by them; `inputs` is what an
  encoder reads before, or hears."""
  batch, length = texts.shape
  hears = base.sound(target) is not None
  lengths = np.asarray([target.max_inputs if hears else len(row) for row in inputs or [[]] * batch], np.int32)
  cache, found = target.init_cache(batch, -(-(length + int(lengths.max())) // 256) * 256), []
  if hears:
    cache = _encode(target, cache, np.stack(inputs), lengths)
  elif inputs is not None:
    padded = np.zeros((batch, lengths.max()), np.int32)
    for row, ids in enumerate(inputs):
      padded[row, :len(ids)] = ids
    cache = _encode(target, cache, padded, lengths)
  for at in range(0, length, width):
    part = jnp.asarray(texts[:, at:at + width], jnp.int32)
    made, cache = _chunk(target, part, cache)
    found.append(np.asarray(made))
  return np.concatenate(found, 1)


@jax.jit
def _encode(target, cache, tokens, lengths):
  return target.encode(cache, tokens, lengths)


@jax.jit
def _chunk(target, tokens, cache):
  batch, width = tokens.shape
  positions = cache.length[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))
  out = target.forward(tokens, positions, mask, cache)
  return target.logits(out.hidden), cache.commit(out.in_flight, jnp.full((batch,), width, jnp.int32))


def _error(got, wanted) -> float:
  wanted = wanted[..., :got.shape[-1]]
  wanted = np.where(got == -np.inf, 0, wanted)  # ids that are never emitted: Transformers leaves them out when it draws
  return float(np.abs(np.where(got == -np.inf, 0, got) - wanted).max() / np.abs(wanted).max())


def _count(row, text, wanted, gap):
  if text == wanted:
    row.equal += 1
    return
  place = next((i for i, (a, b) in enumerate(zip(text, wanted)) if a != b), min(len(text), len(wanted)) - 1)
  row.gap = max(row.gap or 0.0, gap(place))


class Peer:
  """A model as Transformers runs it, in float32 with eager attention.

  Raises:
    PeersMissingError: from `peers.load`, where the packages are not installed.
  """

  def __init__(self, model, torch):
    self._model, self._torch = model, torch
    model.generation_config.forced_eos_token_id = None  # it would end every text that is cut at its greatest length

  def logits(self, text, inputs=None) -> np.ndarray:
    """f32[P, V] of one text; of a model with an encoder, which reads or hears `inputs`, the decoder's."""
    ids = self._torch.tensor([text])
    given = {"input_ids": ids}
    if inputs is not None:
      read = "input_features" if np.ndim(inputs) == 2 else "input_ids"
      given = {read: self._torch.tensor(np.asarray(inputs)[None]), "decoder_input_ids": ids}
    with self._torch.inference_mode():
      return self._model(**given).logits[0].float().numpy()

  def generate(self, prompt, new_tokens: int, opening=(), banned=(), banned_first=()) -> list[int]:
    """Greedy text behind a prompt, up to and including what ends it. `opening` is what the decoder of a model with an
    encoder begins with. Of sound the text is made from logits, without `banned` ids and with none of `banned_first` in
    front: Whisper's own `generate` looks for languages and times."""
    begun = len(opening)
    if np.ndim(prompt) == 2:
      text = []
      while len(text) < new_tokens and text[-1:] != [self._model.config.eos_token_id]:
        logits = self.logits([*opening, *text], prompt)[-1]
        logits[[*banned, *([] if text else banned_first)]] = -np.inf
        text.append(int(logits.argmax()))
      return text
    ids = self._torch.tensor([prompt])
    with self._torch.inference_mode():
      out = self._model.generate(ids, attention_mask=self._torch.ones_like(ids), do_sample=False,
                                 max_new_tokens=new_tokens + max(begun - 1, 0))
    return out[0, begun or len(prompt):].tolist()
