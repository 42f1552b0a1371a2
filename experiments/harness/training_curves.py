"""Curves of a training run as a picture: loss, accuracy by depth, tokens a step on held-out text and prompts."""
import pathlib

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


def draw(rows: list[dict], path: pathlib.Path, title: str) -> None:
  """Writes the PNG of rows of metrics.jsonl."""
  figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
  steps = [row["step"] + 1 for row in rows]
  left.plot(steps, [row["loss"] for row in rows], color="0.8", linewidth=0.8)
  left.plot(steps, _smooth([row["loss"] for row in rows]), color="C0")
  left.set(xlabel="step", ylabel="loss", title=f"{title}: loss")
  evaluated = [row for row in rows if "held_out/loss_0" in row]
  depth = 0
  while any(f"accuracy_{depth}" in row for row in rows):
    known = [row for row in rows if f"accuracy_{depth}" in row]
    middle.plot([row["step"] + 1 for row in known], _smooth([row[f"accuracy_{depth}"] for row in known]),
                color=f"C{depth}", linewidth=0.9, alpha=0.5)
    middle.plot([row["step"] + 1 for row in evaluated], [row[f"held_out/accuracy_{depth}"] for row in evaluated], "o-",
                color=f"C{depth}", markersize=3, label=f"depth {depth + 1}")
    depth += 1
  rated = [row for row in evaluated if "held_out/acceptance" in row]
  if rated:
    middle.plot([row["step"] + 1 for row in rated], [row["held_out/acceptance"] for row in rated], "s--", color="0.3",
                markersize=3, label="acceptance of every place")
  middle.set(xlabel="step", ylabel="accuracy", title="given all above right (points: held out)")
  middle.legend(fontsize=7)
  for name, label in (("expected_tokens", "held-out text"), ("tokens_per_step", "held-out prompts, measured")):
    right.plot([row["step"] + 1 for row in evaluated], [row[f"held_out/{name}"] for row in evaluated], "o-", markersize=3,
               label=label)
  right.set(xlabel="step", ylabel="tokens a step", title="tokens a step, chain")
  right.legend(fontsize=7)
  figure.savefig(path, dpi=110)
  plt.close(figure)


def _smooth(values, width=25):
  """Mean over the last `width` values."""
  total = np.concatenate([[0.0], np.cumsum(values)])
  end = np.arange(1, len(values) + 1)
  begin = np.maximum(end - width, 0)
  return (total[end] - total[begin]) / (end - begin)


def draw_language(rows: list[dict], path: pathlib.Path, title: str) -> None:
  """Writes the PNG of a model that is trained from nothing: cross entropy and accuracy, the balance of its experts."""
  mixed = any("busiest" in row for row in rows)
  panels = [("cross_entropy", "nats a token"), ("accuracy", "greatest logit is right")]
  panels += [("busiest", "load over the mean")] * mixed
  figure, axes = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 3.6), constrained_layout=True)
  evaluated = [row for row in rows if "held_out/cross_entropy" in row]
  for axis, (name, label) in zip(axes, panels):
    axis.plot([row["step"] + 1 for row in rows], _smooth([row[name] for row in rows]), color="C0", label="trained on")
    axis.plot([row["step"] + 1 for row in evaluated], [row[f"held_out/{name}"] for row in evaluated], "o-", color="C1",
              markersize=3, label="held out")
    axis.set(xlabel="step", ylabel=label, title=f"{title}: {name.replace('_', ' ')}")
    axis.legend(fontsize=7)
  figure.savefig(path, dpi=110)
  plt.close(figure)
