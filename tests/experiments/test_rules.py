"""Verifiers by their flags: every name, options that reach their class, and refusals before anything is loaded."""
from absl.testing import flagsaver
from absl import flags
import pytest

import every_proposer
from experiments.harness import method_options
from experiments.harness import methods
from experiments.harness import rules
import programs
from specjax import checkpoints
from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax import verifiers
import tiny_tokenizers

METHODS = {"plain": proposers.Plain(), "ngram": proposers.NGram(num_tokens=3)}
OPTIONS = {"typical_epsilon": ("lossy_typical", 0.25), "typical_alpha": ("lossy_typical", 0.5),
           "lenience": ("lossy_lenient", 0.75), "cascade_rule": ("lossy_cascade", "opt"), "cascade_alpha": ("lossy_cascade", 0.75)}


@pytest.fixture(autouse=True)
def parsed_flags():
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


@pytest.mark.parametrize("name", verifiers.BY_NAME)
def test_every_name(name):
  with flagsaver.flagsaver(verifier=name):
    built = rules.build()
  assert built == verifiers.BY_NAME[name]()  # with the defaults of its class
  assert rules.name_of(built) == name


def test_the_default_is_point():
  assert rules.build() == verifiers.Point()


@pytest.mark.parametrize("flag", OPTIONS)
def test_options_reach_their_verifier(flag):
  owner, value = OPTIONS[flag]
  field = flag.removeprefix(f"{owner.removeprefix('lossy_')}_")
  with flagsaver.flagsaver(verifier=owner, **{flag: value}):
    built = rules.build()
  assert built == verifiers.BY_NAME[owner](**{field: value}) != verifiers.BY_NAME[owner]()


@pytest.mark.parametrize("flag", OPTIONS)
def test_an_option_of_another_verifier_is_refused(flag):
  """Even with the value that it has by default: whoever gives it means something by it."""
  owner, _ = OPTIONS[flag]
  other = "block" if owner == "lossy_typical" else "lossy_typical"
  with flagsaver.flagsaver(verifier=other, **{flag: flags.FLAGS[flag].default}):
    with pytest.raises(ValueError, match=f"--{flag}=.*--verifier={owner}, and --verifier={other}"):
      rules.build()


@pytest.mark.parametrize("name, flag, value", [
    ("lossy_typical", "typical_epsilon", 0.0), ("lossy_typical", "typical_alpha", 1.5),
    ("lossy_lenient", "lenience", float("nan")), ("lossy_cascade", "cascade_alpha", float("nan")), ("lossy_cascade", "cascade_alpha", -1.0)])
def test_an_option_out_of_its_range_names_its_flag(name, flag, value):
  with flagsaver.flagsaver(verifier=name, **{flag: value}), pytest.raises(ValueError) as error:
    rules.build()
  assert f"--{flag}={value}" in str(error.value)


def test_a_verifier_without_a_name_has_that_of_its_class():
  class Mine(verifiers.Recursive):
    pass
  assert rules.name_of(Mine()) == "Mine"


@pytest.mark.parametrize("name", verifiers.BY_NAME)
def test_what_is_refused_early_is_what_the_driver_refuses(name):
  """The methods that the flags know, under every verifier."""
  verifier, target = verifiers.BY_NAME[name](), testing.DummyTarget(vocab=16)
  for method, proposer in METHODS.items():
    refusals = []
    for attempt in (lambda: rules.check({method: proposer}, verifier),
                    lambda: drivers.start(target, proposer, [[0]], max_new_tokens=4, verifier=verifier)):
      try:
        attempt()
      except ValueError as error:
        refusals.append(str(error))
    assert len(refusals) in (0, 2), refusals
    assert method != "plain" or not refusals
    if refusals:
      assert f"--verifier={name}" in refusals[0] and f"method {method} " in refusals[0] and "point," in refusals[0]


@pytest.mark.parametrize("entry", every_proposer.ENTRIES, ids=lambda e: e.name)
def test_what_each_proposer_is_refused_for(entry):
  """Chains of points, trees of points, drawn chains and trees: the harness and the driver agree on all of them, but for
  draws without replacement, which only the driver knows of."""
  for verifier in (verifiers.Point(), verifiers.Block(), verifiers.Recursive(), verifiers.KSeq()):
    refused = []
    for attempt in (lambda: rules.check({"it": entry.proposer}, verifier),
                    lambda: drivers.start(entry.target, entry.proposer, [[0]], max_new_tokens=4, verifier=verifier)):
      try:
        attempt()
        refused.append(False)
      except ValueError:
        refused.append(True)
    assert refused[0] == refused[1] or entry.name.endswith("tree, distinct") and refused[1], verifier


@pytest.mark.parametrize("flags_given, sampled", [({}, False), ({"draft_sampled": True}, True)])
def test_what_flags_say_before_anything_is_built(flags_given, sampled):
  with flagsaver.flagsaver(draft="x", **flags_given):
    for name in ("draft_model", "early_exit", "layer_skip"):
      assert methods.outline(name).samples == sampled
    assert not methods.outline("ngram").samples and methods.outline("plain").max_nodes == 1
    assert methods.outline("fallback").samples == sampled
  with flagsaver.flagsaver(draft="x", tree_children="independent"):
    assert methods.outline("draft_tree").samples and not methods.outline("draft_model").samples


def test_a_drafter_of_another_vocabulary_is_refused(monkeypatch):
  target, drafter = (checkpoints.Tokenizer.from_folder(programs.ROOT / programs.TINY), tiny_tokenizers.byte_level("abc"))
  monkeypatch.setattr(method_options, "load", lambda name: (testing.DummyTarget(), drafter))
  with flagsaver.flagsaver(draft="x"), pytest.raises(ValueError, match="method draft_model: the vocabularies differ"):
    methods.build_all(["draft_model"], methods.Given(testing.DummyTarget(), target, "t"))


def test_trees_are_refused_by_verifiers_of_chains():
  tree = testing.NoisySelf(parents=(0, 0, 0))
  rules.check({"noisy": tree}, verifiers.KSeq())
  with pytest.raises(ValueError, match="--verifier=block takes chains only, and the method noisy makes trees") as error:
    rules.check({"noisy": tree}, verifiers.Block())
  others = str(error.value).split("one of")[1]
  assert "traversal" in others and "lossy_cascade" not in others


def test_who_keeps_the_law():
  assert rules.keeps_the_law(verifiers.Block(), METHODS["ngram"])
  assert rules.keeps_the_law(verifiers.LossyTypical(), METHODS["plain"])
  assert not rules.keeps_the_law(verifiers.LossyTypical(), METHODS["ngram"])
