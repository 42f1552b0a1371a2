"""The ablations that train models, at a size without meaning: what is held out, what is measured, how it is judged."""
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from experiments.ablations import base
from experiments.ablations import registry
from experiments.ablations import toy_acceptance
from experiments.ablations import toy_drafting
from experiments.ablations import toy_heads
from experiments.ablations import toy_models
from experiments.ablations import toy_training
from specjax.testing import tiny
from specjax.training import batches
from specjax.training import corpus
from specjax.training import distill
from specjax.training import eagle
from specjax.training import shifts

pytestmark = pytest.mark.usefixtures("quick_compile")
TOYS = [ablation.name for module in (toy_drafting, toy_training) for ablation in module.ABLATIONS]
SIZE = toy_models.TINY


@pytest.fixture(scope="module")
def lab():
  return toy_models.lab(SIZE, 0)


@pytest.fixture
def untrained(monkeypatch):
  """Heads as they begin: what is tested with them is not what they learn."""
  def first(size, seed, kind, share=1.0):
    trainer = toy_heads.KINDS[kind].trainer(toy_models.lab(size, seed), share, toy_heads.all_ids(size), seed)
    return trainer.head(trainer.params)

  monkeypatch.setattr(toy_heads, "trained", first)
  toy_heads.measured.cache_clear()
  yield
  toy_heads.measured.cache_clear()


def test_the_questions():
  assert {item for name in TOYS for item in registry.ALL[name].items} == {14, 15, 16, 17, 19, 20, 25}
  assert all(registry.ALL[name].kind == "toy" for name in TOYS) and set(TOYS) <= set(registry.ALL)


def test_nothing_that_is_measured_was_trained_on(lab):
  train, written = corpus.read(lab.folder, 0), corpus.read(lab.written, 0)
  opening = lambda rows, i: rows[i][:toy_models.OPENING].tobytes()
  trained = {opening(train, i) for i in range(len(train))}
  held = {ids[:toy_models.OPENING].tobytes() for ids in lab.rows.held}
  assert len(written) > 3 and len(train) > 5 * len(written)
  assert not trained & held and {opening(written, i) for i in range(len(written))} <= held
  assert trained == {ids[:toy_models.OPENING].tobytes() for ids in lab.rows.documents if len(ids) > toy_models.OPENING}
  # A share of the text is some of that very text; what tables are made from is none of it.
  some, whole = lab.data(share=.25), lab.data()
  assert set(some.places) < set(whole.places) and len(whole.held) and not set(whole.held) & set(whole.places)
  assert .15 * whole.training_tokens < some.training_tokens <= .25 * whole.training_tokens


def test_ids(lab):
  """Rare ids share the last one, the end of a text is no text's, and the split looks at the prompt alone."""
  documents, held, ends = toy_models._text(SIZE)
  count = np.bincount(np.concatenate([ids for ids, _ in documents]), minlength=SIZE.ids)
  assert len(count) == SIZE.ids and ends == SIZE.ids - 2 and not count[ends] and count[-1] and count[:ends].all()
  assert len(documents) + len(held) == SIZE.sequences and lab.target.config.eos_ids == (ends,)
  more = toy_models._text(dataclasses.replace(SIZE, sequences=SIZE.sequences + 20))
  assert [start for _, start in more[1]][:len(held)] == [start for _, start in held]


def test_what_is_measured_is_the_targets_own_text(lab):
  wanted = toy_models._written(lab.target, [ids[:toy_models.OPENING] for ids in lab.rows.held], SIZE, 0)
  kept = corpus.read(lab.written, 0)
  assert [ids.tolist() for ids, _ in wanted] == [kept[i].tolist() for i in range(len(kept))]
  assert set(kept.starts.tolist()) == {toy_models.OPENING} and np.diff(kept.offsets).max() <= toy_models.LONGEST
  same = zip(lab.measured(lab.fused), lab.measured(lab.last), strict=True)
  for fused, last in same:
    np.testing.assert_array_equal(fused.tokens, last.tokens)
    np.testing.assert_array_equal(fused.hidden, last.hidden)
    assert fused.features.shape[-1] == 2 * last.features.shape[-1] == 2 * SIZE.width


def test_features_are_the_targets(lab):
  """Both sets of layers, which one pass computed."""
  batch = lab.measured(lab.fused)[0]
  tokens = jnp.asarray(batch.tokens)
  size = tokens.shape[1]
  out = lab.target.forward(tokens, jnp.broadcast_to(jnp.arange(size), tokens.shape),
                           jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (len(tokens), size, size)),
                           lab.target.init_cache(len(tokens), 1), features=lab.fused + lab.last)
  real = np.arange(size) < batch.length[:, None]
  for layers, given in ((lab.fused, batch), (lab.last, lab.measured(lab.last)[0])):
    wanted = np.concatenate([out.features[(lab.fused + lab.last).index(layer)] for layer in layers], -1)
    np.testing.assert_allclose(given.features[real].astype(np.float32), wanted[real], atol=5e-3, rtol=5e-3)
    np.testing.assert_allclose(given.hidden[real].astype(np.float32), out.hidden[real], atol=5e-3, rtol=5e-3)


