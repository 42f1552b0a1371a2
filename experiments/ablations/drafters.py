"""What printed tables of drafters imply: confidence, recall by position, and the cost of a step."""
import numpy as np

from experiments.ablations import base
from experiments.ablations import exact
from specjax.theory import transport
from specjax.verifiers import synthetic


def confidence(options: base.Options) -> base.Result:
  """Acceptance of the draft's argmax by the draft's own confidence in it, target drawn at temperature 1."""
  edges = np.array((0, .05, .1, .2, .3, .4, .5, .6, .7, .8, .9, .95, 1.0001))
  sure, right = [], []
  for sharpness in (.5, 1.0, 2.0, 3.0, 5.0):
    target, draft = exact.noisy_logits(options.seed, 1500, sharpness=sharpness)
    for p, q in zip(exact.softmax(target), exact.softmax(draft)):
      sure.append(q.max())
      right.append(transport.top_k(p, q, 1))
  sure, right = np.array(sure), np.array(right)
  bins = [(sure[inside].mean(), right[inside].mean(), int(inside.sum()))
          for low, high in zip(edges, edges[1:]) for inside in [(sure >= low) & (sure < high)] if inside.any()]
  x, y, count = map(tuple, zip(*bins))
  claims, broken = base.holds({"acceptance rises with confidence": all(b >= a for a, b in zip(y, y[1:])),
                               "below .05 about .04 are accepted": abs(y[0] - .04) < .03,
                               "above .95 about .98": abs(y[-1] - .98) < .03})
  return base.Result(
      "confidence of the draft", "acceptance",
      (base.Series("noisy draft", tuple(map(float, x)), tuple(map(float, y))),
       base.Series("calibrated", (0.0, 1.0), (0.0, 1.0))),
      (base.Published("EAGLE, ends of its figure", (.025, .975), (.04, .98), "arXiv 2406.16858, section 3: below .05 "
                      "and above .95"),), claims,
      f"Below .05 a share of {y[0]:.3f} is accepted (paper .04), above .95 {y[-1]:.3f} (.98); between them a draft "
      f"that is the target with noise is overconfident by up to {max(a - b for a, b in zip(x, y)):.2f}. "
      f"{broken}".strip(),
      ("confidence", "acceptance", "laws"), tuple((f"{a:.3f}", f"{b:.3f}", str(n)) for a, b, n in zip(x, y, count)))


def recall(options: base.Options) -> base.Result:
  """Tokens a step of a block of 7 from its recall by position: of the first guess, and of the best of 16."""
  del options
  places = np.arange(1, 8)
  ends = {"first guess": (.854, .729, 4.27), "best of 16": (.995, .878, 6.79)}
  by_place = {name: np.linspace(first, last, 7) for name, (first, last, _) in ends.items()}
  # The library's own count of a chain whose acceptance by position is stated.
  found = {name: synthetic.LossySynthetic(tuple(map(float, values))).tokens_per_step
           for name, values in by_place.items()}
  verdict, gap = base.within(list(found.values()), [row[2] for row in ends.values()], .05, relative=True)
  x = tuple(map(float, places))
  return base.Result(
      "position in the block", "survival of the path",
      tuple(base.Series(name, x, tuple(map(float, np.cumprod(values)))) for name, values in by_place.items()),
      tuple(base.Published(f"recall, {name}", (1.0, 7.0), row[:2], "DFlash-2 report (2026-08), selector diagnostics",
                           of=name) for name, row in ends.items()), verdict,
      f"Recall drawn as a line between its printed ends gives {found['first guess']:.2f} and {found['best of 16']:.2f} "
      f"tokens a step; printed are 4.27 and, for a perfect selector, 6.79: within {gap:.1%}. So the printed recalls "
      "are those given that all earlier positions were right.",
      ("guess", "tokens from recall", "tokens printed"),
      tuple((name, f"{found[name]:.2f}", f"{row[2]:.2f}") for name, row in ends.items()))


def step_cost(options: base.Options) -> base.Result:
  """The cost of a step that tokens and speedup imply, for drafters that take a pass a token or one in all."""
  del options
  table = (("EAGLE-3, 5 layers, input", 4.2, 2.1, 7), ("a pass a token, K/V", 4.8, 2.4, 7),
           ("one pass, input", 3.5, 2.9, 1), ("one pass, K/V", 4.2, 3.3, 1))
  implied = [tokens / speed for _, tokens, speed, _ in table]
  # The cost of a pass, from the drafters that take seven.
  cost = float(np.mean([(value - 1) / passes for value, (_, _, _, passes) in zip(implied, table) if passes > 1]))
  expected = [1 + passes * cost for _, _, _, passes in table]
  verdict, gap = base.within(expected, implied, .1, relative=True)
  x = tuple(float(i) for i in range(4))
  return base.Result(
      "drafter", "cost of a step in plain steps", (base.Series(f"1 + passes x {cost:.3f}", x, tuple(expected)),),
      (base.Published("tokens over speedup", x, tuple(implied), "arXiv 2602.06036, conditioning table, GSM8K, block of "
                      "8"),), verdict,
      f"Seven passes imply {cost:.3f} plain steps each; one such pass would make a step {1 + cost:.2f}, and the table "
      f"implies {implied[2]:.2f} and {implied[3]:.2f}, up to {gap:.0%} more: a pass over a block costs "
      f"{(implied[2] - 1) / cost:.1f} to {(implied[3] - 1) / cost:.1f} times one over a token. Yet a pass a token "
      "with K/V accepts most (4.8 tokens) and is slower (2.4) than one pass that accepts less (4.2 tokens, 3.3).",
      ("drafter", "tokens a step", "speedup", "implied cost", "model"),
      tuple((name, f"{t:.1f}", f"{s:.1f}", f"{i:.2f}", f"{e:.2f}")
            for (name, t, s, _), i, e in zip(table, implied, expected)), ticks=tuple(row[0] for row in table))


ABLATIONS = (
    base.Ablation("confidence", "Is the draft's confidence its acceptance?", "2406.16858", "confidence figure", (18,),
                  "sim", confidence),
    base.Ablation("selector_recall", "Recall by position and tokens a step", "DFlash-2 (2026-08)", "selector "
                  "diagnostics",
                  (23,), "sim", recall),
    base.Ablation("draft_conditioning", "What drafts of a block cost", "2602.06036", "conditioning table", (22,), "sim",
                  step_cost))
