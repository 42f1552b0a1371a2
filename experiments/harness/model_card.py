"""The card beside a trained head: what it is, what it was trained on and how, how long that took, what it does."""
import json
import os
import pathlib
import shlex
import sys

import jax


def write(folder: pathlib.Path, *, head: str, target: str, facts: dict, corpora: list[dict], counts: dict,
          rows: list[dict], size: int) -> None:
  """Writes README.md.

  Args:
    facts: of the run, as in its config.json. corpora: facts of each corpus. counts: numbers about data and head.
    rows: of metrics.jsonl. size: bytes of the head.
  """
  evaluated = [row for row in rows if "held_out/expected_tokens" in row]
  seconds = sum(row["seconds"] for row in rows)
  last = evaluated[-1]
  depths = sorted(int(name.rsplit("_", 1)[1]) for name in last if name.startswith("held_out/accuracy_"))
  table = [f"| {row['step'] + 1} | {row['loss']:.3f} | "
           + " | ".join(f"{row[f'held_out/accuracy_{depth}']:.3f}" for depth in depths)
           + f" | {row['held_out/expected_tokens']:.3f} | {row['held_out/tokens_per_step']:.3f} |" for row in evaluated]
  data = [f"- {name}: {json.dumps({key: value for key, value in corpus.items()}, ensure_ascii=False)}"
          for name, corpus in ((corpus["name"], corpus) for corpus in corpora)]
  text = f"""# {head} for {target}

A draft head trained with specjax. Weights are bfloat16, {size / 1e6:.1f} MB; the figures below are of those in training,
which are float32.

## Data

{chr(10).join(data)}

{counts['training_tokens']} tokens of these were trained on{", answers alone as labels" if facts["answers_only"] else
", prompts as labels too"}; one in
{counts['held_out']} sequences was held out, by its prompt. Prompts of one source may resemble each other across that line.
The draft vocabulary of {counts['draft_vocab']} ids holds {counts['covered']:.1%} of the tokens that the target wrote.

## Training

{len(rows)} steps of about {facts['batch_tokens']} tokens, {seconds / 60:.0f} minutes of optimizer steps on
{jax.devices()[0].device_kind} ({jax.default_backend()}, {os.cpu_count()} CPU cores), writing the answers and computing features
not counted; seed {facts['seed']}.

    {command()}

| setting | value |
|---|---|
{chr(10).join(f"| {key} | {json.dumps(value)} |" for key, value in facts.items())}

## Held out

Accuracy at a depth counts places where all above it were right. Expected tokens are those of a greedy chain on held-out
text; measured tokens a step are of greedy decoding behind held-out prompts, {counts['prompts']} of them.

| step | loss | {' | '.join(f'accuracy {depth + 1}' for depth in depths)} | expected tokens | measured tokens a step |
|---|---|{'---|' * len(depths)}---|---|
{chr(10).join(table)}
"""
  (folder / "README.md").write_text(text, encoding="utf-8")


def command() -> str:
  """What started this process, folders of files left out."""
  shown = []
  for word in sys.argv[1:]:
    name, equals, value = word.partition("=")
    paths = [pathlib.Path(part).name if "/" in part else part for part in value.split(",")]
    shown.append(shlex.quote(f"{name}{equals}{','.join(paths)}"))
  return " ".join(["python -m experiments.train", *shown])
