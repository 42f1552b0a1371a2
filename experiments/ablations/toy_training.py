"""How drafters are trained: EAGLE's inputs, EAGLE-3's losses and features, the amount of text, the divergence.

See `toy_drafting` for what all heads share. Claims were written down before any of it had run.
"""
import dataclasses
import functools

import jax
import numpy as np

from experiments.ablations import base
from experiments.ablations import toy_acceptance
from experiments.ablations import toy_heads
from experiments.ablations import toy_models
from specjax.training import distill
from specjax.training import fresh
from specjax.training import pretrain
from specjax.training import shifts
from specjax.training import trainers

_SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)
_LOSSES = {"kl": "forward KL", "reverse_kl": "reverse KL", "jsd": "JSD", "tv": "TV"}
_DRAFT_LAYERS = 2
_TEXT = "text alone"
_HEATS = (0.0, .5, 1.0)


def inputs(options: base.Options, size: toy_models.Size = toy_models.DEFAULT) -> base.Result:
  """EAGLE's head with one of its inputs cut out of every entry, in training and in drafting.

  The paper's ladder has a further rung, feature and token not shifted, which is not here. The order depends on how long
  a head learns: four times as long (`passes_over=2`, seed 0) they make 3.09, 1.85 and 3.38 tokens a step.
  """
  names = {"EAGLE, tokens alone": "tokens", "EAGLE, features alone": "features", "EAGLE": "features and next tokens"}
  found = {name: toy_heads.replay(size, options.seed, name, size.passes) for name in names}
  verdict, words = toy_acceptance.judge({
      "features make more tokens a step than tokens": _more(found, "EAGLE, features alone", "EAGLE, tokens alone"),
      "features and next tokens more than features": _more(found, "EAGLE", "EAGLE, features alone")})
  speed, source = (1.5, 1.9, 2.8), "arXiv 2401.15077, ladder of inputs: MT-bench, temperature 0, as quoted by a survey"
  ours, rates = _measured(found)
  x = tuple(map(float, range(3)))
  return base.Result(
      "what the head reads", "tokens a step; printed: speedup",
      (base.Series("tokens a step", x, tuple(ours.values())),),
      (base.Published("speedup, Vicuna-7B", x, speed, source),), verdict,
      f"Tokens a step are {', '.join(f'{ours[n]:.2f} ({label})' for n, label in names.items())}; printed speedups 1.5, "
      "1.9 and 2.8, of greedy text. Here text is drawn: features alone cannot know which token was. The head that "
      f"reads both could do what one over tokens does, and needs longer to learn it. {words}".strip(),
      ("input", *(f"place {i + 1}" for i in range(size.passes)), "tokens a step", "printed speedup"),
      tuple((label, *(f"{r:.3f}" for r in rates[n]), f"{ours[n]:.3f}", f"{s:g}") for (n, label), s in
            zip(names.items(), speed)), ticks=tuple(names.values()))


def ladder(options: base.Options, size: toy_models.Size = toy_models.DEFAULT) -> base.Result:
  """From EAGLE's head to EAGLE-3's: its own passes in training, no feature loss, features of three layers.

  HASS, which the paper's ladder jumps over, has EAGLE's head and loss and EAGLE-3's passes. The rung without a feature
  loss has EAGLE-3's head (norms and a vocabulary matrix of its own) over the last layer's output.
  """
  names = {"EAGLE": "EAGLE", "HASS": "its own passes (HASS)", "EAGLE-3, one feature": "no feature loss",
           "EAGLE-3": "features of three layers"}
  found = {name: toy_heads.replay(size, options.seed, name, size.passes) for name in names}
  verdict, words = toy_acceptance.judge({
      "without the feature loss more tokens a step than EAGLE": _more(found, "EAGLE-3, one feature", "EAGLE"),
      "with fused features more than without": _more(found, "EAGLE-3", "EAGLE-3, one feature")})
  printed = {"EAGLE": (4.05, 4.24), "EAGLE-3, one feature": (5.37, 5.22), "EAGLE-3": (6.13, 6.23)}
  ours, rates = _measured(found)
  x = tuple(map(float, range(4)))
  at = tuple(float(i) for i, name in enumerate(names) if name in printed)
  source = "arXiv 2503.01840, ablation table: LLaMA-Instruct-3.1-8B, trees"
  return base.Result(
      "head", "tokens a step", (base.Series("chains of drafts", x, tuple(ours.values())),),
      (base.Published("MT-bench", at, tuple(row[0] for row in printed.values()), source, joined=True),
       base.Published("GSM8K", at, tuple(row[1] for row in printed.values()), source, joined=True)), verdict,
      f"Tokens a step of chains of {size.passes}: "
      f"{', '.join(f'{ours[n]:.2f} ({label})' for n, label in names.items())}; printed, with trees, 4.05, 5.37 and "
      f"6.13. {words}".strip(),
      ("head", *(f"place {i + 1}" for i in range(size.passes)), "tokens a step", "printed, MT-bench"),
      tuple((label, *(f"{r:.3f}" for r in rates[n]), f"{ours[n]:.3f}", f"{printed[n][0]:g}" if n in printed else "")
            for n, label in names.items()), ticks=tuple(names.values()))


