"""Methods by name: what `all` means where not everything fits, and flags that belong to a method."""
import pathlib

from absl.testing import flagsaver
from absl import flags
import pytest

from experiments.harness import method_options
from experiments.harness import methods
from experiments.harness import rules
import programs
import specjax
from specjax import checkpoints
from specjax.checkpoints import heads
from specjax import testing
from specjax import verifiers
from specjax.testing import tiny
import tiny_tokenizers

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
HEADS = "eagle", "eagle3", "mtp", "medusa", "hydra", "dflash", "dspark", "peagle"


@pytest.fixture(autouse=True)
def parsed_flags():
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


def test_a_target_that_hears_is_refused():
  target, tokenizer = specjax.load(str(FIXTURES / "encoder_decoder" / "whisper"))
  for fitting in (False, True):
    with pytest.raises(ValueError, match="the target hears sound.*use specjax.generate"):
      methods.build_all(["plain"], methods.Given(target=target, tokenizer=tokenizer, name="whisper"), fitting=fitting)


def test_all_is_what_flags_and_target_allow(monkeypatch, capsys):
  names = methods.check(["all"])
  assert {"plain", "ngram", "early_exit", "mixture"} <= set(names)
  assert not {"draft_model", "fallback", "retrieval"} & set(names)  # no --draft, no --datastore
  given = methods.Given(target=testing.DummyTarget(vocab=24), tokenizer=tiny.tokenizer(), name="dummy")
  built = methods.build_all(names, given, fitting=True)
  assert "early_exit" not in built and "ngram" in built  # a target without layers
  said = capsys.readouterr().err
  assert "leaves out draft_model: it needs --draft" in said and "leaves out early_exit: early_exit runs" in said
  with pytest.raises(ValueError, match="method early_exit"):
    methods.build_all(names, given)
  foreign = tiny_tokenizers.byte_level("abc")
  monkeypatch.setattr(method_options, "load", lambda name: (tiny.decoder(vocab=3), foreign))
  with flagsaver.flagsaver(draft="x"):
    names = methods.check(["all"])
    built = methods.build_all(names, methods.Given(tiny.pair()[0], tiny.tokenizer(), "tiny"), fitting=True)
  assert {"draft_model", "fallback"} <= set(names) and not {"draft_model", "draft_tree", "fallback"} & set(built)
  assert {"shared_tokens", "retokenised", "early_exit", "layer_skip"} <= set(built)


def test_all_leaves_out_what_the_verifier_cannot_judge(capsys):
  with flagsaver.flagsaver(draft_sampled=True):
    names = rules.judged(methods.check(["all"]), verifiers.KSeq())
  assert "early_exit" in names and "plain" in names and "ngram" not in names
  assert "leaves out ngram" in capsys.readouterr().err


def test_every_method_is_built_and_every_flag_is_read_by_one(monkeypatch, tmp_path):
  target, drafter, tokenizer = tiny.pair()
  monkeypatch.setattr(method_options, "load", lambda name: (drafter, tokenizer))
  from specjax.proposers import retrieval
  text = retrieval.join([[5, 6, 7, 5], [6, 7, 5]])
  retrieval.save(tmp_path / "store.npz", text, retrieval.suffix_array(text), tokenizer)
  ids = tuple(range(20))
  made = {name: getattr(tiny, name)(target, ids) for name in HEADS}
  for name, head in made.items():
    heads.save_head(head, tmp_path / name)
  (tmp_path / "pard").mkdir()
  (tmp_path / "pard" / "config.json").write_text('{"pard_token": 23}')
  given = {f"{name}_head": str(tmp_path / name) for name in made} | {"pard_model": str(tmp_path / "pard")}
  with flagsaver.flagsaver(draft="x", datastore=str(tmp_path / "store.npz"), **given):
    built = methods.build_all(methods.check(["all"]), methods.Given(target, tokenizer, "tiny"))
  assert tuple(built) == methods.NAMES
  read = {flag.name for method in methods._METHODS.values() for flag in (*method.reads, method.needs, method.parts)
          if flag is not None}
  assert read == {flag.name for flag in method_options.ALL}


def test_a_head_drafts_a_chain_or_a_tree(tmp_path):
  target, _, tokenizer = tiny.pair()
  given = methods.Given(target, tokenizer, "tiny")
  for name in HEADS:
    head = getattr(tiny, name)(target, (0, 1, 2, 3, 4))
    heads.save_head(head, tmp_path / name)
    with flagsaver.flagsaver(**{f"{name}_head": str(tmp_path / name)}):
      assert methods.build(name, given).chains
      with flagsaver.flagsaver(tree_nodes=7):
        tree = methods.build(name, given)
      assert not tree.chains and tree.max_nodes == 7
      with flagsaver.flagsaver(draft_tokens=2):
        assert methods.build(name, given).max_nodes == 3
    with pytest.raises(ValueError, match=f"--{name}_head is needed"):
      methods.build(name, given)


