"""Trains a draft model for a target on the target's laws, on answers that the drafter writes itself (DistillSpec).

  python -m experiments.distill --draft_layers=0,1,28,29 --corpus=data/smollm2 --outdir=runs/distill --steps=400
  python -m experiments.benchmark --methods=plain,draft_model --draft=runs/distill/draft

The draft model is another one with the target's vocabulary (--draft), some layers of it (--draft with --draft_layers),
or begins as some layers of the target (--draft_layers alone). The corpus is one of experiments.write_training_data; no
features are computed. The run folder holds metrics.jsonl, curves.png, checkpoints, held-out numbers before the first
step (before.json) and, at the end, the draft model (`draft/`: config.json, model.safetensors, tokenizer). A run that
was killed goes on where it was.
"""
from absl import flags

from experiments.harness import cli
from experiments.harness import distilling
from experiments.harness import method_options
from experiments.harness import settings

_LAYERS = flags.DEFINE_list("draft_layers", None, "Begin with these layers of --draft, or of the target without that, and "
                            "with its embedding, final norm and head: such as 0,1,28,29.")
_CORPUS = flags.DEFINE_list("corpus", None, "Folders of the training data, separated by commas.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Folder of the run.")
_EPOCHS = flags.DEFINE_float("epochs", 1.0, "Passes over the data.", lower_bound=0)
_STEPS = flags.DEFINE_integer("steps", None, "Optimizer steps, instead of --epochs.", lower_bound=1)
_LIMIT = flags.DEFINE_integer("limit_tokens", None, "Tokens of the corpus to train on, at most.", lower_bound=1)
_RATE = flags.DEFINE_float("learning_rate", 3e-4, "Greatest learning rate.", lower_bound=0)
_BATCH = flags.DEFINE_integer("batch_tokens", 2048, "Tokens of a batch, about.", lower_bound=64)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 384, "Sequences are cut there.", lower_bound=16)
_LOSS = flags.DEFINE_enum("loss", "kl", distilling.LOSSES, "Divergence from the target's law.")
_ON_POLICY = flags.DEFINE_float("on_policy", 0.5, "Share of the steps whose answers the drafter writes itself; the "
                                "others take those of the corpus.", lower_bound=0, upper_bound=1)
_OWN_TEMPERATURE = flags.DEFINE_float("own_temperature", 1.0, "Temperature at which it writes them.", lower_bound=0)
_EVALUATE = flags.DEFINE_integer("evaluate_every", 200, "Steps between two looks at held-out text and prompts.",
                                 lower_bound=1)


def main():
  settings.uses_only(settings.TARGET, settings.TEMPERATURE, settings.SEED)
  method_options.uses_only(method_options.DRAFT, method_options.DRAFT_TOKENS)
  if not _CORPUS.value or not _OUTDIR.value:
    raise ValueError("--corpus and --outdir are both needed: the training data, and the folder of the run")
  if not method_options.DRAFT.value and not _LAYERS.value:
    raise ValueError("--draft or --draft_layers is needed: a draft model to begin with, or layers of the target; with "
                     "both, layers of the draft model")
  before, after = distilling.run(distilling.Job(
      target=settings.TARGET.value, draft=method_options.DRAFT.value,
      draft_layers=distilling.layers(_LAYERS.value or []),
      corpora=tuple(_CORPUS.value), outdir=_OUTDIR.value, epochs=_EPOCHS.value, steps=_STEPS.value, limit=_LIMIT.value,
      learning_rate=_RATE.value, batch_tokens=_BATCH.value, max_tokens=_MAX_TOKENS.value, loss=_LOSS.value,
      on_policy=_ON_POLICY.value, own_temperature=_OWN_TEMPERATURE.value, temperature=settings.TEMPERATURE.value,
      drafted=method_options.tokens(3), evaluate_every=_EVALUATE.value, seed=settings.SEED.value))
  kind = f"at temperature {settings.TEMPERATURE.value:g}" if settings.TEMPERATURE.value else "greedy"
  print(f"{_OUTDIR.value}/draft, held out, {kind}: acceptance {before['acceptance']:.3f} before and "
        f"{after['held_out/acceptance']:.3f} after; tokens a step {before['tokens_per_step']:.2f} and "
        f"{after['held_out/tokens_per_step']:.2f} on prompts, {before['expected_tokens']:.2f} and "
        f"{after['held_out/expected_tokens']:.2f} expected on text")


if __name__ == "__main__":
  cli.run(main)
