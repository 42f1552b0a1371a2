#!/usr/bin/env bash
# The draft heads of a target, from prompts to heads and their curves: answers by the target, features, EAGLE-3, DFlash and
# Medusa, and EAGLE-3 on parts of the data, which shows what more of it would give. Whatever stopped goes on with the same
# command. Hours on two cores, minutes on an accelerator, where the batches may be larger (BATCH, TOKENS). Paths are seen
# from the repository's folder.
#
#   launch/train_heads.sh prompts.jsonl[,more.jsonl] runs/heads
#
# TARGET (smollm2-135m), OWN_PROMPTS (4000 prompts that the target writes itself), EPOCHS (3), BATCH (32 prompts answered together), TOKENS (1024 of a training batch), LIMITS
# ("50000 100000 200000" tokens of the curve). See launch/environment.sh for PYTHON and VENV.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[ $# -eq 2 ] || { echo "usage: launch/train_heads.sh PROMPTS OUTDIR" >&2; exit 2; }
prepare ""
prompts=$1 out=$2 target=${TARGET:-smollm2-135m} tokens=${TOKENS:-1024}
train() {
  "$VENV/bin/python" -m experiments.train --target="$target" --corpus="$out/corpus" --batch_tokens="$tokens" \
    --epochs="${EPOCHS:-3}" --noanswers_only "$@"
}
"$VENV/bin/python" -m experiments.write_training_data --target="$target" --prompts="$prompts" --corpus="$out/corpus" \
  --own_prompts="${OWN_PROMPTS:-4000}" --temperatures=0,0,0.7 --max_new_tokens=160 --batch_size="${BATCH:-32}"
for head in eagle3 dflash medusa; do train --head=$head --outdir="$out/$head"; done
for limit in ${LIMITS:-50000 100000 200000}; do
  train --head=eagle3 --limit_tokens="$limit" --outdir="$out/eagle3-$limit"
done
