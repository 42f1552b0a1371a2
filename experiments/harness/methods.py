"""Methods by name: which proposer a flag value means. The flags of their options stand in `method_options`."""
import dataclasses
import sys
import types
from typing import Callable

from absl import flags

from experiments.harness import flag_values
from experiments.harness import method_options as options
from experiments.harness import sharded
from specjax import decode
from specjax import proposers
from specjax import static_trees
from specjax.models import base as models
from specjax.proposers import recycling
from specjax.proposers import shared_tokens
from specjax.training import online


@dataclasses.dataclass(frozen=True)
class Given:
  """What proposers are built for."""
  target: object
  tokenizer: object
  name: str  # as given by --target


@dataclasses.dataclass(frozen=True)
class Method:
  """How to build a method, and which flags of `method_options` it reads."""
  build: Callable
  reads: tuple = ()
  needs: object = None   # the flag without which it cannot be built
  parts: object = None   # the flag that names the methods that it is made of
  samples: Callable = lambda: False  # whether the flags make it draw its drafts


def _ngram(given):
  del given
  return proposers.NGram(max_ngram=options.MAX_NGRAM.value, min_ngram=options.MIN_NGRAM.value,
                         num_tokens=options.tokens(7), match=options.MATCH.value, source=options.SOURCE.value,
                         overlap=options.OVERLAP.value)


def _auto_lookup(given):
  del given
  return proposers.AutoLookup(num_tokens=options.tokens(7), rule=options.lookup_rule(options.tokens(7) + 1))


def _suffix(given, min_score=0.0):
  del given
  if options.MIN_SCORE.value is not None:
    min_score = options.MIN_SCORE.value
  proposer = proposers.Suffix(num_tokens=options.tokens(7), tree=options.LOOKUP_TREE.value, min_score=min_score)
  return proposer.with_store(options.STORE.value) if options.STORE.value else proposer


def _retrieval(given):
  return proposers.Retrieval.load(options.DATASTORE.value, given.tokenizer, num_tokens=options.tokens(7),
                                  tree=options.LOOKUP_TREE.value)


def _recycling(given):
  return recycling.recycling(given.target.vocab_size, num_nodes=options.nodes(16))


def _draft_model(given):
  return proposers.DraftModel(model=options.drafter(given), num_tokens=options.tokens(3), drawing=options.drawing(),
                              length=options.length_rule())


def _draft_tree(given):
  children = options.CHILDREN.value
  return proposers.DraftTree(model=options.drafter(given), parents=options.tree_shape(), children=children,
                             drawing=options.drawing(sampled=children != "top_k"))


def _dynamic_tree(given):
  return proposers.DynamicTree(model=options.drafter(given), nodes=options.nodes(16), depth=options.DEPTH.value,
                               beam=options.BEAM.value)


