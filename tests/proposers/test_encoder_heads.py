"""An EAGLE-3 head of a target with an encoder: its text is the decoder's, in drafting and in training."""
import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from experiments.harness import training
from experiments.harness import training_data
from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax import starting
from specjax import verifiers
from specjax.testing import tiny
from specjax.training import batches
from specjax.training import by_depth
from specjax.training import corpus
from specjax.training import eagle3
from specjax.training import recorder
from specjax.training import shifts
from specjax.training import trainers

pytestmark = pytest.mark.usefixtures("quick_compile")
FOLDER = pathlib.Path(__file__).parents[1] / "fixtures" / "encoder_decoder" / "t5"
TARGET, TOKENIZER = specjax.load(str(FOLDER))
LAYERS = trainers.layers_of_eagle3(TARGET.config.layers)
IDS = np.arange(2, TARGET.vocab_size, 2)
INPUTS = [[5, 9, 31, 6, 1], [44, 7, 1], [3] * 20 + [1]]
DRAWN = proposers.Drawing(sampled=True)


@pytest.fixture(scope="module")
def head():
  """One whose every part says something, with room for the decoder's texts but not for the inputs before them."""
  made = eagle3.init(TARGET, IDS, LAYERS, jax.random.key(0))
  made = made.replace(config=dataclasses.replace(made.config, max_context=20))
  keys = iter(jax.random.split(jax.random.key(1), 64))
  noisy = lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape, x.dtype) if x.ndim == 2 else x
  return jax.tree.map(noisy, made)


@pytest.fixture(scope="module")
def plain():
  return drivers.generate(TARGET, proposers.Plain(), INPUTS, max_new_tokens=14, eos_ids=())


@pytest.mark.parametrize("make", [
    lambda head: proposers.Eagle(head=head, num_tokens=3),
    lambda head: proposers.EagleTree(head=head, nodes=8, depth=3, beam=2)], ids=["chain", "tree"])
def test_the_text_is_the_targets(head, plain, make):
  result = drivers.generate(TARGET, make(head), INPUTS, max_new_tokens=14, eos_ids=())
  assert result.token_ids == plain.token_ids
  assert (result.counters.drafted_tokens > 0).all() and not result.counters.steps_beyond_draft_context.any()


def test_it_reads_in_training_what_it_reads_in_drafting(head, plain):
  """Laws of drafts behind texts of several lengths, ragged in both: those of a pass over the recorded features."""
  params = sampling.SamplingParams(temperature=1.0)
  kept = drivers.generate(TARGET, recorder.Recorder(LAYERS), INPUTS, max_new_tokens=14, eos_ids=())
  assert kept.token_ids == plain.token_ids
  files = recorder.recorded(TARGET, kept.proposer_state)
  opening = list(TARGET.opening)
  texts = [[*opening, *answer][:-1] for answer in plain.token_ids]
  assert [len(file.top) for file in files] == list(map(len, texts))
  proposer, written = proposers.Eagle(head=head, num_tokens=3, drawing=DRAWN), [4, 9, 6]
  state = drivers.start(TARGET, proposer, INPUTS, params, max_new_tokens=5, verifier=verifiers.Block(),
                        written=[answer[:count] for answer, count in zip(plain.token_ids, written)])
  tree, _ = starting.draft(TARGET, proposer, state)
  laws, drawn = np.asarray(tree.q.dense(TARGET.vocab_size)), np.asarray(tree.tokens)
  size = 16
  # Training sees drafts where labels stand: the recorded text up to the pending token, then what was drawn.
  tokens, features = np.zeros((3, size), np.int32), np.zeros((3, size, len(LAYERS) * TARGET.config.width), np.float16)
  for row, (text, count) in enumerate(zip(texts, written)):
    known = [*text[:count + 1], *drawn[row, 1:]]
    tokens[row, :len(known)] = known
    features[row, :len(text)] = files[row].values[:, :features.shape[2]]
  batch = batches.Batch(tokens=tokens, length=np.full(3, size, np.int32), start=np.ones(3, np.int32), features=features,
                        hidden=np.zeros((3, size, TARGET.config.width), np.float16), top=np.zeros_like(tokens))
  logits = np.asarray(jax.jit(eagle3.passes, static_argnums=3)(head, TARGET.weights.embedding, batch, 3))
  for row, count in enumerate(written):
    entry = count - 1  # the token behind it is the pending one
    for depth in range(3):
      share = np.exp(logits[depth, row, entry] - logits[depth, row, entry].max())
      np.testing.assert_allclose(laws[row, depth][IDS], share / share.sum(), atol=3e-3)  # features are float16


@pytest.mark.parametrize("name", ["t5", "marian", "bart"])
def test_the_law_that_is_learnt_is_the_targets(name):
  """With what scales hidden states, the bias of logits, and ids that are banned: logits that are the target's own have
  no divergence left, and without the bias they have."""
  target, _ = specjax.load(str(FOLDER.parent / name))
  ids = np.arange(0, target.vocab_size, 3)  # 0 is banned in Marian
  hidden, frozen = jax.random.normal(jax.random.key(2), (1, 8, target.config.width)), shifts.frozen(target, ids)
  logits = jnp.maximum(target.logits(hidden), -1e9)
  batch = batches.Batch(tokens=jnp.full((1, 8), 3), length=jnp.array([8]), start=jnp.array([1]), hidden=hidden,
                        features=jnp.zeros((1, 8, len(LAYERS) * target.config.width)),
                        top=jnp.asarray(ids)[jnp.argmax(logits[..., ids], -1)])
  recipe = eagle3.Recipe(passes=1, loss="kl")
  given = [shifts.ahead(logits[..., ids], 1)], frozen.head, jnp.asarray(ids), batch, recipe, target.vocab_size
  assert abs(by_depth.loss(*given, frozen.bias)[0]) < 1e-5
  assert (frozen.bias is None) == (name == "t5")
  if frozen.bias is not None:
    assert by_depth.loss(*given)[0] > 1e-3
    made = eagle3.init(target, ids, LAYERS, jax.random.key(0))
    value = lambda frozen: eagle3.loss(made, frozen, jnp.asarray(ids), batch, recipe)[0]
    assert abs(value(frozen) - value(frozen.replace(bias=None))) > 1e-3


