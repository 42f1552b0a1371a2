"""The flags of the methods' options, and what they build. A flag left out means the method's own default."""
from absl import flags

import specjax
from specjax import checkpoints
from specjax import decode
from specjax import proposers
from specjax import static_trees
from specjax.checkpoints import heads
from specjax.checkpoints import vocabulary_map
from specjax.models import base as models
from specjax.proposers import auto_lookup
from specjax.proposers import length
from specjax.proposers import renewal

DRAFT_TOKENS = flags.DEFINE_integer("draft_tokens", None, "Drafted tokens a step, at most; each method has its own "
                                    "default.", lower_bound=1)
MAX_NGRAM = flags.DEFINE_integer("max_ngram", 3, "Longest n-gram that prompt lookup looks for.", lower_bound=1)
MIN_NGRAM = flags.DEFINE_integer("min_ngram", 2, "Shortest n-gram that prompt lookup looks for.", lower_bound=1)
MATCH = flags.DEFINE_enum("ngram_match", "latest", ["latest", "earliest"],
                          "Which occurrence of an n-gram prompt lookup continues.")
SOURCE = flags.DEFINE_enum("ngram_source", "text", ["text", "prompt", "output"], "Where prompt lookup looks.")
OVERLAP = flags.DEFINE_bool("ngram_overlap", False, "Prompt lookup continues a match close to the end as a period.")
LOOKUP_TREE = flags.DEFINE_bool("lookup_tree", False, "suffix and retrieval draft trees instead of chains.")
MIN_SCORE = flags.DEFINE_float("suffix_min_score", None, "Least number of accepted tokens that suffix must expect of a "
                               "draft; 0 alone and 1 in a fallback, where another method takes over.", lower_bound=0)
STORE = flags.DEFINE_integer("suffix_store", 0, "Tokens of earlier outputs that suffix keeps and looks up as well.",
                             lower_bound=0)
DATASTORE = flags.DEFINE_string("datastore", None, "File of experiments.build_datastore, for retrieval.")
FALLBACK = flags.DEFINE_list("fallback", ["suffix", "draft_model"], "Methods that fallback tries in order, until one "
                             "has a draft.")
DRAFT = flags.DEFINE_string("draft", None, "The draft model: a known name, a path or a Hub id, as --target.")
EXIT_LAYER = flags.DEFINE_integer("exit_layer", None, "Layers of the target that draft in early_exit; a third of them "
                                  "by default.", lower_bound=1)
SKIPPED = flags.DEFINE_list("skip_layers", None, "Layers of the target that layer_skip leaves out; by default every "
                            "second one of the middle half.")
WINDOW = flags.DEFINE_integer("lookahead_window", 5, "Columns of lookahead's window, W.", lower_bound=1)
LOOKAHEAD_NGRAM = flags.DEFINE_integer("lookahead_ngram", 4, "Tokens of lookahead's n-grams, N.", lower_bound=2)
GUESSES = flags.DEFINE_integer("lookahead_guesses", 5, "n-grams that lookahead verifies a step, G.", lower_bound=0)
SMALL = flags.DEFINE_string("hierarchical_small", "ngram", "The method that drafts for the draft model in "
                            "hierarchical.")
MIXTURE = flags.DEFINE_list("mixture", ["ngram", "recycling"], "Methods whose branches mixture puts into one tree; the "
                            "first ones keep theirs where --tree_nodes is short.")
NODES = flags.DEFINE_integer("tree_nodes", None, "Nodes of a drafted tree, root included; each method has its own "
                             "default. Given, eagle, eagle3, mtp, medusa, hydra, dflash, dspark, peagle and pard draft "
                             "trees.", lower_bound=2)
SHAPE = flags.DEFINE_list("tree_shape", ["2", "2", "1"], "draft_tree: children of every node, level by level; or "
                          "sequoia: the best shape of --tree_nodes nodes for --tree_acceptance; or eagle: EAGLE-1's, "
                          "of 26 nodes. Given, eagle, eagle3 and mtp draft trees of it.")
ACCEPTANCE = flags.DEFINE_list("tree_acceptance", ["0.6", "0.15", "0.07", "0.04"], "--tree_shape=sequoia: how often the "
                               "child of each rank is the accepted one.")
CHILDREN = flags.DEFINE_enum("tree_children", "top_k", ["top_k", "independent", "without_replacement"],
                             "draft_tree: the most probable children, or draws of them; given, for eagle, eagle3 "
                             "and mtp too, in the tree of --tree_shape.")
DEPTH = flags.DEFINE_integer("tree_depth", 4, "Levels that dynamic_tree, eagle, eagle3, mtp, dflash, jetspec, dspark, "
                             "peagle and pard grow, and that sequoia may have; given, these heads draft trees.",
                             lower_bound=1)
