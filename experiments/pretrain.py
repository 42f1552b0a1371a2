"""Trains a small model from nothing: an encoder-decoder (t5), a mixture of experts (mixtral) or a decoder (llama).

  python -m experiments.pretrain --family=t5 --data=data/pairs.jsonl,data/texts.jsonl --outdir=runs/t5 --minutes=20
  python -m experiments.pretrain --family=t5 --data=data/pairs.jsonl,data/texts.jsonl --outdir=runs/t5-draft \
    --tokenizer=runs/t5/tokenizer --layers=1 --width=128 --minutes=6
  python -m experiments.benchmark --target=runs/t5/model --methods=plain,draft_model --draft=runs/t5-draft/model

Data are rows of .jsonl files with a prompt, and a reference where there is an answer to it. Decoders learn every token
of both. An encoder-decoder learns references given their prompts, and between them to fill spans of prompts that have
no reference. A tokenizer is learned from the data, unless --tokenizer names one. The run folder holds metrics.jsonl,
curves.png, checkpoints, the tokenizer and, at the end, the model (`model/`: config.json, model.safetensors, tokenizer),
which Transformers reads, too. A run that was killed goes on where it was.
"""
from absl import flags

from experiments.harness import cli
from experiments.harness import pretraining
from experiments.harness import settings

_FAMILY = flags.DEFINE_enum("family", "t5", pretraining.FAMILIES, "Kind of model.")
_DATA = flags.DEFINE_list("data", None, "Paths of .jsonl files, separated by commas.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Folder of the run.")
_LAYERS = flags.DEFINE_integer("layers", 4, "Layers; of an encoder-decoder, of each side.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 256, "Width of the model.", lower_bound=2)
_HEADS = flags.DEFINE_integer("heads", 4, "Heads of attention.", lower_bound=1)
_MLP = flags.DEFINE_integer("mlp_width", None, "Width of a feed-forward, or of an expert; by default four times "
                            "--width for t5, three times for llama and twice for mixtral.", lower_bound=1)
_EXPERTS = flags.DEFINE_integer("experts", 8, "Experts of a mixture's layer.", lower_bound=1)
_CHOSEN = flags.DEFINE_integer("chosen", 2, "Experts that a token goes through.", lower_bound=1)
_BALANCE = flags.DEFINE_float("balance", 0.02, "Weight of the loss that makes routers use all experts alike.",
                              lower_bound=0)
_VOCAB = flags.DEFINE_integer("vocab", 8192, "Ids of the tokenizer that is learned.", lower_bound=1)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Folder of a tokenizer to use instead: a target's for its drafter.")
_STEPS = flags.DEFINE_integer("steps", None, "Optimizer steps.", lower_bound=1)
_MINUTES = flags.DEFINE_float("minutes", None, "Instead of --steps: as many as fit into so many minutes, by the time "
                              "of a few.", lower_bound=0)
_BATCH = flags.DEFINE_integer("batch_tokens", 2048, "Tokens of a batch, about.", lower_bound=16)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "Tokens of a row, and a decoder's context; of inputs, and of an "
                                   "answer, which are cut there.", lower_bound=16)
_RATE = flags.DEFINE_float("learning_rate", None, "Greatest learning rate; by default 0.01 for t5, whose steps are "
                           "relative to the size of what they change, and 0.002 for others.", lower_bound=0)
_SPANS = flags.DEFINE_float("span_corruption", 0.5, "Share of the steps that learn to fill spans of plain text.",
                            lower_bound=0, upper_bound=1)
_EVALUATE = flags.DEFINE_integer("evaluate_every", 200, "Steps between two looks at held-out rows.", lower_bound=1)
_RATES = {"t5": 1e-2, "llama": 2e-3, "mixtral": 2e-3}
_TIMES = {"t5": 4, "llama": 3, "mixtral": 2}


def main():
  settings.uses_only(settings.SEED)
  if not _DATA.value or not _OUTDIR.value:
    raise ValueError("--data and --outdir are both needed: what to train on, and the folder of the run")
  family = _FAMILY.value
  job = pretraining.Job(
      family=family, data=tuple(_DATA.value), outdir=_OUTDIR.value, layers=_LAYERS.value, width=_WIDTH.value,
      heads=_HEADS.value, mlp_width=_MLP.value or _TIMES[family] * _WIDTH.value, experts=_EXPERTS.value,
      chosen=_CHOSEN.value, vocab=_VOCAB.value, tokenizer=_TOKENIZER.value, steps=_STEPS.value, minutes=_MINUTES.value,
      batch_tokens=_BATCH.value, max_tokens=_MAX_TOKENS.value, balance=_BALANCE.value,
      learning_rate=_RATES[family] if _RATE.value is None else _RATE.value,
      span_corruption=_SPANS.value, evaluate_every=_EVALUATE.value, seed=settings.SEED.value)
  pretraining.check_read(job, flags.FLAGS)
  print(f"{_OUTDIR.value}/model: {pretraining.summary(pretraining.run(job))}")


if __name__ == "__main__":
  cli.run(main)