def test_a_replay_is_a_decoding_run():
  """Steps of `specjax.generate` with the same head, request by request."""
  target = tiny.decoder(seed=1)
  prompts, new, depth = [[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 9, 3]], 40, 3
  ids = np.arange(24, dtype=np.int32)
  head = eagle.init(target, ids, jax.random.key(0))
  plain = specjax.generate(target, specjax.proposers.Plain(), prompts, max_new_tokens=new)
  tokens = np.concatenate([prompts, plain.tokens], axis=1).astype(np.int32)
  hidden = distill.hidden(target, jnp.asarray(tokens))
  batch = batches.Batch(tokens=tokens, length=np.full(4, 4 + new), start=np.full(4, 4), features=hidden, hidden=hidden,
                        top=None)
  made = toy_heads.KINDS["EAGLE"].logits(head, shifts.frozen(target, ids), batch, depth)
  replay = toy_acceptance.of_chain(np.asarray(toy_acceptance.ranks(made, tokens)), toy_acceptance.room_of(batch))
  drafted = specjax.generate(target, specjax.proposers.Eagle(head=head, num_tokens=depth), prompts, max_new_tokens=new)
  np.testing.assert_array_equal(drafted.tokens, plain.tokens)
  assert replay.steps[:, 1].tolist() == [new] * 4
  np.testing.assert_array_equal(replay.steps[:, 0], drafted.counters.steps)
  assert 1.05 < toy_acceptance.tokens(replay) < depth + 1


@pytest.mark.parametrize("reads", toy_heads.INPUTS)
def test_inputs_are_cut(reads):
  """Of every pass: neither the target's features nor the head's own reach it, or no token does."""
  target = tiny.decoder(vocab=24)
  ids, rng = np.arange(24, dtype=np.int32), np.random.default_rng(0)
  whole = eagle.init(target, ids, jax.random.key(0))
  frozen = shifts.frozen(target, ids)

  def logits(head, tokens, hidden):
    batch = batches.Batch(tokens=tokens, length=np.full(1, 12), start=np.zeros(1, np.int32), features=hidden,
                          hidden=hidden, top=None)
    return np.stack([x for x in toy_heads.KINDS["EAGLE"].logits(head, frozen, batch, 3)])[:, :, :8]

  tokens = [rng.integers(0, 24, (1, 12)).astype(np.int32) for _ in range(2)]
  hidden = [rng.standard_normal((1, 12, 16)).astype(np.float32) for _ in range(2)]
  head = toy_heads.cut(whole, reads)
  kept = logits(head, tokens[0], hidden[0])
  other_tokens, other_hidden = logits(head, tokens[1], hidden[0]), logits(head, tokens[0], hidden[1])
  changed, same = (other_tokens, other_hidden) if reads == "token" else (other_hidden, other_tokens)
  np.testing.assert_array_equal(kept, same)
  assert np.abs(kept - changed).max(axis=(1, 2, 3)).min() > 1e-3
  # The whole head reads both, and the cut one begins with what is left passing as it is.
  assert all(np.abs(logits(whole, t, h) - logits(whole, tokens[0], hidden[0])).max() > 1e-3
             for t, h in ((tokens[1], hidden[0]), (tokens[0], hidden[1])))
  columns = head.fuse[:, :16] if reads == "token" else head.fuse[:, 16:]
  assert np.abs(np.asarray(columns) - np.eye(16)).max() < .1


def test_training_changes_a_head(lab):
  head = toy_heads.trained(SIZE, 0, "EAGLE, tokens alone")
  trainer = toy_heads.KINDS["EAGLE, tokens alone"].trainer(lab, 1.0, toy_heads.all_ids(SIZE), 0)
  before = trainer.head(trainer.params)
  assert isinstance(head, toy_heads.CutHead) and head.reads == "token"
  assert np.abs(np.asarray(head.fuse - before.fuse)).max() > 1e-4
  assert toy_heads.trained(SIZE, 0, "EAGLE, tokens alone") is head  # once a process


