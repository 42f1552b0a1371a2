"""Exactness on a device in seconds: drafts that are all right or all wrong must change nothing of a greedy text.

A drafter is told the text that plain decoding wrote. As an always-wrong one it shows that rejected tokens leave no
trace, as a self drafter that accepted ones are placed and masked as if they had come one by one. In float32, with
products in full precision, both must give the plain text. In bfloat16 wider steps round otherwise: where a text
departs from the plain one, the lead of the best logit over the second is reported.

Letters: B batch rows, S tokens of a text, P places.
"""
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import drivers
from specjax import testing
from specjax import tree as tree_lib
from specjax.proposers import base

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], [1, 6, 1, 8, 0, 3, 3]]
_NEW, _ROOM = 40, 64  # output tokens, and room for a prompt and them
_FACES = {"always wrong": (3, 1), "self": (3, 0)}  # tokens that are drafted, and what is added to each


@struct.dataclass
class Told(base.Stateless):
  """Drafts from texts that it is told. What differs between its faces are leaves: one program is all of them."""
  texts: jax.Array  # i32[B, S]; prompt and output
  limit: jax.Array  # i32; tokens of a draft; 0: it is plain decoding
  shift: jax.Array  # i32; added to every token, modulo the vocabulary: but for 0 all are wrong
  num_tokens: int = struct.field(pytree_node=False, default=3)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache, keys
    place = context.length[:, None] + jnp.arange(self.num_tokens, dtype=jnp.int32)[None]
    truth = jnp.take_along_axis(self.texts, jnp.minimum(place, self.texts.shape[1] - 1), axis=1)
    count = jnp.minimum(jnp.clip(context.budget - 1, 0, self.num_tokens), self.limit)
    return tree_lib.chain(context.pending, (truth + self.shift) % target.vocab_size,
                          jnp.where(context.active, count, 0).astype(jnp.int32)), state


def run() -> dict:
  """{"exact": whether float32 was, "float32", "bfloat16": by drafter, see `compare`}. Weights are random; texts mean
  nothing."""
  target = testing.tiny.decoder(layers=2)
  with jax.default_matmul_precision("highest"):
    wide = compare(target, jnp.float32)
  narrow = compare(jax.tree.map(lambda x: x.astype(jnp.bfloat16), target), jnp.bfloat16)
  return {"exact": all(line["exact"] for line in wide.values()), "float32": wide, "bfloat16": narrow}


def compare(target, dtype) -> dict:
  """By drafter: rows whose text is the plain one, of how many; drafted and accepted tokens, and whether none is
  accepted of "always wrong" and all of "self"; the greatest top-2 gap at a first difference, in logits, and the
  distance of neighbouring numbers of `dtype`, that of the weights, at the best logit there."""
  plain = _generate(target, [[]] * len(PROMPTS), 0, 0).token_ids
  found = {}
  for name, (limit, shift) in _FACES.items():
    result = _generate(target, plain, limit, shift)
    drafted, accepted = (int(x.sum()) for x in (result.counters.drafted_tokens, result.counters.accepted_tokens))
    equal = [a == b for a, b in zip(plain, result.token_ids, strict=True)]
    leads = [_lead(target, dtype, prompt + _shared(a, b))
             for prompt, a, b in zip(PROMPTS, plain, result.token_ids) if a != b]
    gap, step = max(leads, default=(None, None))
    found[name] = {"equal_rows": sum(equal), "rows": len(equal), "drafted": drafted, "accepted": accepted,
                   "exact": all(equal) and accepted == (0 if shift else drafted) and drafted > 0,
                   "first_difference_gap": gap, "step_of_the_type": step}
  return found


def _generate(target, outputs, limit, shift):
  texts = np.zeros((len(PROMPTS), _ROOM), np.int32)
  for row, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
    texts[row, :len(prompt) + len(output)] = prompt + output
  told = Told(texts=jnp.asarray(texts), limit=jnp.int32(limit), shift=jnp.int32(shift))
  return drivers.generate(target, told, PROMPTS, max_new_tokens=_NEW)


def _shared(a, b):
  """What two texts begin with alike."""
  return a[:next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))]


def _lead(target, dtype, text):
  """The lead of the best logit over the second behind a text, and the step of `dtype` at the best one."""
  tokens = np.zeros((1, _ROOM), np.int32)
  tokens[0, :len(text)] = text
  logits = np.asarray(_logits(target, tokens, np.tril(np.ones((1, _ROOM, _ROOM), bool))))
  second, first = np.sort(logits[len(text) - 1])[-2:]
  return float(first - second), float(jnp.finfo(dtype).eps * 2.0 ** np.floor(np.log2(abs(first))))


@jax.jit
def _logits(target, tokens, mask):
  """f32[P, V]: of one text, without a cache."""
  out = target.forward(tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], mask, target.init_cache(1, 8))
  return target.logits(out.hidden)[0]