def amount(options: base.Options, size: toy_models.Size = toy_models.DEFAULT) -> base.Result:
  """Tokens a step by the amount of text, each amount seen equally often: so more text is more steps, too."""
  names = ("EAGLE", "EAGLE-3")
  found = {(name, share): toy_heads.replay(size, options.seed, name, size.passes, share)
           for name in names for share in _SHARES}

  def rise(name, rows=slice(None)):
    first, last = (toy_acceptance.tokens(found[name, share], rows) for share in (_SHARES[0], 1.0))
    return last - first

  count = len(found["EAGLE", 1.0].room)
  verdict, words = toy_acceptance.judge({
      "EAGLE-3 makes more tokens from eight times the text": toy_acceptance.gap(
          lambda rows: rise("EAGLE-3", rows), count),
      "and gains more by it than EAGLE": toy_acceptance.gap(
          lambda rows: rise("EAGLE-3", rows) - rise("EAGLE", rows), count)})
  text = toy_models.lab(size, options.seed).data().training_tokens
  x = tuple(share / _SHARES[0] for share in _SHARES)
  ours = {name: [toy_acceptance.tokens(found[name, share]) for share in _SHARES] for name in names}
  return base.Result(
      f"text, in {text * _SHARES[0] / 1000:.0f} thousand tokens", "tokens a step",
      tuple(base.Series(name, x, tuple(ours[name])) for name in names), (), verdict,
      f"From one to eight parts of the text EAGLE goes from {ours['EAGLE'][0]:.2f} to {ours['EAGLE'][-1]:.2f} tokens a "
      f"step and EAGLE-3 from {ours['EAGLE-3'][0]:.2f} to {ours['EAGLE-3'][-1]:.2f}. The paper's figure, whose values "
      "are not printed, shows EAGLE flat and EAGLE-3 rising; EAGLE's own amount is 68 thousand dialogues, and all of "
      f"ours, {text / 1000:.0f} thousand tokens, is far less. "
      f"{words}".strip(),
      ("head", *(f"x{value:g}" for value in x)), tuple((name, *(f"{y:.3f}" for y in ours[name])) for name in names),
      log_x=True)