def test_a_drafter_with_fewer_positions_is_refused():
  """It would read the last position again and again, and draft at full cost for nothing."""
  target, _ = specjax.load(str(FOLDER.parent / "marian"))
  for limit in ("max_inputs", "max_outputs"):
    config = dataclasses.replace(target.config, **{limit: getattr(target.config, limit) - 1})
    with pytest.raises(ValueError, match="use a drafter with as many positions"):
      proposers.DraftModel(model=target.replace(config=config), num_tokens=3).init(target, 1, 64)


def test_a_corpus_holds_inputs_and_texts_apart(tmp_path):
  sequences = corpus.pack([([0, 5, 6], 1), ([0, 7], 1)], [[9, 9, 1], [8, 1]])
  corpus.write(tmp_path, 0, sequences)
  found = corpus.read(tmp_path, 0)
  assert [found.prompt(i).tolist() for i in range(2)] == [[9, 9, 1], [8, 1]]
  assert found[1].tolist() == [0, 7] and found.starts.tolist() == [1, 1]
  corpus.write(tmp_path, 1, corpus.pack([([4, 5, 6], 2), ([7], 0)]))
  without = corpus.read(tmp_path, 1)
  assert without.inputs is None and [without.prompt(i).tolist() for i in range(2)] == [[4, 5], []]


def job(**changes):
  return training.Job(**(dict(
      head="eagle3", target=str(FOLDER), corpora=(), outdir="", epochs=1.0, steps=4, limit=None, learning_rate=1e-3,
      batch_tokens=256, max_tokens=64, draft_vocab=64, loss="soft_ce", answers_only=True, passes=2, heads=3, blocks=1,
      prefix_attention=False, block=4, head_layers=1, markov_rank=0, depths=2, causal=False, start=None, noise=0.0,
      pass_decay=0.8, evaluate_every=4, seed=0) | changes))


class Silent:
  def update(self, tokens):
    del tokens


def test_answers_are_written_and_a_head_is_trained_on_them(tmp_path):
  """From prompts to a head that drafts: the corpus holds the decoder's texts, and what is held out follows from what the
  encoder read, of which many sequences have one opening."""
  path = tmp_path / "prompts.jsonl"
  words = "the small model drafts a few tokens and a tree of drafts holds more than one guess".split()
  rows = [{"category": "translation", "prompt": " ".join(words[i % 7:i % 7 + 2 + i % 5]) + f" {i}"} for i in range(64)]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  wanted = training_data.Job(target=str(FOLDER), prompts=(str(path),), temperatures=(0.0,), max_new_tokens=12,
                             max_prompt_tokens=64, max_prompts=None, batch_size=16, seed=0, keep_features=True)
  counts = training_data.write(wanted, tmp_path / "corpus", progress=Silent())
  sequences = corpus.read(tmp_path / "corpus", 0)
  assert counts["sequences"] == len(sequences) == 64
  inputs = {tuple(TOKENIZER.encode(row["prompt"], add_special_tokens=True)) for row in rows}
  assert {tuple(sequences.prompt(i).tolist()) for i in range(64)} == inputs
  assert {tuple(sequences[i][:1].tolist()) for i in range(64)} == {tuple(TARGET.opening)}
  data = batches.Data(folders=(str(tmp_path / "corpus"),), layers=LAYERS, width=TARGET.config.width, tokens=256,
                      max_tokens=64)
  assert 0 < len(data.held) < 16  # all or none if openings were asked
  last = training.run(job(corpora=(str(tmp_path / "corpus"),), outdir=str(tmp_path / "run")))
  assert last["held_out/tokens_per_step"] >= 1
  trained = specjax.load_head(str(tmp_path / "run" / "head"), target=TARGET)
  result = drivers.generate(TARGET, proposers.Eagle(head=trained, num_tokens=2), INPUTS, max_new_tokens=8, eos_ids=())
  assert (result.counters.drafted_tokens > 0).all()


@pytest.mark.parametrize("changes, said", [
    ({"own_prompts": 4}, "--own_prompts"), ({"keep_features": False}, "--nokeep_features")])
def test_what_an_encoder_cannot_do_is_refused(tmp_path, changes, said):
  path = tmp_path / "prompts.jsonl"
  path.write_text(json.dumps({"category": "translation", "prompt": "the tree"}))
  wanted = training_data.Job(target=str(FOLDER), prompts=(str(path),), temperatures=(0.0,), max_new_tokens=12,
                             max_prompt_tokens=64, max_prompts=None, batch_size=16, seed=0, keep_features=True)
  with pytest.raises(ValueError, match=said):
    training_data.write(dataclasses.replace(wanted, **changes), tmp_path / "corpus", progress=Silent())


def test_heads_of_the_targets_matrix_are_refused():
  other = tiny.eagle(tiny.decoder(vocab=TARGET.vocab_size), tuple(IDS.tolist()))
  with pytest.raises(ValueError, match="vocabulary matrix"):
    drivers.generate(TARGET, proposers.Eagle(head=other, num_tokens=2), INPUTS)
