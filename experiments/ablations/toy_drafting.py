"""How heads draft: what each draft knows of the ones before it, features that a head makes itself, more heads.

Heads of three papers on one target, one text, one loss (the target's law, "soft_ce") and one number of passes over the
text; the papers' heads differ in data, epochs and trees as well. All are replayed as chains of drafts that are drawn
at temperature 1, see `toy_acceptance`. What each claims was written down before any of it had run.
"""
import numpy as np

from experiments.ablations import base
from experiments.ablations import toy_acceptance
from experiments.ablations import toy_heads
from experiments.ablations import toy_models
from specjax import static_trees
from specjax.training import trainers

_TREE = 16  # nodes of the optimised tree, the root included
_ABOUT = "arXiv 2401.15077, accuracy of the drafts of both, as quoted by a survey"


def dependence(options: base.Options, size: toy_models.Size = toy_models.DEFAULT) -> base.Result:
  """Acceptance by place in the chain for drafts that know nothing of each other, tokens, or tokens and features."""
  names = ("Medusa", "Hydra", "Hydra++", "EAGLE")
  found = {name: toy_heads.replay(size, options.seed, name, size.heads) for name in names}
  behind = lambda a, b: _gap(found, a, b, toy_acceptance.pooled)
  more = lambda a, b: _gap(found, a, b, toy_acceptance.tokens)
  verdict, words = toy_acceptance.judge({
      "behind the first draft Hydra is accepted more than Medusa": behind("Hydra", "Medusa"),
      "and EAGLE more than Medusa": behind("EAGLE", "Medusa"),
      "Hydra makes more tokens a step than Medusa": more("Hydra", "Medusa"),
      "Hydra++ more than Hydra": more("Hydra++", "Hydra"), "EAGLE more than Hydra": more("EAGLE", "Hydra")})
  rates = {name: toy_acceptance.conditional(replay) for name, replay in found.items()}
  ours = {name: toy_acceptance.tokens(replay) for name, replay in found.items()}
  printed = {"Medusa": "2.51", "Hydra": "3.50", "EAGLE": "3.96"}
  return base.Result(
      "place in the chain", "acceptance given all before", tuple(_by_place(name, rates[name]) for name in names),
      (base.Published("Medusa, about", (1.0,), (.6,), _ABOUT, of="Medusa"),
       base.Published("EAGLE, about", (1.0,), (.8,), _ABOUT, of="EAGLE")),
      verdict, "Behind the first draft, given all before, "
      f"{_listed({n: toy_acceptance.pooled(r) for n, r in found.items()})} are accepted; tokens a step of chains of "
      f"{size.heads}: {_listed(ours, 2)}. Hydra over Medusa: "
      f"{ours['Hydra'] / ours['Medusa']:.2f} (printed 1.10), Hydra++ over Medusa: "
      f"{ours['Hydra++'] / ours['Medusa']:.2f} (printed 1.27 to 1.31). {words}".strip(),
      ("drafter", *(f"place {i + 1}" for i in range(size.heads)), "tokens a step", "printed, Vicuna-13B, trees"),
      tuple((name, *(f"{x:.3f}" for x in rates[name]), f"{ours[name]:.3f}", printed.get(name, "")) for name in names))


def self_fed(options: base.Options, size: toy_models.Size = toy_models.DEFAULT) -> base.Result:
  """Acceptance behind n features that the head made itself, of EAGLE, which meets none such in training, and of HASS
  and EAGLE-3, which do."""
  names, trained = ("EAGLE", "HASS", "EAGLE-3"), size.passes - 1
  found = {name: toy_heads.replay(size, options.seed, name, size.self_fed) for name in names}
  rates = {name: toy_acceptance.conditional(replay) for name, replay in found.items()}

  def fall(name, rows=slice(None)):
    values = toy_acceptance.conditional(found[name], rows)
    return values[0] - values[trained]

  count = len(found["EAGLE"].room)
  verdict, words = toy_acceptance.judge({
      f"EAGLE's acceptance falls from 0 to {trained} self-fed features":
          toy_acceptance.gap(lambda rows: fall("EAGLE", rows), count),
      "EAGLE-3's falls less": toy_acceptance.gap(lambda rows: fall("EAGLE", rows) - fall("EAGLE-3", rows), count)})
  source = "arXiv 2401.15077, n-alpha of chains, as tabulated by a survey"
  return base.Result(
      "features that the head made itself", "acceptance given all before",
      tuple(_by_place(name, rates[name], first=0) for name in names),
      (base.Published("EAGLE, Vicuna-7B", (0.0, 1.0, 2.0, 3.0), (.79, .74, .72, .73), source, of="EAGLE", joined=True),
       base.Published("EAGLE, LLaMA2-Chat-70B", (0.0, 1.0, 2.0, 3.0), (.75, .69, .65, .64), source, of="EAGLE",
                      joined=True)), verdict,
      f"From 0 to {trained} self-fed features, as many as training met, acceptance falls by "
      f"{_listed({name: fall(name) for name in names})} (printed for EAGLE: .06 and .11; EAGLE-3's figure 7 shows it "
      f"almost unchanged). Up to {size.self_fed - 1}, by {_listed({n: v[0] - v[-1] for n, v in rates.items()})}. "
      f"{words}".strip(),
      ("head", *map(str, range(size.self_fed))),
      tuple((name, *(f"{x:.3f}" for x in rates[name])) for name in names))