def divergence(options: base.Options, size: toy_models.Size = toy_models.DEFAULT) -> base.Result:
  """The chance that a draw of a draft model is accepted, 1 - TV, by the divergence that it was distilled with.

  All begin as one draft model that learned from the text; "text alone" goes on so. The texts are fixed (DistillSpec's
  drafter also writes its own), and acceptance is computed from both laws at every held-out place, not drawn.
  """
  found = _distilled(size, options.seed)
  rates = {name: [rows[0].sum() / rows[1].sum() for rows in by_heat] for name, by_heat in found.items()}
  count = len(found[_TEXT][0][1])

  def gap(more, less, heat):
    at = _HEATS.index(heat)
    rate = lambda name, rows: found[name][at][0][rows].sum() / found[name][at][1][rows].sum()
    return toy_acceptance.gap(lambda rows: rate(more, rows) - rate(less, rows), count)

  best = {heat: max(_LOSSES.values(), key=lambda name: rates[name][i]) for i, heat in enumerate(_HEATS)}
  told = ", ".join(f"{best[heat]} at {heat:g} ({rates[best[heat]][i]:.3f}, text alone {rates[_TEXT][i]:.3f})"
                   for i, heat in enumerate(_HEATS))
  second = max((name for name in _LOSSES.values() if name != "TV"), key=lambda name: rates[name][-1])
  verdict, words = toy_acceptance.judge({
      **{f"at temperature {heat:g} the best divergence is accepted more than text alone": gap(best[heat], _TEXT, heat)
         for heat in _HEATS},
      "trained on TV it is accepted most at temperature 1": gap("TV", second, 1.0)})
  return base.Result(
      "temperature", "acceptance of a draw", tuple(base.Series(name, _HEATS, tuple(rates[name])) for name in found),
      (), verdict, f"The best divergence is {told}; DistillSpec (arXiv 2310.08461) prints 10 to 45% more speed over no "
      f"distillation. Each learned for {size.draft_steps} steps; the slope of TV vanishes where a draft gives p's ids "
      f"no chance, which such a short time may not mend. {words}".strip(),
      ("trained with", *(f"temperature {heat:g}" for heat in _HEATS)),
      tuple((name, *(f"{x:.4f}" for x in values)) for name, values in rates.items()))


@functools.cache
def _distilled(size, seed):
  """By the name of what it was trained with and by temperature: f[2, N], the sum of acceptance over the answer of each
  held-out sequence, and its tokens."""
  lab = toy_models.lab(size, seed)
  rows = dataclasses.replace(lab.rows, tokens=size.tokens)  # as many as while it is distilled
  loss = functools.partial(pretrain.next_token, balance=0.0)
  learn = lambda title, model, first: toy_models.run(
      title, model, loss, lambda step: rows.batch(first + step, seed), size.draft_steps, size.head_rate)
  begun = learn("draft model", fresh.decoder(toy_models.config(size, _DRAFT_LAYERS, size.draft_width), seed), 0)
  models = {_TEXT: learn("draft model, text alone", begun, size.draft_steps)}
  for loss_name, name in _LOSSES.items():
    trainer = trainers.train_draft_model(lab.target, begun, lab.texts(), distill.Recipe(loss=loss_name, on_policy=0.0),
                                         seed)
    models[name] = trainer.head(toy_models.run(f"draft model, {name}", trainer.params, trainer.loss, trainer.batch,
                                               size.draft_steps, size.head_rate, arguments=trainer.arguments))
  given = lab.measured()
  return {name: [_accepted(model, lab.target, given, heat) for heat in _HEATS] for name, model in models.items()}


def _accepted(model, target, given, heat):
  parts = [jax.device_get(_acceptance(model, target, batch.tokens, heat)) for batch in given]
  asked = [np.asarray(shifts.asked(batch, 1, True)) for batch in given]
  sums = np.concatenate([(part * where).sum(1) for part, where in zip(parts, asked)])
  counts = np.concatenate([where.sum(1) for where in asked])
  return np.stack([sums, counts])[:, counts > 0]


@functools.partial(jax.jit, static_argnames="heat")
def _acceptance(model, target, tokens, heat):
  own, theirs = (x.logits(distill.hidden(x, tokens)) for x in (model, target))
  return distill.acceptance(own, theirs, heat)


def _measured(found):
  return ({name: toy_acceptance.tokens(replay) for name, replay in found.items()},
          {name: toy_acceptance.conditional(replay) for name, replay in found.items()})


def _more(found, more, less):
  return toy_acceptance.gap(lambda rows: toy_acceptance.tokens(found[more], rows)
                            - toy_acceptance.tokens(found[less], rows), len(found[more].room))


ABLATIONS = (
    base.Ablation("eagle3_ladder", "From EAGLE to EAGLE-3", "2503.01840", "ablation table", (15,), "toy", ladder),
    base.Ablation("eagle_inputs", "What EAGLE's head reads", "2401.15077", "ladder of inputs", (14,), "toy", inputs),
    base.Ablation("training_data", "More text to train on", "2503.01840", "scaling figure", (17,), "toy", amount),
    base.Ablation("distillation_loss", "The divergence that a draft model learns by", "2310.08461", "divergences by "
                  "task and decoding", (25,), "toy", divergence))