BEAM = flags.DEFINE_integer("tree_beam", 4, "Nodes of a level that dynamic_tree, eagle, eagle3 and mtp expand, and "
                            "children of each, for dflash, jetspec, dspark, peagle and pard too; given, these heads "
                            "draft trees.", lower_bound=1)
SAMPLED = flags.DEFINE_bool("draft_sampled", False, "Model drafters draw their tokens instead of taking the greedy one; "
                            "use it with --verifier=rejection, block, recursive or traversal.")
TEMPERATURE = flags.DEFINE_float("draft_temperature", None, "Temperature of drawn drafts; the request's by default.",
                                 lower_bound=0)
TOP_K = flags.DEFINE_integer("draft_top_k", None, "top-k of drawn drafts; the request's by default.", lower_bound=0)
TOP_P = flags.DEFINE_float("draft_top_p", None, "top-p of drawn drafts; the request's by default.", lower_bound=0,
                           upper_bound=1)
LENGTH = flags.DEFINE_enum("draft_length", "fixed", ["fixed", "heuristic", "confidence", "entropy", "renewal"],
                           "When model drafters stop before --draft_tokens.")
THRESHOLD = flags.DEFINE_float("confidence_threshold", length.Confidence.threshold, "--draft_length=confidence: least "
                               "probability of the drafter's best token.", lower_bound=0, upper_bound=1)
COSTS = flags.DEFINE_list("verify_costs", [str(x) for x in renewal.REFERENCE_COSTS], "For auto_lookup and "
                          "--draft_length=renewal: the cost of a verify pass over 1, 4, 8, 16, 32 and 64 nodes, in plain "
                          "steps; experiments.speed times the first four.")
COST = flags.DEFINE_float("draft_cost", 0.3, "--draft_length=renewal: cost of a drafted token, in plain steps.",
                          lower_bound=0)
EAGLE = flags.DEFINE_string("eagle_head", None, "EAGLE-1 head, as EAGLE-2 and HASS use it too: a folder, as SafeAILab "
                            "publishes them; by default the one that comes with specjax for the target.")
EAGLE3 = flags.DEFINE_string("eagle3_head", None, "EAGLE-3 head: a folder, in the layout of SafeAILab, SpecForge or "
                             "speculators; by default the one that comes with specjax for the target.")
MEDUSA = flags.DEFINE_string("medusa_head", None, "Medusa's heads: a folder or file, as published; by default those that "
                             "come with specjax for the target.")
HYDRA = flags.DEFINE_string("hydra_head", None, "Hydra's heads: a folder or file, as published; by default those that come "
                            "with specjax for the target.")
DFLASH = flags.DEFINE_string("dflash_head", None, "DFlash drafter, for jetspec too: a folder, as published; by default "
                             "the one that comes with specjax for the target.")
DSPARK = flags.DEFINE_string("dspark_head", None, "DSpark drafter: a folder, as DeepSpec writes it; by default the one that "
                             "comes with specjax for the target.")
MTP = flags.DEFINE_string("mtp_head", None, "Module of multi-token prediction: a folder, as speculators writes it, or "
                          "a model of Qwen's or MiMo's that has one; by default the one that comes with specjax for "
                          "the target.")
PEAGLE = flags.DEFINE_string("peagle_head", None, "P-EAGLE head: a folder, as speculators writes it; by default the "
                             "one that comes with specjax for the target.")
PARD = flags.DEFINE_string("pard_model", None, "Draft model trained on masks: a folder, as AMD-AGI/PARD writes it, or "
                           "a Hub id.")
CONFIDENCE = flags.DEFINE_float("dspark_confidence", 0.0, "dspark: a chain ends before a token whose chance of "
                                "acceptance its confidence head gives less; 0: never.", lower_bound=0, upper_bound=1)
ONLINE = flags.DEFINE_string("online", "eagle3", "The method that learns from its rejected drafts in online: "
                             "draft_model, eagle3 or medusa, of chains.")
ONLINE_REQUESTS = flags.DEFINE_integer("online_requests", 8, "online: the drafter learns after so many requests.",
                                       lower_bound=1)