def _early_exit(given):
  proposers.base.layers_of(given.target, "early_exit")
  layers = options.EXIT_LAYER.value or max(1, given.target.config.layers // 3)
  return proposers.EarlyExit(exit_layer=layers, num_tokens=options.tokens(3), drawing=options.drawing(),
                             length=options.length_rule())


def _layer_skip(given):
  skipped = options.skipped_layers(proposers.base.layers_of(given.target, "layer_skip"))
  return proposers.LayerSkip(skipped=skipped, num_tokens=options.tokens(3), drawing=options.drawing(),
                             length=options.length_rule())


def _lookahead(given):
  del given
  return proposers.Lookahead(window=options.WINDOW.value, ngram=options.LOOKAHEAD_NGRAM.value,
                             guesses=options.GUESSES.value, from_text=True)


def _hierarchical(given):
  return proposers.Hierarchical(small=build(options.SMALL.value, given), middle=options.drafter(given),
                                num_tokens=options.tokens(7), drawing=options.drawing())


# By head and rank, for heads without a table of their own: the first column is that of Medusa's 7B heads, the others fall
# as theirs do.
_MEDUSA_ACCURACY = [[top * share for share in (1, 0.25, 0.12, 0.08)] for top in (0.56, 0.32, 0.2, 0.15, 0.12)]
# By rank, for heads without a table of their own: the default of --tree_acceptance at every depth, as for a draft model,
# since each of these heads sees the path above it. Not measured on a head.
_HYDRA_ACCURACY = (0.6, 0.15, 0.07, 0.04)


def _eagle(kind, flag):
  """The builder of a head that recurs, as EAGLE's do: a chain, a tree of fixed shape, or one that is grown."""
  def built(given):
    head = options.head(given, kind, flag)
    parents = options.shape_or_grown()
    if parents:
      children = options.CHILDREN.value
      return proposers.EagleFixedTree(head=head, parents=parents, children=children,
                                      drawing=options.drawing(sampled=children != "top_k"))
    nodes, tokens = options.tree_or_chain(3)
    if nodes:
      return proposers.EagleTree(head=head, nodes=nodes, depth=options.DEPTH.value, beam=options.BEAM.value)
    return proposers.Eagle(head=head, num_tokens=tokens, drawing=options.drawing(), length=options.length_rule())
  return built


def _medusa(given):
  head = options.head(given, "medusa", options.MEDUSA)
  nodes, tokens = options.tree_or_chain(min(3, head.config.heads), _TREE)
  if nodes:
    shape = static_trees.best_first(head.config.accuracy or _MEDUSA_ACCURACY, nodes, head.config.heads)
    return proposers.Medusa(head=head, shape=shape)
  return proposers.Medusa(head=head, num_tokens=tokens, drawing=options.drawing(), length=options.length_rule())


def _hydra(given):
  head = options.head(given, "hydra", options.HYDRA)
  nodes, tokens = options.tree_or_chain(min(3, head.config.heads), _TREE)
  if nodes:
    shape = static_trees.best_first(head.config.accuracy or _HYDRA_ACCURACY, nodes, head.config.heads)
    return proposers.Hydra(head=head, shape=shape)
  return proposers.Hydra(head=head, num_tokens=tokens, drawing=options.drawing(), length=options.length_rule())


def _block(given, kind, flag, proposer, skipped, **more):
  """A drafter of blocks, of which `skipped` places draft nothing."""
  head = options.head(given, kind, flag)
  most = head.config.block - skipped
  nodes, tokens = options.tree_or_chain(min(3, most))
  if nodes:
    return proposer(head=head, num_tokens=options.depth(most), nodes=nodes, beam=options.BEAM.value, **more)
  return proposer(head=head, num_tokens=tokens, drawing=options.drawing(), length=options.length_rule(), **more)


def _dflash(given):
  return _block(given, "dflash", options.DFLASH, proposers.DFlash, 1)


def _jetspec(given):
  head = options.head(given, "dflash", options.DFLASH)
  most = head.config.block - 1
  return proposers.JetSpec(head=head, num_tokens=options.depth(most, whole=True), nodes=options.nodes(16),
                           beam=options.BEAM.value)


def _dspark(given):
  return _block(given, "dspark", options.DSPARK, proposers.DSpark, 0, confidence=options.CONFIDENCE.value)


def _peagle(given):
  head = options.head(given, "peagle", options.PEAGLE)
  nodes, tokens = options.tree_or_chain(min(3, head.depths))
  if nodes:
    return proposers.PEagle(head=head, num_tokens=options.depth(head.depths), nodes=nodes, beam=options.BEAM.value)
  return proposers.PEagle(head=head, num_tokens=tokens, drawing=options.drawing(), length=options.length_rule())


def _pard(given):
  model, mask_id = options.pard(given)
  nodes, tokens = options.tree_or_chain(7)
  if nodes:
    return proposers.Pard(model=model, mask_id=mask_id, num_tokens=options.DEPTH.value, nodes=nodes,
                          beam=options.BEAM.value)
  return proposers.Pard(model=model, mask_id=mask_id, num_tokens=tokens, drawing=options.drawing(),
                        length=options.length_rule())


def _online(given):
  return online.online(given.target, build(options.ONLINE.value, given), requests=options.ONLINE_REQUESTS.value,
                       steps=options.ONLINE_STEPS.value, learning_rate=options.ONLINE_RATE.value)


def _mixture(given):
  return proposers.Mixture(tuple(build(name, given) for name in options.MIXTURE.value),
                           node_budget=options.NODES.value)


def _shared_tokens(given):
  model, tokenizer = options.load(options.DRAFT.value)
  return shared_tokens.shared_tokens(model, given.tokenizer, tokenizer, num_tokens=options.tokens(3),
                                     drawing=options.drawing(), length=options.length_rule())


def _retokenised(given):
  model, tokenizer = options.load(options.DRAFT.value)
  return proposers.Retokenised(model, given.tokenizer, tokenizer, num_tokens=options.tokens(3),
                               length=options.length_rule())


def _drawn():
  return options.SAMPLED.value


def _drawn_tree():
  return options.CHILDREN.value != "top_k"


def _drawn_or_tree():
  return _drawn() or _drawn_tree()


def _fallback(given):
  last = options.FALLBACK.value[-1]
  return proposers.Fallback(tuple(
      _suffix(given, min_score=1.0) if name == "suffix" != last else build(name, given)
      for name in options.FALLBACK.value))


_TOKENS, _TREE = (options.DRAFT_TOKENS,), (options.NODES,)
_DRAWING = (options.SAMPLED, options.TEMPERATURE, options.TOP_K, options.TOP_P)
_LENGTH = (options.LENGTH, options.THRESHOLD, options.COST, options.COSTS)
_CHAIN = _TOKENS + _DRAWING + _LENGTH
_FIXED = (options.SHAPE, options.ACCEPTANCE, options.CHILDREN, options.DEPTH)
_EAGLE = _CHAIN + _TREE + _FIXED + (options.BEAM,)

_METHODS = {
    "plain": Method(lambda given: proposers.Plain()),
    "ngram": Method(_ngram, _TOKENS + (options.MAX_NGRAM, options.MIN_NGRAM, options.MATCH, options.SOURCE,
                                       options.OVERLAP)),
    "suffix": Method(_suffix, _TOKENS + (options.LOOKUP_TREE, options.MIN_SCORE, options.STORE)),
    "auto_lookup": Method(_auto_lookup, _TOKENS + (options.COSTS,)),
    "retrieval": Method(_retrieval, _TOKENS + (options.LOOKUP_TREE,), needs=options.DATASTORE),
    "recycling": Method(_recycling, _TREE),
    "jacobi": Method(lambda given: proposers.Jacobi(num_tokens=options.tokens(7)), _TOKENS),
    "lookahead": Method(_lookahead, (options.WINDOW, options.LOOKAHEAD_NGRAM, options.GUESSES)),
    "draft_model": Method(_draft_model, _CHAIN, needs=options.DRAFT, samples=_drawn),
    "draft_tree": Method(_draft_tree, _TREE + _DRAWING[1:] + _FIXED, needs=options.DRAFT, samples=_drawn_tree),
    "dynamic_tree": Method(_dynamic_tree, _TREE + (options.DEPTH, options.BEAM), needs=options.DRAFT),
    "early_exit": Method(_early_exit, _CHAIN + (options.EXIT_LAYER,), samples=_drawn),
    "layer_skip": Method(_layer_skip, _CHAIN + (options.SKIPPED,), samples=_drawn),
    "eagle": Method(_eagle("eagle", options.EAGLE), _EAGLE + (options.EAGLE,), samples=_drawn_or_tree),
    "eagle3": Method(_eagle("eagle3", options.EAGLE3), _EAGLE + (options.EAGLE3,), samples=_drawn_or_tree),
    "mtp": Method(_eagle("mtp", options.MTP), _EAGLE + (options.MTP,), samples=_drawn_or_tree),
    "medusa": Method(_medusa, _CHAIN + _TREE + (options.MEDUSA,), samples=_drawn),
    "hydra": Method(_hydra, _CHAIN + _TREE + (options.HYDRA,), samples=_drawn),
    "dflash": Method(_dflash, _CHAIN + _TREE + (options.DFLASH, options.DEPTH, options.BEAM), samples=_drawn),
    "jetspec": Method(_jetspec, _TREE + (options.DFLASH, options.DEPTH, options.BEAM)),
    "dspark": Method(_dspark, _CHAIN + _TREE + (options.DSPARK, options.CONFIDENCE, options.DEPTH, options.BEAM),
                     samples=_drawn),
    "peagle": Method(_peagle, _CHAIN + _TREE + (options.PEAGLE, options.DEPTH, options.BEAM), samples=_drawn),
    "pard": Method(_pard, _CHAIN + _TREE + (options.DEPTH, options.BEAM), needs=options.PARD, samples=_drawn),
    "shared_tokens": Method(_shared_tokens, _CHAIN, needs=options.DRAFT, samples=_drawn),
    "retokenised": Method(_retokenised, _TOKENS + _LENGTH, needs=options.DRAFT),
    "hierarchical": Method(_hierarchical, _TOKENS + _DRAWING, needs=options.DRAFT, parts=options.SMALL, samples=_drawn),
    "online": Method(_online, (options.ONLINE_REQUESTS, options.ONLINE_STEPS, options.ONLINE_RATE),
                     parts=options.ONLINE, samples=lambda: _METHODS[options.ONLINE.value].samples()),
    "mixture": Method(_mixture, _TREE, parts=options.MIXTURE,
                      samples=lambda: any(_METHODS[name].samples() for name in options.MIXTURE.value)),
    "fallback": Method(_fallback, parts=options.FALLBACK,
                       samples=lambda: any(_METHODS[name].samples() for name in options.FALLBACK.value)),
}
NAMES = tuple(_METHODS)
ALL = "all"
_OWN = {}  # by method, flags that are given for it alone


def give(settings: dict[str, dict]) -> None:
  """From here on these methods have flags of their own beside those of the command line, as if they alone had been
  given them: what a preset advises for one method says nothing of another.

  Args:
    settings: by method, {name of a flag: value}.
  """
  _OWN.clear()
  _OWN.update(settings)


def given() -> dict[str, dict]:
  """What `give` was given, methods without any left out."""
  return {name: dict(values) for name, values in _OWN.items() if values}


def _of(name):
  """Within, the flags are those of a method."""
  return flag_values.applied(_OWN.get(name, {}))


def check(names: list[str]) -> list[str]:
  """The methods that --methods names, checked as far as that goes before anything is loaded; "all" is every one that
  the flags allow, and says which it leaves out.

  Raises:
    ValueError: for a name that is not in `NAMES`, one given twice, one whose flag is missing, or a flag that none of
      them reads.
  """
  if names == [ALL]:
    left_out = {name: flag for name in NAMES if (flag := _missing(name))}
    for name, flag in left_out.items():
      print(f"--methods=all leaves out {name}: it needs --{flag}", file=sys.stderr)
    names = [name for name in NAMES if name not in left_out]
  if not names or len(set(names)) < len(names):
    raise ValueError(f"--methods={','.join(names)}: name each method once, of {', '.join(NAMES)}, or give {ALL}")
  for name in names:
    if name not in _METHODS:
      raise ValueError(f"unknown method {name!r}; methods are {', '.join(NAMES)}, or {ALL}")
    with _of(name):
      if flag := _missing(name):
        raise ValueError(f"the method {name} needs --{flag}; see --helpfull")
      options.check(decode.WIDTHS[-1])
    for flag in sorted(set(_OWN.get(name, ())) - _read_by([name])):
      raise ValueError(f"--{flag}={_shown(_OWN[name][flag])} is given for {name}, which does not read it")
  _check_read(names)
  return names


def _parts(name):
  """The methods that one is made of."""
  flag = _METHODS[name].parts
  return [] if flag is None else flag.value if isinstance(flag.value, list) else [flag.value]


def _missing(name):
  """The name of the flag that a method or a part of it lacks, None if it lacks none."""
  if name not in _METHODS:
    return None
  parts, flag = _parts(name), _METHODS[name].parts
  possible = [other for other in NAMES if other != "plain" and _METHODS[other].parts is None]
  least = 1 if name in ("hierarchical", "online") else 2
  if flag is not None and (len(parts) < least or len(set(parts)) < len(parts) or set(parts) - set(possible)):
    wrong = next((part for part in parts if part not in possible), None)
    raise ValueError(f"--{flag.name}={','.join(parts)}: " + (f"{wrong!r} cannot be part of {name}; " if wrong else
                     f"{name} takes {least} or more methods, each once; ") + f"those that can are {', '.join(possible)}")
  needed = [_METHODS[part].needs for part in [name, *parts]]
  return next((flag.name for flag in needed if flag is not None and not flag.value), None)


def _check_read(names):
  """Refuses a flag that none of the methods, or of their parts, reads: none is ignored in silence. Plain decoding alone
  goes with all of them, as with every verifier: the same flags then serve the arm that is compared with."""
  if names == ["plain"]:
    return
  read = _read_by(names)
  for flag in options.ALL:
    if flag.name not in read and not flags.FLAGS[flag.name].using_default_value:
      readers = [name for name in NAMES if flag.name in _reads(name)]
      raise ValueError(f"--{flag.name}={_shown(flag.value)} is an option of {', '.join(readers)}, and none of "
                       f"{', '.join(names)} reads it; leave it out, or add such a method")


def _reads(name):
  return {flag.name for flag in (*_METHODS[name].reads, _METHODS[name].needs, _METHODS[name].parts) if flag is not None}


def _read_by(names):
  """The names of the flags that methods or their parts read."""
  return set().union(*map(_reads, [*names, *(part for name in names for part in _parts(name))]))


def _shown(value):
  return ",".join(map(str, value)) if isinstance(value, list) else value


def outline(name: str):
  """What is known of a method's drafts before it is built: whether there are any, and whether they are drawn."""
  drafts = 0 if name == "plain" else 1
  with _of(name):
    samples = _METHODS[name].samples()
  return types.SimpleNamespace(max_nodes=1 + drafts, max_depth=drafts, chains=True, samples=samples)


def build(name: str, given: Given):
  """The proposer of a method, with the options that the flags give."""
  with _of(name):
    return _METHODS[name].build(given)


def build_all(names: list[str], given: Given, *, fitting: bool = False) -> dict:
  """Proposers by name, in the order given.

  Args:
    names: of `check`. given: the target.
    fitting: leave out, and name, the methods that this target or draft model does not support.

  Raises:
    ValueError: names the method that this target does not support; or the target hears sound.
  """
  if models.sound(given.target) is not None:
    raise ValueError("the target hears sound, and these programs give it text: use specjax.generate with "
                     "specjax.models.mel.log_mel, or another target")
  built = {}
  for name in names:
    try:
      proposer = sharded.drafter(build(name, given), given.target)
      proposer.init(given.target, 1, 8)
    except ValueError as error:
      if not fitting:
        raise ValueError(f"method {name}: {error}") from error
      print(f"--methods=all leaves out {name}: {error}", file=sys.stderr)
      continue
    built[name] = proposer
  return built