@pytest.mark.parametrize("name", TOYS)
def test_every_one_is_judged(name, untrained):
  result = registry.ALL[name].run(base.Options(), size=SIZE)
  assert result.verdict in base.VERDICTS and result.why.endswith(".") and result.rows
  assert len(result.columns) == len(set(result.columns))
  labels = {series.label for series in result.curves}
  for series in result.curves:
    assert all(value is None or np.isfinite(value) for value in series.y)
  assert {points.of for points in result.published} <= {None, *labels}
  assert all(len(points.source) > 10 for points in result.published)
  if result.ticks:
    assert max(max(series.x) for series in result.curves) < len(result.ticks)


def test_losses_lead_apart(lab):
  """Every divergence begins at the same draft model, and its acceptance is a chance at each place."""
  found = toy_training._distilled(SIZE, 0)
  assert list(found) == ["text alone", "forward KL", "reverse KL", "JSD", "TV"]
  rates = np.asarray([[rows[0] / rows[1] for rows in by_heat] for by_heat in found.values()])
  assert rates.shape[1:] == (3, len(corpus.read(lab.written, 0))) and (rates >= 0).all() and (rates <= 1 + 1e-6).all()
  assert len(np.unique(rates[:, 2].mean(1))) == 5


def replay(*rates, rows=40, room=30):
  """Chains whose draft i is right in a share rates[i] of the cases."""
  place = np.tile(np.arange(room, 0, -1), (rows, 1))
  right = np.random.default_rng(0).random((rows, room, len(rates))) < np.asarray(rates)
  return toy_acceptance.Replay(np.cumprod(right, -1, dtype=np.float64), place)


def of_counts(accepted, room, depth):
  return toy_acceptance.Replay((np.asarray(accepted)[..., None] > np.arange(depth)).astype(float), np.asarray(room))


def test_measures():
  found = of_counts([[0, 0, 2, 1, 0, 1, 0, 0]], [[0, 0, 6, 5, 4, 3, 2, 1]], 2)
  # Three tokens from the third place on, then two from the sixth, and one from the last.
  assert found.steps.tolist() == [[3, 6]] and toy_acceptance.tokens(found) == 2
  assert found.hits.tolist() == [[3, 1]] and found.tried.tolist() == [[6, 3]]
  np.testing.assert_allclose(toy_acceptance.conditional(found), [.5, 1 / 3])
  assert toy_acceptance.pooled(found) == pytest.approx(1 / 3)
  assert found.upto(1).steps.tolist() == [[4, 6]] and found.upto(0).steps.tolist() == [[6, 6]]
  # A chain that would go on behind the end of the text.
  assert of_counts([[3, 3, 3]], [[3, 2, 1]], 3).steps.tolist() == [[1, 3]]
  made = replay(.8, .5, .25, rows=400)
  np.testing.assert_allclose(toy_acceptance.conditional(made), [.8, .5, .25], atol=.03)


def test_drawn_drafts_are_counted_in_law():
  """Over all texts of a Markov chain: accepted drafts and steps are those of the process itself, enumerated."""
  rng = np.random.default_rng(0)
  ids, length, depth = 3, 4, 2
  p, q = rng.dirichlet(np.ones(ids), (2, ids))
  both = np.minimum(p, q)

  @functools.cache
  def steps(before, left):
    """Expected steps of an answer: drafts are accepted with min(p, q), and what is left of p ends the step."""
    def walk(token, drafts, left):
      if not drafts:
        return sum(p[token, y] * steps(y, left - 1) for y in range(ids))
      return sum(both[token, y] * walk(y, drafts - 1, left - 1) + (p - both)[token, y] * steps(y, left - 1)
                 for y in range(ids))
    return 1 + walk(before, min(depth, left - 1), left) if left else 0

  texts = np.asarray([(0, 1, *rest) for rest in itertools.product(range(ids), repeat=length)], np.int32)
  chance = np.prod([p[texts[:, i], texts[:, i + 1]] for i in range(1, length + 1)], axis=0)
  laws = lambda table, by: jnp.asarray(np.log(table)[np.pad(texts[:, by:], ((0, 0), (0, by)))])
  found = toy_acceptance.ratios([laws(q, 1 + i) for i in range(depth)], laws(p, 0), jnp.asarray(texts))
  room = np.tile([4, 3, 2, 1, 0, 0], (len(texts), 1))
  made = toy_acceptance.of_drawn(np.asarray(found), room)
  assert chance.sum() == pytest.approx(1) and chance @ made.steps[:, 0] == pytest.approx(steps(1, length), rel=1e-5)
  np.testing.assert_allclose(chance @ made.survival[:, 0], [both[1].sum(), (both[1] @ both).sum()], rtol=1e-5)


@pytest.mark.parametrize("logits, label, rank", [((1.0, 3.0, 2.0), 0, 2), ((1.0, 3.0, 2.0), 2, 1),
                                                 ((5.0, 5.0, 1.0), 0, 0), ((5.0, 5.0, 1.0), 1, 1)])
