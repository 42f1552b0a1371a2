"""Requests to a real model: their temperature, language and kind, and prompts that are no text.

What each claim is was written down before the first run.
"""
from collections.abc import Sequence
import dataclasses

import numpy as np

from experiments.ablations import base
from experiments.ablations import real_model
from experiments.ablations.real_model import HEAD, LOOKUP, SUFFIX
from experiments.harness import draft_view
from experiments.harness import statistics
from specjax import verifiers
from specjax.theory import acceptance

_LENGTH = 3   # tokens of a draft
_TOKENS = 32  # of an output
_HEATS = (0.0, .2, .4, .6, .8, 1.0)
_GREEDY, _DRAWN = "greedy drafts", "drawn drafts, rejection"
# Traversal verification (its chain, Llama-3.2-1B for 3.1-8B): tokens a step by temperature.
_TRAVERSAL = {.2: 4.16, .4: 4.14, .6: 4.11, .8: 4.02, 1.0: 3.88}


def temperature(options: base.Options, model: real_model.Model | None = None) -> base.Result:
  """Acceptance over the temperature of drafts that the head chooses, and of those that it draws."""
  model = model or real_model.load()
  arms = {(_GREEDY, heat): real_model.Arm(model.chain(_LENGTH), heat) for heat in (0.0, .4, 1.0)}
  arms |= {(_DRAWN, heat): real_model.Arm(model.drawn(_LENGTH), heat, verifiers.Rejection()) for heat in _HEATS[1:]}
  found = real_model.measure(model, arms, model.asked(_TOKENS), new_tokens=_TOKENS, seed=options.seed,
                             label="temperature")
  found[_DRAWN, 0.0] = found[_GREEDY, 0.0]  # a draw at temperature 0 is the argmax
  at = lambda name, heat: found[name, heat].accepted
  lost = {name: at(name, 0.0) - at(name, 1.0) for name in (_GREEDY, _DRAWN)}
  steps = [found[_DRAWN, heat].tokens_per_step for heat in _HEATS]
  verdict, broken = base.holds({
      "drawn drafts are accepted less at 1 than at 0": lost[_DRAWN] > 0,
      "greedy drafts lose more": lost[_GREEDY] > lost[_DRAWN],
      "drawn, tokens a step fall from .2 to 1": steps[-1] < steps[1]})
  ends = [_interval(found[_DRAWN, heat]) for heat in (0.0, 1.0)]
  if verdict == base.AGREES and ends[1][1] > ends[0][0]:
    verdict, broken = base.CANNOT_SAY, "The fall of drawn drafts is no larger than their 95% intervals."
  source = "arXiv 2211.17192, Table 3, T5-small for T5-XXL"
  return base.Result(
      "temperature", "acceptance of a drafted token",
      tuple(base.Series(name, heats, tuple(at(name, heat) for heat in heats))
            for name, heats in ((_DRAWN, _HEATS), (_GREEDY, (0.0, .4, 1.0)))),
      (base.Published("English to German", (0.0, 1.0), (.75, .62), source, joined=True),
       base.Published("summaries", (0.0, 1.0), (.65, .53), source, joined=True)),
      verdict, f"From temperature 0 to 1 the acceptance of drawn drafts goes from {at(_DRAWN, 0.0):.3f} to "
      f"{at(_DRAWN, 1.0):.3f} (the paper's from .75 to .62 and .65 to .53), of greedy ones to {at(_GREEDY, 1.0):.3f}; "
      f"from .2 to 1 drawn chains of {_LENGTH} go from {steps[1]:.2f} to {steps[-1]:.2f} tokens a step "
      f"({steps[-1] / steps[1] - 1:+.0%}; chains of the traversal paper, 4.16 to 3.88, "
      f"{_TRAVERSAL[1.0] / _TRAVERSAL[.2] - 1:+.0%}). {len(found[_DRAWN, 0.0].asked)} requests. {broken}".strip(),
      ("drafts", "acceptance", "95% from", "to", "tokens a step", "traversal paper"),
      tuple((f"{name} at {heat:g}", f"{counts.accepted:.3f}",
             *(f"{edge:.3f}" for edge in _interval(counts)),
             f"{counts.tokens_per_step:.3f}", f"{_TRAVERSAL[heat]:.2f}" if name == _DRAWN and heat else "-")
            for (name, heat), counts in sorted(found.items())))


