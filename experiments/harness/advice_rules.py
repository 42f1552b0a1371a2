"""Why drafting pays or not for a kind of request: one small rule a function, each with a name that the advice cites.

A rule looks at measured facts and returns a sentence, or None where it does not fire. Those of `AGAINST` say why a
method loses or what to change; those of `RISKS` what may turn a gain around later. They explain: what is recommended
is decided by measured speedups alone (`advice.decide`).

Sources: the cost identity, MoESD (arXiv 2505.19645), EAGLE-3's figures on long prompts (arXiv 2503.01840), and the
draft-latency findings of the draft-model studies; thresholds that are rules of thumb are named as constants.
"""
import dataclasses

from specjax.theory import experts as experts_theory

_SHORT = 0.5            # share of prefill in a request from which drafting can do little
_LOW = 0.3              # acceptance of the first position below which something is wrong with a model drafter
_DEEP = 1 / 8           # layers of a drafter over the target's
_RIDGE = 0.6            # share of the ridge up to which wider passes are nearly free
_HOT = 0.7              # temperature from which point drafts lose
_FOREIGN = 0.7          # acceptance in a language over that in the best one
_FEW = 8                # requests below which an interval says little
_LITTLE = 1.2           # tokens a step of a lookup that finds little
CONSTRAINED = ("json", "tool_call")  # categories whose format a grammar usually enforces


@dataclasses.dataclass(frozen=True)
class Facts:
  """What is known of a method on a kind of request; None: not known.

  Attributes:
    method, category, language: which.
    requests: held out.
    tokens_per_step, tokens_needed: emitted, and from which on a step is worth its time.
    first_acceptance, acceptance: of the first position, and of all drafted tokens.
    other_acceptance: greatest acceptance of the method in another language of the category.
    draft_share: cost of a drafted token in plain steps, c.
    prefill_share: of a plain request's time.
    plain_ms: of a plain step.
    temperature: of the requests. sampled: whether drafts are drawn.
    lookup, model: what kind of drafter it is.
    layers: of drafter and target.
    beyond_context: share of steps in which the text was too long for the drafter.
    memory_bytes, free_bytes: that the method takes, and that are left.
    batch, nodes, ridge: rows of a step, nodes of a row, and the tokens up to which the device is bound by its memory.
    experts: (experts, chosen) of a target with mixtures of experts.
  """
  method: str
  category: str = "all"
  language: str = "all"
  requests: int = 0
  tokens_per_step: float | None = None
  tokens_needed: float | None = None
  first_acceptance: float | None = None
  acceptance: float | None = None
  other_acceptance: float | None = None
  draft_share: float | None = None
  prefill_share: float | None = None
  plain_ms: float | None = None
  temperature: float = 0.0
  sampled: bool = False
  lookup: bool = False
  model: bool = False
  layers: tuple[int, int] | None = None
  beyond_context: float = 0.0
  memory_bytes: int | None = None
  free_bytes: int | None = None
  batch: int = 1
  nodes: int = 1
  ridge: float | None = None
  experts: tuple[int, int] | None = None


def steps_cost_more_than_they_bring(f):
  """The identity: tokens a step against what the step costs in plain ones."""
  if f.tokens_per_step is not None and f.tokens_needed is not None and f.tokens_per_step < f.tokens_needed:
    return (f"a step brings {f.tokens_per_step:.2f} tokens and must bring {f.tokens_needed:.2f} to be worth its time: "
            "draft fewer tokens, or none")
  return None


def short_outputs(f):
  """Prefill is not drafted."""
  if f.prefill_share is not None and f.prefill_share > _SHORT:
    return (f"{f.prefill_share:.0%} of a plain request is its prompt: drafting can speed up the rest alone, at most "
            f"{1 / f.prefill_share:.2f} times in all")
  return None


def small_target(f):
  """A drafted token that costs a large part of a plain step."""
  if f.model and f.draft_share is not None and f.draft_share > 0.25:
    return (f"the target is small beside its drafter: a drafted token costs {f.draft_share:.2f} of a plain step"
            + (f" of {f.plain_ms:.1f} ms" if f.plain_ms else ""))
  return None


def draft_costs_more_than_it_is_accepted(f):
  """c > alpha: no draft length pays."""
  if f.model and f.draft_share is not None and f.first_acceptance is not None and f.draft_share > f.first_acceptance:
    return (f"a drafted token costs {f.draft_share:.2f} plain steps and is accepted with {f.first_acceptance:.2f}: no "
            "draft length pays")
  return None