def test_jetspec_opens_a_tree_as_deep_as_the_block(tmp_path):
  target, _, tokenizer = tiny.pair()
  heads.save_head(tiny.dflash(target, (0, 1, 2, 3, 4), block=6), tmp_path / "head")
  build = lambda: methods.build("jetspec", methods.Given(target, tokenizer, "tiny"))
  with flagsaver.flagsaver(dflash_head=str(tmp_path / "head")):
    assert (build().max_nodes, build().max_depth, build().beam) == (16, 5, 4)
    with flagsaver.flagsaver(tree_nodes=9, tree_depth=3, tree_beam=2):
      assert (build().max_nodes, build().max_depth, build().beam) == (9, 3, 2)
    with flagsaver.flagsaver(tree_depth=6), pytest.raises(ValueError, match="--tree_depth=6: at most 5"):
      build()


def test_a_model_of_pard_drafts_a_chain_or_a_tree(monkeypatch, tmp_path):
  target, drafter, tokenizer = tiny.pair()
  monkeypatch.setattr(method_options, "load", lambda name: (drafter, tokenizer))
  (tmp_path / "config.json").write_text('{"pard_token": 22, "spd_type": "pard"}')
  given = methods.Given(target, tokenizer, "tiny")
  with flagsaver.flagsaver(pard_model=str(tmp_path)):
    chain = methods.build("pard", given)
    assert (chain.mask_id, chain.num_tokens, chain.chains) == (22, 7, True)
    with flagsaver.flagsaver(tree_nodes=9, tree_depth=6):
      tree = methods.build("pard", given)
    assert (tree.max_nodes, tree.max_depth, tree.chains) == (9, 6, False)
    foreign = methods.Given(target, tiny_tokenizers.byte_level("abc"), "tiny")
    with pytest.raises(ValueError, match="vocabularies differ"):
      methods.build("pard", foreign)
  assert methods.check(["plain"]) == ["plain"]
  with pytest.raises(ValueError, match="pard needs --pard_model"):
    methods.check(["pard"])


def test_a_head_of_eagle_drafts_a_tree_of_fixed_shape(tmp_path):
  target, _, tokenizer = tiny.pair()
  heads.save_head(tiny.eagle(target, (0, 1, 2, 3, 4)), tmp_path / "eagle")
  build = lambda: methods.build("eagle", methods.Given(target, tokenizer, "tiny"))
  with flagsaver.flagsaver(eagle_head=str(tmp_path / "eagle")):
    with flagsaver.flagsaver(tree_shape=["eagle"]):
      assert build().max_nodes == 26 and not build().samples and not methods.outline("eagle").samples
    with flagsaver.flagsaver(tree_children="without_replacement"):
      assert build().parents == (0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6)
      assert build().samples and methods.outline("eagle").samples
    with flagsaver.flagsaver(tree_shape=["sequoia"], tree_nodes=9):
      assert build().max_nodes == 9
    with flagsaver.flagsaver(tree_shape=["3", "2"], draft_tokens=3):
      with pytest.raises(ValueError, match="--tree_shape=3,2 .*--draft_tokens=3"):
        build()


def test_tokenizers_of_one_family_are_the_same():
  folder = checkpoints.Tokenizer.from_folder(programs.ROOT / programs.TINY)
  from specjax.checkpoints import vocabulary_map
  assert vocabulary_map.require_same(folder, folder) is None


@pytest.fixture
def own(monkeypatch):
  monkeypatch.setattr(methods, "_OWN", {})
  return methods.give


def test_flags_of_one_method_are_no_other_methods(own):
  """What is given for one method builds that one; the others, and the flags themselves, stay as they were."""
  own({"ngram": {"draft_tokens": 3}, "suffix": {}})
  names = methods.check(["plain", "ngram", "suffix"])
  built = methods.build_all(names, methods.Given(tiny.pair()[0], tiny.tokenizer(), "t"))
  assert (built["ngram"].num_tokens, built["suffix"].num_tokens) == (3, 7)
  assert methods.given() == {"ngram": {"draft_tokens": 3}}
  assert method_options.DRAFT_TOKENS.value is None and flags.FLAGS["draft_tokens"].using_default_value
  own({})
  assert methods.build("ngram", methods.Given(None, None, "t")).num_tokens == 7 and methods.given() == {}


def test_a_method_is_not_given_what_it_does_not_read(own):
  own({"ngram": {"tree_nodes": 4}})
  with pytest.raises(ValueError, match="--tree_nodes=4 is given for ngram, which does not read it"):
    methods.check(["plain", "ngram"])


def test_what_a_method_needs_may_be_its_own(own):
  with pytest.raises(ValueError, match="draft_model needs --draft"):
    methods.check(["plain", "draft_model"])
  own({"draft_model": {"draft": "a"}})
  assert methods.check(["plain", "draft_model"]) == ["plain", "draft_model"]
  with pytest.raises(ValueError, match="draft_tree needs --draft"):
    methods.check(["draft_model", "draft_tree"])


def test_whether_drafts_are_drawn_is_known_of_each(own):
  own({"draft_model": {"draft": "a", "draft_sampled": True}})
  assert methods.outline("draft_model").samples and not methods.outline("early_exit").samples