ONLINE_STEPS = flags.DEFINE_integer("online_steps", 4, "online: optimizer steps each time.", lower_bound=1)
ONLINE_RATE = flags.DEFINE_float("online_rate", 1e-4, "online: learning rate.", lower_bound=1e-12)
ALL = (ONLINE, ONLINE_REQUESTS, ONLINE_STEPS, ONLINE_RATE,
       EAGLE, EAGLE3, MEDUSA, HYDRA, DFLASH, DSPARK, PEAGLE, PARD, CONFIDENCE, MTP, DRAFT_TOKENS, MAX_NGRAM, MIN_NGRAM,
       MATCH, SOURCE, OVERLAP, LOOKUP_TREE, MIN_SCORE, STORE, DATASTORE, FALLBACK, DRAFT, EXIT_LAYER, SKIPPED,
       WINDOW, LOOKAHEAD_NGRAM, GUESSES, SMALL, MIXTURE, NODES, SHAPE, ACCEPTANCE, CHILDREN, DEPTH, BEAM,
       SAMPLED, TEMPERATURE, TOP_K, TOP_P, LENGTH, THRESHOLD, COSTS, COST)
_loaded, _heads = {}, {}


def uses_only(*used) -> None:
  """Refuses flags of this module for a program that builds no methods, but for those `used`.

  Raises:
    ValueError: names the flag and those that are used.
  """
  names = [flag.name for flag in used]
  for flag in ALL:
    if flag.name not in names and not flags.FLAGS[flag.name].using_default_value:
      raise ValueError(f"--{flag.name} is an option of methods, and this experiment makes no use of it; of those it "
                       f"takes {', '.join(f'--{name}' for name in names) or 'none'}")


def tokens(default: int) -> int:
  """How many tokens a method drafts."""
  return DRAFT_TOKENS.value or default


def nodes(default: int) -> int:
  """How many nodes a tree has."""
  return NODES.value or default


def tree_shape() -> tuple[int, ...]:
  """The parents of --tree_shape.

  Raises:
    ValueError: names the flag.
  """
  try:
    if SHAPE.value == ["sequoia"]:
      acceptance = [float(x) for x in ACCEPTANCE.value]
      return static_trees.best_first(acceptance, nodes(16), DEPTH.value).parents
    if SHAPE.value == ["eagle"]:
      return static_trees.EAGLE.parents
    return static_trees.fixed([int(x) for x in SHAPE.value]).parents
  except ValueError as error:
    raise ValueError(f"--tree_shape={','.join(SHAPE.value)}, --tree_acceptance={','.join(ACCEPTANCE.value)}: a shape is "
                     f"numbers of children such as 3,2,1, eagle, or sequoia with shares in (0, 1]: {error}") from error