def deep_drafter(f):
  """Depth is latency: many thin layers draft slower than few wide ones."""
  if f.model and f.layers and f.layers[0] > _DEEP * f.layers[1]:
    return (f"the drafter has {f.layers[0]} layers and the target {f.layers[1]}: more than an eighth; where latency "
            "counts a shallower one is faster even if it is accepted less")
  return None


def no_memory(f):
  """Weights and state of the method against what is left."""
  if f.memory_bytes is not None and f.free_bytes is not None and f.memory_bytes > f.free_bytes:
    return f"the method takes {f.memory_bytes / 1e9:.2f} GB and {f.free_bytes / 1e9:.2f} GB are left"
  return None


def high_temperature(f):
  """Point drafts are accepted with p of one token; drawn ones with the overlap of both laws."""
  if f.temperature >= _HOT and not f.sampled:
    return (f"at temperature {f.temperature:g} drafts that are not drawn are accepted less: try --draft_sampled with "
            "--verifier=rejection or block, or shorter drafts")
  return None


def nothing_to_look_up(f):
  """Outputs that do not repeat the prompt."""
  if f.lookup and f.tokens_per_step is not None and f.tokens_per_step < _LITTLE:
    return f"outputs hardly repeat the prompt: lookup brings {f.tokens_per_step:.2f} tokens a step"
  return None


def first_position_collapses(f):
  """The sign of a wrong vocabulary or chat template, or of a drafter of another domain."""
  if f.model and f.first_acceptance is not None and f.first_acceptance < _LOW:
    return (f"already the first drafted token is accepted with {f.first_acceptance:.2f} only: check that drafter and "
            "target share vocabulary and chat template, or distill the drafter on such requests")
  return None


def low_acceptance_in_language(f):
  """A drafter knows its training languages."""
  if f.model and f.acceptance is not None and f.other_acceptance and f.acceptance < _FOREIGN * f.other_acceptance:
    return (f"low acceptance in language {f.language}: {f.acceptance:.2f} against {f.other_acceptance:.2f} elsewhere; "
            "a drafter trained on that language would change it")
  return None


def long_prompts(f):
  """Drafters trained at short lengths fail behind long texts."""
  if f.beyond_context > 0:
    return (f"in {f.beyond_context:.0%} of the steps the text was longer than the drafter reads: a lookup or a drafter "
            "with a window does not have this limit")
  return None


def few_experts_shared(f):
  """MoE: a wider pass loads new experts until nearly all are loaded."""
  if f.experts and f.batch * f.nodes < experts_theory.saturating_tokens(*f.experts):
    return (f"a pass over {f.batch * f.nodes} tokens does not go through nearly all of {f.experts[0]} experts yet, so "
            "that every drafted token loads more: draft at most 2 tokens, or use larger batches")
  return None


def beyond_the_ridge(f):
  """Compute-bound: every further node costs its share."""
  if f.ridge and f.batch * f.nodes > _RIDGE * f.ridge:
    return (f"{f.batch} row{'s' * (f.batch > 1)} of {f.nodes} nodes are beyond {_RIDGE:g} of the {f.ridge:.0f} "
            "tokens up to which the device waits for its memory: shrink the tree, then the chain")
  return None


def format_constraints(f):
  """Requests of a fixed format are usually served under a grammar."""
  if f.category in CONSTRAINED:
    return ("such requests are usually served under a grammar: measured here without one; forced tokens are free with "
            "--forced_tokens, and drafts that the grammar forbids are lost")
  return None


def few_requests(f):
  """Too little for an interval."""
  if 0 < f.requests < _FEW:
    few = "without an interval" if f.requests < 3 else "with a wide interval"
    return f"measured on {f.requests} held-out request{'s' * (f.requests > 1)} only, so {few}"
  return None


def larger_batches(f):
  """What was measured holds for its batch."""
  if f.method != "plain" and f.nodes > 1:
    return f"measured at batch {f.batch}: wider passes cost more the more requests share a step"
  return None


AGAINST = (steps_cost_more_than_they_bring, short_outputs, draft_costs_more_than_it_is_accepted, small_target,
           no_memory, high_temperature, nothing_to_look_up, first_position_collapses, low_acceptance_in_language,
           long_prompts, few_experts_shared, beyond_the_ridge, deep_drafter)
RISKS = (format_constraints, few_requests, larger_batches)


def fired(rules, facts: Facts) -> list[dict]:
  """[{"rule", "text"}] of the rules that fire."""
  found = ((rule.__name__, rule(facts)) for rule in rules)
  return [{"rule": name, "text": text} for name, text in found if text]