def medusa_heads(options: base.Options, size: toy_models.Size = toy_models.DEFAULT) -> base.Result:
  """Tokens a step by the number of Medusa's heads, as a chain and as a tree chosen on other text.

  Drafts are each head's most probable ids, as Medusa's are, for text of temperature 1. Heads of a frozen target do not
  meet in training, so n heads are the first n of all.
  """
  found, _, room = toy_heads.measured(size, options.seed, "Medusa", size.heads)
  lab = toy_models.lab(size, options.seed)
  head = trainers.with_accuracy(toy_heads.trained(size, options.seed, "Medusa"), lab.data(), lab.target,
                                toy_heads.all_ids(size))
  counts = range(1, size.heads + 1)
  chain = toy_acceptance.of_chain(found, room)
  shapes = [static_trees.best_first(head.config.accuracy, _TREE, depth) for depth in counts]
  chains = [chain.upto(depth) for depth in counts]
  trees = [toy_acceptance.of_tree(found, room, shape.parents, shape.ranks) for shape in shapes]
  gains = lambda rows: np.diff([1.0, *(toy_acceptance.tokens(replay, rows) for replay in chains)])
  verdict, words = toy_acceptance.judge({
      **{f"head {n} adds tokens": toy_acceptance.gap(lambda rows, n=n: gains(rows)[n - 1], len(room)) for n in counts},
      **{f"head {n} adds less than head {n - 1}": toy_acceptance.gap(
          lambda rows, n=n: gains(rows)[n - 2] - gains(rows)[n - 1], len(room)) for n in counts[1:]},
      "a tree makes more than a chain": toy_acceptance.gap(
          lambda rows: toy_acceptance.tokens(trees[-1], rows) - toy_acceptance.tokens(chains[-1], rows), len(room))})
  of_chain, of_tree = ([1.0, *map(toy_acceptance.tokens, replays)] for replays in (chains, trees))
  x = tuple(map(float, range(size.heads + 1)))
  source = "arXiv 2404.19737, speedup with 1 to 4 heads, one of them the target's own, as quoted by a survey"
  return base.Result(
      "heads beside the target's own", "tokens a step; printed: speedup",
      (base.Series("chain", x, tuple(of_chain)), base.Series(f"best tree of {_TREE} nodes", x, tuple(of_tree))),
      (base.Published("code", (0.0, 1.0, 2.0, 3.0), (1.0, 1.85, 2.54, 3.05), source, joined=True),
       base.Published("text", (0.0, 1.0, 2.0, 3.0), (1.0, 1.79, 2.35, 2.74), source, joined=True)), verdict,
      f"Heads add {', '.join(f'{gain:.3f}' for gain in gains(slice(None)))} tokens as a chain (printed on code: .85, "
      f".69, .51); with {size.heads} heads a chain makes {of_chain[-1]:.2f} and a tree of {_TREE} nodes "
      f"{of_tree[-1]:.2f}. The printed heads were trained together with the target, ours on a frozen one. "
      f"{words}".strip(),
      ("heads", "chain", f"tree of {_TREE}"),
      tuple((str(n), f"{a:.3f}", f"{b:.3f}") for n, (a, b) in enumerate(zip(of_chain, of_tree))))


def _gap(found, more, less, measure):
  return toy_acceptance.gap(lambda rows: measure(found[more], rows) - measure(found[less], rows), len(found[more].room))


def _by_place(name, values, first=1):
  x = range(first, first + len(values))
  return base.Series(name, tuple(map(float, x)), tuple(None if np.isnan(v) else float(v) for v in values))


def _listed(values, digits=3):
  return ", ".join(f"{value:.{digits}f} ({name})" for name, value in values.items())


ABLATIONS = (
    base.Ablation("medusa_heads", "The number of Medusa's heads", "2404.19737", "table of heads and speedup; Medusa's "
                  "trees", (19,), "toy", medusa_heads),
    base.Ablation("head_dependence", "What a draft knows of the drafts before it", "2402.05109", "motivation and "
                  "speedup table", (20,), "toy", dependence),
    base.Ablation("self_fed_features", "Acceptance behind self-fed features", "2503.01840", "Figure 7, n-alpha", (16,),
                  "toy", self_fed))
