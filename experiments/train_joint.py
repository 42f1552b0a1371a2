"""Trains Medusa's heads together with their target (Medusa-2): the heads alone first, then both.

  python -m experiments.train_joint --corpus=data/smollm2 --outdir=runs/joint --steps=1000 --heads_first=400
  python -m experiments.benchmark --target=runs/joint/target --methods=plain,medusa --medusa_head=runs/joint/head

The corpus is one of experiments.write_training_data; no features are computed. The run folder holds metrics.jsonl,
curves.png, checkpoints and, at the end, the new target (`target/`, a Hugging Face folder) and its heads (`head/`). The
new target is another model: what is drafted for it is exact relative to it. How often it still agrees with the original
is measured on held-out text ("kept"). A run that was killed goes on where it was.
"""
from absl import flags

from experiments.harness import cli
from experiments.harness import joint_training
from experiments.harness import settings

_CORPUS = flags.DEFINE_list("corpus", None, "Folders of the training data, separated by commas.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Folder of the run.")
_STEPS = flags.DEFINE_integer("steps", 1000, "Optimizer steps in all.", lower_bound=1)
_FIRST = flags.DEFINE_integer("heads_first", 400, "Of these the first so many train the heads alone; 0 with "
                              "--start_from heads that are trained.", lower_bound=0)
_LIMIT = flags.DEFINE_integer("limit_tokens", None, "Tokens of the corpus to train on, at most.", lower_bound=1)
_RATE = flags.DEFINE_float("learning_rate", 5e-5, "Greatest learning rate of the target.", lower_bound=0)
_HEADS_RATE = flags.DEFINE_float("heads_rate", 4.0, "Times it: that of the heads.", lower_bound=0)
_WEIGHT = flags.DEFINE_float("heads_weight", 0.2, "Weight of the heads' loss beside the target's at the end; it grows "
                             "along a sine.", lower_bound=1e-6)
_BACKBONE = flags.DEFINE_enum("backbone_loss", "distill", joint_training.BACKBONE, "The target's own loss: from the "
                              "original target, or from the text.")
_BATCH = flags.DEFINE_integer("batch_tokens", 2048, "Tokens of a batch, about.", lower_bound=64)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 384, "Sequences are cut there.", lower_bound=16)
_VOCAB = flags.DEFINE_integer("draft_vocab", 4096, "Ids that the heads draft: the most frequent ones of the corpus; 0 "
                              "for all.", lower_bound=0)
_HEADS = flags.DEFINE_integer("heads", 4, "Number of heads.", lower_bound=1)
_START = flags.DEFINE_string("start_from", None, "Medusa's heads to go on from.")
_LOSS = flags.DEFINE_enum("loss", "soft_ce", joint_training.LOSSES, "The heads' loss against the original target's "
                          "law.")
_EVALUATE = flags.DEFINE_integer("evaluate_every", 200, "Steps between two looks at held-out text and prompts.",
                                 lower_bound=1)


def main():
  settings.uses_only(settings.TARGET, settings.SEED)
  if not _CORPUS.value or not _OUTDIR.value:
    raise ValueError("--corpus and --outdir are both needed: the training data, and the folder of the run")
  if _START.value and not flags.FLAGS["draft_vocab"].using_default_value:
    raise ValueError(f"--draft_vocab={_VOCAB.value}: the head of --start_from={_START.value} has its ids; leave it out")
  found = joint_training.run(joint_training.Job(
      target=settings.TARGET.value, corpora=tuple(_CORPUS.value), outdir=_OUTDIR.value, steps=_STEPS.value,
      heads_first=_FIRST.value, limit=_LIMIT.value, learning_rate=_RATE.value, heads_rate=_HEADS_RATE.value,
      heads_weight=_WEIGHT.value, backbone=_BACKBONE.value, batch_tokens=_BATCH.value, max_tokens=_MAX_TOKENS.value,
      draft_vocab=_VOCAB.value, heads=_HEADS.value, start=_START.value, loss=_LOSS.value,
      evaluate_every=_EVALUATE.value, seed=settings.SEED.value))
  print(f"{_OUTDIR.value}/target and {_OUTDIR.value}/head: {found['held_out/expected_tokens']:.2f} tokens a step "
        f"expected on held-out text, {found['held_out/tokens_per_step']:.2f} measured on held-out prompts; the target "
        f"agrees with the original at {found['held_out/kept']:.1%} of the places")


if __name__ == "__main__":
  cli.run(main)