def _interval(counts):
  """Wilson's, of the acceptance of a drafted token."""
  return acceptance.wilson(*(counts.counted[f"{name}_per_position"].sum() for name in ("accepted", "trials")))


def languages(options: base.Options, model: real_model.Model | None = None) -> base.Result:
  """A trained head and lookups over languages and over kinds of requests."""
  model = model or real_model.load()
  talk = [one for kind, each in (("chat", 2), ("multilingual", 99))
          for one in model.asked(_TOKENS, (kind,), each, any_length=True)]
  asked = talk + [one for one in model.asked(_TOKENS, any_length=True) if one not in talk]
  makers = {HEAD: model.chain, LOOKUP: real_model.lookup, SUFFIX: real_model.suffix}
  found = real_model.measure(model, {name: real_model.Arm(make(_LENGTH)) for name, make in makers.items()}, asked,
                             new_tokens=_TOKENS, seed=options.seed, label="languages")
  spoken = _groups([one.request.language for one in talk])
  kinds = _groups([one.request.category for one in asked])
  by_language, by_kind = ({name: {group: found[name].of(rows).tokens_per_step for group, rows in groups.items()}
                           for name in makers} for groups in (spoken, kinds))
  spread = lambda values: float(np.std(list(values.values())) / np.mean(list(values.values())))
  spreads = {name: (spread(by_language[name]), spread(by_kind[name])) for name in makers}
  rates = {name: found[name].of(range(len(talk))).ratios["acceptance_rate"] or 0.0 for name in makers}
  english = by_language[HEAD]["en"]
  verdict, broken = base.holds({
      f"{name}, {claim}": holds for name in (LOOKUP, SUFFIX) for claim, holds in {
          "less of a draft is accepted than of the head's": rates[name] < rates[HEAD],
          "tokens a step vary less over languages than the head's": spreads[name][0] < spreads[HEAD][0],
          "and over kinds of requests": spreads[name][1] < spreads[HEAD][1]}.items()} | {
      "the head yields most in English, of which it learnt": all(
          value < english for group, value in by_language[HEAD].items() if group != "en")})
  x = tuple(map(float, range(len(spoken))))
  repeats = {group: found[HEAD].of(rows).repeating for group, rows in spoken.items()}
  loop = max(repeats, key=repeats.get)
  left_out = sorted({request.category for request in model.requests} - set(kinds))
  return base.Result(
      "language of request and answer", "tokens a step",
      tuple(base.Series(name, x, tuple(by_language[name].values())) for name in makers), (), verdict,
      "Deviation of tokens a step over languages and kinds, in parts of the mean: " + ", ".join(
          f"{name} {a:.0%} and {b:.0%}" for name, (a, b) in spreads.items()) + "; of drafted tokens accepted: " +
      ", ".join(f"{name} {value:.0%}" for name, value in rates.items()) + f". The head yields {english:.2f} in English "
      f"and {min(by_language[HEAD].values()):.2f} to {max(v for k, v in by_language[HEAD].items() if k != 'en'):.2f} "
      f"elsewhere. Drafts of {_LENGTH}, {len(asked)} requests; the paper's n-grams are trained on other text, these "
      f"look in the request's own, and draft only what stands there: up to {repeats[loop]:.0%} of an answer ({loop}) "
      f"repeats itself{'; too long and left out: ' + ', '.join(left_out) if left_out else ''}. "
      f"{broken}".strip(),
      ("requests", "number", *makers, "of the text repeats itself"),
      tuple((f"{what} {group}", str(len(rows)), *(f"{table[name][group]:.3f}" for name in makers),
             f"{found[HEAD].of(rows).repeating:.0%}")
            for what, groups, table in (("language", spoken, by_language), ("kind", kinds, by_kind))
            for group, rows in groups.items()), ticks=tuple(spoken), level=1.0)


