"""Training and drafting see the same inputs: on one text a head gives the same law by both paths.

Published trainers went wrong exactly here: a second shift, positions that stand still, labels off by one, a block that
sees its own answers. Such a head trains well and drafts badly.
"""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax import starting
from specjax import verifiers
from specjax.proposers import medusa as medusa_proposer
from specjax.testing import tiny
from specjax.training import batches
from specjax.training import dflash
from specjax.training import eagle3
from specjax.training import medusa

TARGET = tiny.decoder(vocab=24, max_context=256)
LAYERS = (1, 2, 4)
SIZE = 40  # of every text, padded
IDS = np.array([0, 1, 2, 3, 5, 6, 7, 9, 10, 12, 13, 15, 16, 18, 20, 21])
PROMPTS = ([5, 1, 0, 7], [3, 9, 2, 11, 4, 4, 8, 1, 0, 6, 13, 22, 17], [14, 3])
DRAWN = proposers.Drawing(sampled=True)


def noisy(head, seed=1):
  """With weights that nothing was left out of: zeros and identities hide shifts."""
  keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(head))))
  return jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape, x.dtype) if
                      jnp.issubdtype(x.dtype, jnp.floating) else x, head)


def drafted(proposer, prompt, steps):
  """Text, drafted tokens and their laws f[N, V], after so many steps of decoding."""
  state = drivers.start(TARGET, proposer, [prompt], sampling.SamplingParams(temperature=1.0), max_new_tokens=40,
                        verifier=verifiers.Rejection())
  for _ in range(steps):
    state = drivers.advance(TARGET, proposer, state, np.int32(1), verifier=verifiers.Rejection())
  tree, _ = starting.draft(TARGET, proposer, state)
  size = int(tree.size[0])
  text = np.asarray(state.tokens[0, :int(state.length[0])]).tolist()
  return text, np.asarray(tree.tokens[0, 1:size]).tolist(), np.asarray(tree.q.dense(TARGET.vocab_size))[0, :size - 1]


def as_batch(text):
  """A text as a batch of one sequence, its features computed in one pass."""
  tokens = jnp.asarray([text + [0] * (SIZE - len(text))], jnp.int32)  # padding must change nothing
  features, hidden, top = compute(tokens)
  return batches.Batch(tokens=tokens, length=jnp.array([len(text)]), start=jnp.array([1]), features=features,
                       hidden=hidden, top=top)


@jax.jit
def compute(tokens):
  mask = jnp.tril(jnp.ones((1, SIZE, SIZE), bool))
  out = TARGET.forward(tokens, jnp.arange(SIZE, dtype=jnp.int32)[None], mask, TARGET.init_cache(1, 1), features=LAYERS)
  return jnp.concatenate(out.features, -1), out.hidden, jnp.argmax(TARGET.logits(out.hidden), -1).astype(jnp.int32)


passes = jax.jit(eagle3.passes, static_argnums=3)
head_logits = jax.jit(medusa.head_logits)
blocks = jax.jit(dflash.blocks)


def laws(logits, ids):
  """f[N, U] as laws over the target's ids."""
  return np.zeros((len(logits), TARGET.vocab_size)) + np.asarray(
      jnp.zeros((len(logits), TARGET.vocab_size)).at[:, ids].set(jax.nn.softmax(logits)))


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("change", [{}, {"recurs_normed": True}, {"residual_normed": True, "first_position": 1}],
                         ids=["plain", "recurs normed", "residual normed"])
def test_eagle3_sees_in_training_what_it_sees_in_drafting(prompt, steps, change):
  head = noisy(eagle3.init(TARGET, IDS, LAYERS, jax.random.key(0)))
  head = head.replace(config=type(head.config)(**{**vars(head.config), **change}))
  text, tokens, q = drafted(proposers.Eagle3(head=head, num_tokens=4, drawing=DRAWN), prompt, steps)
  batch = as_batch(text + tokens)
  logits = passes(head, TARGET.weights.embedding, batch, 4)[:len(tokens)]
  entry = len(text) - 2  # the token behind it is the pending one
  np.testing.assert_allclose(laws(jnp.stack([x[0, entry] for x in logits]), IDS), q, atol=2e-5)


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("own", [False, True], ids=["target's head", "own matrix"])
def test_medusa_sees_in_training_what_it_sees_in_drafting(prompt, steps, own):
  head = noisy(medusa.init(TARGET, IDS, 3, own_vocabulary=own))
  text, tokens, q = drafted(proposers.Medusa(head=head, num_tokens=3, drawing=DRAWN), prompt, steps)
  batch = as_batch(text + tokens)
  logits = head_logits(head, medusa_proposer.shared_rows(TARGET, head.replace(vocabulary=None)), batch)
  entry = len(text) - 2
  np.testing.assert_allclose(laws(jnp.stack([x[0, entry] for x in logits]), IDS)[:len(tokens)], q, atol=2e-5)


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
def test_dflash_sees_in_training_what_it_sees_in_drafting(prompt, steps, causal):
  head = noisy(dflash.init(TARGET, IDS, LAYERS, layers=2, block=4, mask_id=23, key=jax.random.key(0), causal=causal))
  text, tokens, q = drafted(proposers.DFlash(head=head, num_tokens=3, drawing=DRAWN), prompt, steps)
  anchor = len(text) - 1
  given = dflash.Anchored(as_batch(text + tokens + [23] * 3), jnp.array([[anchor, anchor - 1]]))  # another beside it
  hidden = blocks(head, TARGET.weights.embedding, given)[0, 0, 1:]
  logits = hidden @ TARGET.weights.head[IDS].T
  np.testing.assert_allclose(laws(logits, IDS)[:len(tokens)], q, atol=2e-5)


def test_a_dflash_block_sees_nothing_of_what_it_is_asked_for():
  head = noisy(dflash.init(TARGET, IDS, LAYERS, layers=2, block=4, mask_id=23, key=jax.random.key(0)))
  text = PROMPTS[1]
  run = lambda tokens: blocks(head, TARGET.weights.embedding, dflash.Anchored(as_batch(tokens), jnp.array([[6]])))
  np.testing.assert_array_equal(run(text), run(text[:7] + [1] * (len(text) - 7)))
  assert not np.allclose(run(text), run(text[:5] + [1] + text[6:]))


def test_a_pass_of_eagle3_sees_no_feature_behind_its_entry():
  head = noisy(eagle3.init(TARGET, IDS, LAYERS, jax.random.key(0)))
  batch = as_batch(PROMPTS[1])
  other = batch.replace(features=batch.features.at[:, 7:].add(1.0))
  for i, (one, two) in enumerate(zip(passes(head, TARGET.weights.embedding, batch, 3),
                                     passes(head, TARGET.weights.embedding, other, 3))):
    np.testing.assert_array_equal(one[:, :7], two[:, :7], err_msg=f"pass {i}")
    assert not np.allclose(one[:, 7:], two[:, 7:])
