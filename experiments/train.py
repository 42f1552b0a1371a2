"""Trains a draft head for a target on a corpus of experiments.write_training_data.

  python -m experiments.train --head=eagle3 --corpus=data/smollm2 --outdir=runs/eagle3 --epochs=3

Features of the corpus are computed first and kept beside it. The run folder holds metrics.jsonl, curves.png, checkpoints
and, at the end, the head (`head/`, as published heads are laid out). A run that was killed goes on where it was.
"""
from absl import flags

from experiments.harness import cli
from experiments.harness import settings
from experiments.harness import training

_HEAD = flags.DEFINE_enum("head", "eagle3", list(training.HEADS), "The kind of head.")
_CORPUS = flags.DEFINE_list("corpus", None, "Folders of the training data, separated by commas.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Folder of the run.")
_EPOCHS = flags.DEFINE_float("epochs", 2.0, "Passes over the data.", lower_bound=0)
_STEPS = flags.DEFINE_integer("steps", None, "Optimizer steps, instead of --epochs.", lower_bound=1)
_LIMIT = flags.DEFINE_integer("limit_tokens", None, "Tokens of the corpus to train on, at most.", lower_bound=1)
_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Greatest learning rate.", lower_bound=0)
_BATCH = flags.DEFINE_integer("batch_tokens", 2048, "Tokens of a batch, about.", lower_bound=64)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 384, "Sequences are cut there.", lower_bound=16)
_VOCAB = flags.DEFINE_integer("draft_vocab", 4096, "Ids that the head drafts: the most frequent ones of the corpus; 0 "
                              "for all.", lower_bound=0)
_LOSS = flags.DEFINE_enum("loss", "soft_ce", training.LOSSES, "Loss against the target's law; text_ce: the cross "
                          "entropy of the text's own tokens, as DeepSeek and FastMTP train.")
_ANSWERS = flags.DEFINE_bool("answers_only", True, "Learn from the target's own answers alone, not from prompts.")
_PASSES = flags.DEFINE_integer("passes", None, "eagle3: passes of the training-time test, 4 by default. eagle: 1 by "
                               "default, as EAGLE trains; 3 for HASS. mtp: 3 by default, as in FastMTP.", lower_bound=1)
_DECAY = flags.DEFINE_float("pass_decay", 0.6, "mtp: weight of a pass beside the one before it; 0.6 is FastMTP's, 1 "
                            "DeepSeek's mean over depths.", lower_bound=0)
_NOISE = flags.DEFINE_float("noise", 0.1, "eagle: features are read with uniform noise of up to it.", lower_bound=0)
_HEADS = flags.DEFINE_integer("heads", 4, "medusa and hydra: number of heads.", lower_bound=1)
_BLOCKS = flags.DEFINE_integer("blocks", 4, "hydra: residual blocks of each head.", lower_bound=1)
_PREFIX = flags.DEFINE_bool("prefix_attention", True, "hydra: a layer of attention over the target's hidden states "
                            "(Hydra++).")
_BLOCK = flags.DEFINE_integer("block", 8, "dflash, dspark: places of a block, the pending token's included, which "
                              "drafts in dspark.", lower_bound=2)
_LAYERS = flags.DEFINE_integer("head_layers", 3, "dflash, dspark, peagle: layers of the drafter.", lower_bound=1)
_CAUSAL = flags.DEFINE_bool("causal", False, "dflash: a place of the block does not see those behind it (JetSpec).")
_RANK = flags.DEFINE_integer("markov_rank", 64, "dspark: rank of the Markov head.", lower_bound=1)
_DEPTHS = flags.DEFINE_integer("depths", 4, "peagle: tokens that one pass drafts.", lower_bound=1)
_START = flags.DEFINE_string("start_from", None, "A head to go on from, instead of the target's own layers.")
_EVALUATE = flags.DEFINE_integer("evaluate_every", 200, "Steps between two looks at held-out text and prompts.",
                                 lower_bound=1)


def main():
  settings.uses_only(settings.TARGET, settings.SEED)
  if not _CORPUS.value or not _OUTDIR.value:
    raise ValueError("--corpus and --outdir are both needed: the training data, and the folder of the run")
  job = training.Job(
      head=_HEAD.value, target=settings.TARGET.value, corpora=tuple(_CORPUS.value), outdir=_OUTDIR.value, epochs=_EPOCHS.value,
      steps=_STEPS.value, limit=_LIMIT.value, learning_rate=_RATE.value, batch_tokens=_BATCH.value,
      max_tokens=_MAX_TOKENS.value, draft_vocab=_VOCAB.value, loss=_LOSS.value, answers_only=_ANSWERS.value,
      passes=_PASSES.value or training.PASSES.get(_HEAD.value, 4), heads=_HEADS.value, blocks=_BLOCKS.value,
      prefix_attention=_PREFIX.value, block=_BLOCK.value, head_layers=_LAYERS.value, markov_rank=_RANK.value,
      depths=_DEPTHS.value, causal=_CAUSAL.value,
      start=_START.value, noise=_NOISE.value, pass_decay=_DECAY.value,
      evaluate_every=_EVALUATE.value, seed=settings.SEED.value)
  training.check_read(job, flags.FLAGS)
  found = training.run(job)
  print(f"{_OUTDIR.value}/head: {found['held_out/expected_tokens']:.2f} tokens a step expected on held-out text, "
        f"{found['held_out/tokens_per_step']:.2f} measured on held-out prompts")


if __name__ == "__main__":
  cli.run(main)
