"""Learning between requests: which places are kept, what the learner computes there, and drafts that get better."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax import starting
from specjax import static_trees
from specjax import testing
from specjax import verifiers
from specjax.testing import tiny
from specjax.training import distill
from specjax.training import learners
from specjax.training import online

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = tiny.decoder(layers=3)
TARGET = TARGET.replace(weights=TARGET.weights.replace(head=3 * TARGET.weights.head))  # sure of what comes next
IDS = tuple(i for i in range(24) if i not in (4, 11, 17))
DRAWN = proposers.Drawing(sampled=True)
RULE = verifiers.Rejection()
KINDS = {
    "draft_model": lambda **more: proposers.DraftModel(model=TARGET.keep((0, 1)), num_tokens=3, **more),
    "medusa": lambda **more: proposers.Medusa(head=tiny.medusa(TARGET, IDS), num_tokens=3, **more),
    "eagle3": lambda **more: proposers.Eagle(head=tiny.eagle3(TARGET, IDS), num_tokens=3, **more)}
PROMPTS = ([5, 1, 0, 7], [3, 9, 2, 11, 4, 4, 8, 1, 0, 6, 13, 22, 17], [14, 3])
draft = jax.jit(decode.draft)
step = jax.jit(lambda proposer, state, tree: decode.commit(
    TARGET, proposer, state, decode.verify(TARGET, proposer, RULE, state, tree)))


def served(proposer, steps):
  """The last state of some rows, their texts, and by (row, token) the depth of a wrong draft and its law f[V]."""
  state = drivers.start(TARGET, proposer, PROMPTS, sampling.SamplingParams(temperature=1.0), max_new_tokens=40,
                        verifier=RULE)
  wrong = {}
  for _ in range(steps):
    before = np.asarray(state.length)
    tree, own = draft(TARGET, proposer, state)
    state = step(proposer, state.replace(proposer=own), tree)
    text, after, size, tokens, law = jax.device_get(
        (state.tokens, state.length, tree.size, tree.tokens, tree.q.dense(TARGET.vocab_size)))
    for row, (begin, end) in enumerate(zip(before, after)):
      for i in range(min(size[row] - 1, end - begin)):
        if tokens[row, 1 + i] != text[row, begin + i]:
          wrong[row, int(begin) - 1 + i] = i, law[row, i]
          break
  return state, [row[:length].tolist() for row, length in zip(text, after)], wrong


@pytest.fixture(scope="module", params=KINDS)
def kept(request):
  """A proposer that learns, and what it saw in eight steps."""
  proposer = online.online(TARGET, KINDS[request.param](drawing=DRAWN), max_tokens=40)
  return request.param, proposer, *served(proposer, 8)


def test_kept_are_the_texts_and_the_places_of_the_first_wrong_drafts(kept):
  _, _, state, texts, wrong = kept
  seen = jax.device_get(state.proposer.texts)
  assert len(wrong) > 6 and len({depth for depth, _ in wrong.values()}) > 1
  assert {key: seen.depth[key] - 1 for key in zip(*np.nonzero(seen.depth))} == {key: i for key, (i, _) in wrong.items()}
  for row, text in enumerate(texts):
    assert seen.length[row] == len(text) - 1 and seen.tokens[row, :len(text) - 1].tolist() == text[:-1]
    hidden = distill.hidden(TARGET, jnp.asarray([text]))
    np.testing.assert_allclose(seen.hidden[row, :len(text) - 1], hidden[0, :-1], atol=2e-5)


def test_the_learner_computes_the_law_that_was_drafted_from(kept):
  """A shift of one place or one depth is another law."""
  kind, proposer, state, _, wrong = kept
  learner, texts = learners.BY_NAME[kind], state.proposer.texts
  keys = sorted(wrong)
  pick = lambda values: learners.Places(
      *(jnp.asarray(x, jnp.int32) for x in zip(*values)), counted=jnp.ones(len(values), bool))
  places = pick([(row, token, wrong[row, token][0]) for row, token in keys])
  ids = learner.ids(proposer.inner)
  laws = lambda places: np.asarray(jax.nn.softmax(jax.jit(lambda: learner.logits(
      learner.part(proposer.inner), proposer.frozen, ids, texts, places, 3))()))
  drafted = np.stack([wrong[key][1] for key in keys])
  drafted = drafted if ids is None else drafted[:, np.asarray(ids)]
  np.testing.assert_allclose(laws(places), drafted, atol=1e-4)
  shifted = [places.replace(token=places.token - 1)]
  if kind != "draft_model":  # whose law of a place knows no depth
    shifted.append(places.replace(depth=(places.depth + 1) % 3))
  for other in shifted:
    assert np.median(np.abs(laws(other) - drafted).max(1)) > 0.02


def test_the_loss_is_the_mean_cross_entropy_with_the_targets_law_at_these_places(kept):
  kind, proposer, state, texts, wrong = kept
  keys, rows = sorted(wrong), []
  ids = learners.BY_NAME[kind].ids(proposer.inner)
  ids = np.arange(24) if ids is None else np.asarray(ids)
  for row, token in keys:
    depth, law = wrong[row, token]
    logits = np.asarray(TARGET.logits(distill.hidden(TARGET, jnp.asarray([texts[row]]))), np.float64)[0, token, ids]
    p = np.exp(logits - logits.max())
    rows.append(-(p / p.sum() * np.log(law[ids].astype(np.float64))).sum())
  pad = lambda values: jnp.asarray([*values, 0, 0], jnp.int32)
  places = learners.Places(text=pad(row for row, _ in keys), token=pad(token for _, token in keys),
                           depth=pad(wrong[key][0] for key in keys), counted=pad([1] * len(keys)) > 0)
  learner = learners.BY_NAME[kind]
  found = online.divergence(learner.part(proposer.inner), proposer.frozen, learner.ids(proposer.inner),
                            state.proposer.texts, places, kind=kind, depths=3, loss="soft_ce")
  assert float(found) == pytest.approx(np.mean(rows), rel=1e-3)


def test_texts_longer_than_what_is_kept_are_cut(kept):
  kind, *_ = kept
  proposer = online.online(TARGET, KINDS[kind](drawing=DRAWN), max_tokens=12)
  state, texts, wrong = served(proposer, 8)
  seen = jax.device_get(state.proposer.texts)
  assert max(map(len, texts)) > 20 and seen.length.max() == 12
  assert set(zip(*np.nonzero(seen.depth))) == {key for key in wrong if key[1] < 12}
  assert seen.tokens[1].tolist() == texts[1][:12]


# --- between requests -------------------------------------------------------------------------------------------------


def stream(proposer, count, prompts=99):
  """Requests one by one, so many `prompts` in turn; the proposer at the end, and of each request its prompt, its text
  and its tokens a step."""
  drawn, found = np.random.default_rng(0).integers(0, 23, (prompts, 4)).tolist(), []
  for index in range(count):
    prompt = drawn[index % prompts]
    result = drivers.generate(TARGET, proposer, [prompt], max_new_tokens=40)
    proposer = proposer.remember(result.proposer_state, result.token_ids)
    found.append((prompt, result.token_ids[0], float(result.counters.output_tokens[0] / result.counters.steps[0])))
  return proposer, found


def weights_of(proposer):
  return learners.BY_NAME[proposer.kind].part(proposer.inner)


def test_it_learns_after_so_many_requests_and_forgets(kept):
  kind, *_ = kept
  first = online.online(TARGET, KINDS[kind](), requests=3, steps=2, learning_rate=0.01, max_tokens=48)
  two, _ = stream(first, 2)
  jax.tree.map(np.testing.assert_array_equal, weights_of(two), weights_of(first))
  assert int(two.filled) == 2 and np.asarray(two.kept.depth).any()
  programs = drivers.compiled_programs()
  result = drivers.generate(TARGET, two, [[9, 8, 7, 6]], max_new_tokens=40)
  three = two.remember(result.proposer_state, result.token_ids)
  assert int(three.filled) == 0 and not np.asarray(three.kept.depth).any()
  changed = jax.tree.map(lambda a, b: bool(jnp.abs(a - b).max() > 0), weights_of(three), weights_of(two))
  assert all(jax.tree.leaves(changed))
  drivers.generate(TARGET, three, [[9, 8, 7, 6]], max_new_tokens=40)
  assert drivers.compiled_programs() == programs  # nothing is compiled again
  empty = three.forget()
  jax.tree.map(np.testing.assert_array_equal, empty, first)
  assert jax.tree.structure(empty) == jax.tree.structure(first)


def test_rows_of_a_batch_are_requests_of_their_own(kept):
  kind, *_ = kept
  proposer = online.online(TARGET, KINDS[kind](), requests=2, steps=1, learning_rate=0.01, max_tokens=48)
  result = drivers.generate(TARGET, proposer, PROMPTS, max_new_tokens=30)
  after = proposer.remember(result.proposer_state, result.token_ids)
  assert int(after.filled) == 1
  np.testing.assert_array_equal(after.kept.tokens[0], result.proposer_state.texts.tokens[2])
  assert np.abs(np.asarray(jax.tree.leaves(weights_of(after))[0] - jax.tree.leaves(weights_of(proposer))[0])).max() > 0


def test_places_whose_token_is_never_drafted_teach_nothing():
  """A head of some ids has no law that could be right there."""
  proposer = online.online(TARGET, KINDS["medusa"](), requests=2, steps=1, learning_rate=0.01, max_tokens=48)
  kept = proposer.kept
  tokens = kept.tokens.at[0, 6].set(4)  # not among the ids
  full = proposer.replace(kept=kept.replace(tokens=tokens, length=kept.length + 20, depth=kept.depth.at[0, 5].set(1)),
                          filled=jnp.int32(2))
  jax.tree.map(np.testing.assert_array_equal, weights_of(full.learned()), weights_of(full))
  other = full.replace(kept=full.kept.replace(tokens=tokens.at[0, 6].set(5)))
  assert float(jnp.abs(weights_of(other.learned()).bias[0] - weights_of(full).bias[0]).max()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_get_better_and_the_text_stays_the_targets(kind):
  """On a narrow stream, three prompts in turn: by far more tokens a step at its end than without learning."""
  proposer = online.online(TARGET, KINDS[kind](), requests=3, steps=10, learning_rate=0.01, max_tokens=48)
  _, found = stream(proposer, 24, prompts=3)
  _, frozen = stream(KINDS[kind](), 3, prompts=3)
  rates, before = ([tokens for *_, tokens in rows] for rows in (found, frozen))
  assert np.mean(rates[-3:]) > np.mean(before) + 0.15, (rates, before)
  assert rates[:3] == before  # nothing was learnt yet
  assert [text for _, text, _ in found] == [text for _, text, _ in frozen] * 8
  plain = [drivers.generate(TARGET, proposers.Plain(), [prompt], max_new_tokens=40).token_ids[0]
           for prompt, *_ in frozen]
  assert plain == [text for _, text, _ in frozen]


def test_what_is_refused():
  inner = KINDS["medusa"]()
  for wrong, message in ((proposers.NGram(), "NGram does not learn online"),
                         (proposers.DraftModel(model=testing.DummyTarget(vocab=24)), "with a decoder"),
                         (proposers.Eagle(head=tiny.eagle(TARGET, IDS)), "EAGLE-3 do"),
                         (proposers.Medusa(head=inner.head, shape=static_trees.best_first((0.5, 0.2), 6, 3)),
                          "only chains")):
    with pytest.raises(ValueError, match=message):
      online.online(TARGET, wrong)
  for name, value in (("requests", 0), ("steps", 0), ("max_tokens", 0), ("learning_rate", 0.0), ("loss", "magic")):
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
      online.online(TARGET, inner, **{name: value})
  with pytest.raises(ValueError, match="online"):
    online.online(testing.DummyTarget(vocab=24), inner)