def skipped_layers(layers: int) -> tuple[int, ...]:
  """The layers of --skip_layers, of a target of `layers`."""
  if SKIPPED.value is None:
    return tuple(range(layers // 4, max(layers * 3 // 4, layers // 4 + 1), 2))
  try:
    return tuple(int(x) for x in SKIPPED.value)
  except ValueError as error:
    raise ValueError(f"--skip_layers={','.join(SKIPPED.value)}: it takes indices of layers, such as 3,5,7") from error


def drawing(sampled: bool | None = None) -> proposers.Drawing:
  """How model drafters take tokens; `sampled` is that of --draft_sampled unless given."""
  sampled = SAMPLED.value if sampled is None else sampled
  return proposers.Drawing(sampled=sampled, temperature=TEMPERATURE.value, top_k=TOP_K.value, top_p=TOP_P.value)


def length_rule():
  """The rule of --draft_length."""
  if LENGTH.value == "confidence":
    return length.Confidence(threshold=THRESHOLD.value)
  if LENGTH.value == "renewal":
    return renewal.Renewal(draft_cost=COST.value, verify_costs=verify_costs(),
                           widths=decode.widths_for(tokens(3) + 1))
  rules = {"fixed": length.Fixed, "heuristic": length.Heuristic, "entropy": length.Entropy}
  return rules[LENGTH.value]()


def verify_costs() -> tuple[float, ...]:
  """The numbers of --verify_costs.

  Raises:
    ValueError: names the flag.
  """
  try:
    costs = tuple(float(x) for x in COSTS.value)
  except ValueError:
    costs = ()
  if len(costs) != len(renewal.REFERENCE_COSTS) or min(costs) <= 0:
    raise ValueError(f"--verify_costs={','.join(COSTS.value)}: it takes {len(renewal.REFERENCE_COSTS)} positive numbers, "
                     f"for {', '.join(map(str, renewal.REFERENCE_WIDTHS))} nodes")
  return costs


def lookup_rule(nodes: int):
  """The rule of auto_lookup for drafts of `nodes` nodes, root included."""
  return auto_lookup.RULE.replace(verify_costs=verify_costs(), widths=decode.widths_for(nodes))


def load(name: str):
  """A second model and its tokenizer, loaded once a process."""
  if name not in _loaded:
    _loaded[name] = specjax.load(name)
  return _loaded[name]


def drafter(given):
  """The model of --draft, whose ids must be the target's, token by token."""
  model, tokenizer = load(DRAFT.value)
  vocabulary_map.require_same(given.tokenizer, tokenizer)
  return model


def pard(given):
  """The model of --pard_model, whose ids must be the target's, and the token of its masks."""
  model, tokenizer = load(PARD.value)
  vocabulary_map.require_same(given.tokenizer, tokenizer)
  return model, checkpoints.pard_token(PARD.value)


def head(given, kind: str, flag):
  """The draft head of a flag, or the shipped one of the target.

  Raises:
    ValueError: names the flag where there is none, or where the head is of another kind.
  """
  path = flag.value or heads.shipped(given.name, kind)
  if path is None:
    raise ValueError(f"--{flag.name} is needed: no head of this kind comes with specjax for the target {given.name!r}")
  proposers.base.layers_of(given.target, kind)
  if kind != "eagle3":
    models.decoder_only(given.target, f"a head ({kind})")
  if path not in _heads:
    _heads[path] = heads.load_head(path, target=given.target)
  found = _heads[path]
  if heads.kind_of(found) != kind:
    raise ValueError(f"--{flag.name}={path} is of the kind {heads.kind_of(found)}, and {kind} is asked for")
  return found


def shape_or_grown() -> tuple[int, ...] | None:
  """The parents of the fixed tree that a head is asked to draft; None for a chain or a grown tree.

  Raises:
    ValueError: names flags that ask for both.
  """
  given = _given(SHAPE, CHILDREN)
  if not given:
    return None
  others = _given(DRAFT_TOKENS, SAMPLED, LENGTH, BEAM, *(() if SHAPE.value == ["sequoia"] else (NODES, DEPTH)))
  if others:
    raise ValueError(f"{given[0]} asks a head for a tree of fixed shape, and {others[0]} is not of one; leave one of "
                     "them out")
  return tree_shape()


def tree_or_chain(chain: int, trees: tuple = ()) -> tuple[int | None, int]:
  """Nodes of a tree, or None for a chain, and tokens of the chain: `chain` by default.

  Args:
    trees: the flags that ask the method for a tree; --tree_nodes, --tree_depth and --tree_beam by default.

  Raises:
    ValueError: names flags that ask for both.
  """
  trees, chains = _given(*(trees or (NODES, DEPTH, BEAM))), _given(DRAFT_TOKENS, SAMPLED, LENGTH)
  if trees and chains:
    raise ValueError(f"{trees[0]} asks for the tree of a head, whose nodes are chosen by probability, and {chains[0]} is "
                     "for a chain; leave one of them out")
  return nodes(8) if trees else None, tokens(chain)


def depth(most: int, *, whole: bool = False) -> int:
  """Levels of a tree, at most `most`; `whole` is for a method that drafts as deep as it can by default.

  Raises:
    ValueError: more were asked for.
  """
  if _given(DEPTH) and DEPTH.value > most:
    raise ValueError(f"--tree_depth={DEPTH.value}: at most {most}, the tokens that the head drafts")
  return most if whole and not _given(DEPTH) else min(DEPTH.value, most)


def _given(*wanted):
  """Those of the flags that were given, as words."""
  shown = lambda value: ",".join(value) if isinstance(value, list) else value
  return [f"--{flag.name}={shown(flag.value)}" for flag in wanted if not flags.FLAGS[flag.name].using_default_value]


def check(widest: int) -> None:
  """Refuses options that no method can honour.

  Raises:
    ValueError: names the flag.
  """
  if DRAFT_TOKENS.value and DRAFT_TOKENS.value >= widest:
    raise ValueError(f"--draft_tokens={DRAFT_TOKENS.value}: at most {widest - 1}, since the widest step verifies "
                     f"{widest} tokens, the pending one included")
  for flag, rule in ((THRESHOLD, "confidence"), (COST, "renewal")):
    if not flags.FLAGS[flag.name].using_default_value and LENGTH.value != rule:
      raise ValueError(f"--{flag.name}={flag.value} belongs to --draft_length={rule}; leave it out or set that")
  if not flags.FLAGS[ACCEPTANCE.name].using_default_value and SHAPE.value != ["sequoia"]:
    raise ValueError(f"--tree_acceptance={','.join(ACCEPTANCE.value)} belongs to --tree_shape=sequoia; leave it out or "
                     "set that")
  verify_costs()
  sampled = SAMPLED.value or CHILDREN.value != "top_k"
  if not sampled:
    for flag in (TEMPERATURE, TOP_K, TOP_P):
      if flag.value is not None:
        raise ValueError(f"--{flag.name}={flag.value} is for drafts that are drawn; add --draft_sampled, or "
                         "--tree_children=independent or without_replacement, or leave it out")
  drawing(sampled).check()