def _groups(names: Sequence[str]) -> dict[str, list[int]]:
  """The places of each name, in the order of their first ones."""
  return {name: [place for place, other in enumerate(names) if other == name] for name in dict.fromkeys(names)}


def random_prompts(options: base.Options, model: real_model.Model | None = None) -> base.Result:
  """Tokens a step behind prompts of random tokens, over those behind real prompts of the same lengths."""
  model = model or real_model.load()
  real = model.asked(_TOKENS)
  made = randomised(model, real, options.seed)
  arms = {HEAD: real_model.Arm(model.chain(_LENGTH)), LOOKUP: real_model.Arm(real_model.lookup(_LENGTH))}
  found = real_model.measure(model, arms, [one for pair in zip(real, made) for one in pair], new_tokens=_TOKENS,
                             seed=options.seed, label="random prompts")
  halves = {name: (counts.of(range(0, 2 * len(real), 2)), counts.of(range(1, 2 * len(real), 2)))
            for name, counts in found.items()}
  over = {name: b.tokens_per_step / a.tokens_per_step for name, (a, b) in halves.items()}
  edges = {name: statistics.speedup_interval(a.pairs, b.pairs) for name, (a, b) in halves.items()}
  verdict, broken = base.holds({f"{name}: random prompts yield more tokens a step": ratio > 1
                                for name, ratio in over.items()})
  x = tuple(map(float, range(len(arms))))
  shown = lambda interval: "too few requests" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"
  return base.Result(
      "drafts", "tokens a step, random over real prompts", (base.Series("SmolLM2-135M", x, tuple(over.values())),),
      (base.Published("throughput, about", (0.0,), (1.23,), "introduction of SPEED-Bench (huggingface.co/blog/nvidia/"
                      "speed-bench, 2026-03-19), at second hand: random tokens overestimate it by about 23%"),),
      verdict, f"With random tokens in the place of the message, {len(real)} prompts of the same lengths: " + "; ".join(
          f"{name} {b.tokens_per_step:.2f} tokens a step instead of {a.tokens_per_step:.2f} ({over[name]:.2f} times, "
          f"{shown(edges[name])})" for name, (a, b) in halves.items()) + ". How far that is off depends on what the "
      f"model answers to noise; either way such prompts do not measure what requests gain. {broken}".strip(),
      ("drafts and prompts", "tokens a step", "of drafted accepted", "output tokens"),
      tuple((f"{name}, {what}", f"{counts.tokens_per_step:.3f}", f"{counts.ratios['acceptance_rate'] or 0:.3f}",
             str(counts.counted["output_tokens"].sum())) for name, both in halves.items()
            for what, counts in zip(("real", "random"), both)), ticks=tuple(arms), level=1.0)


def randomised(model: real_model.Model, asked: Sequence[real_model.Asked], seed: int) -> list[real_model.Asked]:
  """The same requests with a random id in the place of each of the message's own, inside the chat template; ids that
  stand for text."""
  front, back = map(len, draft_view.template(model.tokenizer))
  text = np.array([i for i in range(model.tokenizer.vocab_size) if not model.tokenizer.is_special(i)])
  made = []
  for place, one in enumerate(asked):
    ids, rng = list(one.ids), np.random.default_rng((seed, place))
    ids[front:len(ids) - back] = rng.choice(text, len(ids) - back - front).tolist()
    made.append(dataclasses.replace(one, ids=tuple(ids)))
  return made


ABLATIONS = (
    base.Ablation("real_temperature", "Temperature on SmolLM2-135M", "2211.17192", "Table 3", (4, 5), "toy",
                  temperature),
    base.Ablation("real_languages", "A trained head and lookups over languages and kinds, SmolLM2-135M", "2605.30580",
                  "acceptance and speed by language and task", (30,), "toy", languages),
    base.Ablation("real_random_prompts", "Prompts of random tokens, SmolLM2-135M", "2604.09557",
                  "synthetic inputs overestimate throughput", (33,), "toy", random_prompts))