def test_ranks(logits, label, rank):
  """Entry 0 stands for the token two places ahead, of equal ids the lower one comes first."""
  made = jnp.zeros((1, 3, 3)).at[0, 0].set(jnp.asarray(logits))
  assert toy_acceptance.ranks([made, made], jnp.asarray([[2, 1, label]]))[0, 0, 0] == rank


def test_trees():
  rng = np.random.default_rng(0)
  found, room = rng.integers(0, 3, (6, 20, 2)), np.full((6, 20), 9)
  chain = toy_acceptance.of_chain(found, room)
  path = toy_acceptance.of_tree(found, room, (0, 0, 1), (0, 0, 0))
  np.testing.assert_array_equal(path.survival, chain.survival)
  # The root's two best, and below the second its best.
  tree = toy_acceptance.of_tree(found, room, (0, 0, 0, 2), (0, 0, 1, 0))
  wanted = np.where(found[..., 0] == 0, 1, np.where(found[..., 0] == 1, 1 + (found[..., 1] == 0), 0))
  np.testing.assert_array_equal(tree.survival.sum(-1), wanted)


def test_claims_are_judged_by_their_error():
  judge = toy_acceptance.judge
  assert judge({"a": (.1, .04), "b": (1.0, 0.0)}) == (base.AGREES, "")
  assert judge({"a": (.1, .06)}) == (base.CANNOT_SAY, "Not told apart from chance: a (+0.100, error 0.060).")
  assert judge({"a": (-.1, .06)})[0] == base.CANNOT_SAY and judge({"a": (0.0, 0.0)})[0] == base.CANNOT_SAY
  verdict, words = judge({"a": (-.1, .04), "b": (.1, .06), "c": (.2, .01)})
  assert verdict == base.DIFFERS and words.startswith("Not so here: a (-0.100") and "c (" not in words
  value, error = toy_acceptance.gap(lambda rows: float(np.mean(rows % 2)), 100)
  assert value == .5 and error == pytest.approx(.05, rel=.2)


@pytest.mark.parametrize("ablation, fits, against", [
    (toy_drafting.self_fed, {"EAGLE": (.8, .7, .5), "HASS": (.8, .75, .7), "EAGLE-3": (.8, .8, .8)},
     {"EAGLE": (.8, .8, .8), "HASS": (.8, .75, .7), "EAGLE-3": (.8, .7, .5)}),
    (toy_drafting.dependence,
     {"Medusa": (.6, .3, .2), "Hydra": (.6, .5, .4), "Hydra++": (.7, .7, .6), "EAGLE": (.8, .8, .8)},
     {"Medusa": (.8, .8, .8), "Hydra": (.7, .7, .6), "Hydra++": (.6, .5, .4), "EAGLE": (.6, .3, .2)}),
    (toy_training.ladder,
     {"EAGLE": (.6, .5), "HASS": (.6, .5), "EAGLE-3, one feature": (.7, .6), "EAGLE-3": (.8, .8)},
     {"EAGLE": (.8, .8), "HASS": (.6, .5), "EAGLE-3, one feature": (.7, .6), "EAGLE-3": (.6, .5)}),
    (toy_training.inputs,
     {"EAGLE, tokens alone": (.5, .4), "EAGLE, features alone": (.65, .5), "EAGLE": (.8, .7)},
     {"EAGLE, tokens alone": (.8, .7), "EAGLE, features alone": (.65, .5), "EAGLE": (.5, .4)})])
def test_verdicts_follow_from_what_is_found(monkeypatch, ablation, fits, against):
  size = dataclasses.replace(SIZE, passes=3)
  for rates, verdict in ((fits, base.AGREES), (against, base.DIFFERS)):
    def fake(size, seed, kind, depth, rates=rates):
      return replay(*[rates[kind][min(i, len(rates[kind]) - 1)] for i in range(depth)], rows=400)

    monkeypatch.setattr(toy_heads, "replay", fake)
    assert ablation(base.Options(), size).verdict == verdict


def test_the_verdict_on_more_text(monkeypatch, lab):
  del lab
  rates = {("EAGLE", 1.0): .6, ("EAGLE-3", 1.0): .8}
  for turned, verdict in ((False, base.AGREES), (True, base.DIFFERS)):
    def fake(size, seed, kind, depth, share):
      value = rates.get((kind, share), .5)
      return replay(1.3 - value if turned else value, .5, rows=400)

    monkeypatch.setattr(toy_heads, "replay", fake)
    assert toy_training.amount(base.Options(), SIZE).verdict == verdict
