#!/usr/bin/env bash
# The draft heads of a target, from prompts to heads and their curves: answers by the target with their features,
# EAGLE-3, DSpark and Medusa, and EAGLE-3 on parts of the data, which shows what more of it would give. Whatever stopped
# goes on with the same command. Hours on two cores, minutes on an accelerator, where the batches may be larger (BATCH,
# TOKENS). Paths are seen from the repository's folder. The heads that come with specjax were made by this, of the 1,357
# chat prompts that their cards name; EAGLE-3 then went on (--start_from) over these and 1,280 more own prompts.
#
#   launch/train_heads.sh prompts.jsonl[,more.jsonl] runs/heads
#
# TARGET (smollm2-135m), OWN_PROMPTS (1280 prompts that the target writes itself), EPOCHS (2), BATCH (32 prompts
# answered together), TOKENS (512 of a training batch), LIMITS ("40000 80000 160000" tokens of the curve). See
# launch/environment.sh for PYTHON and VENV.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[ $# -eq 2 ] || { echo "usage: launch/train_heads.sh PROMPTS OUTDIR" >&2; exit 2; }
prepare ""
prompts=$1 out=$2 target=${TARGET:-smollm2-135m} tokens=${TOKENS:-512}
train() {
  "$VENV/bin/python" -m experiments.train --target="$target" --corpus="$out/corpus" --batch_tokens="$tokens" \
    --epochs="${EPOCHS:-2}" --noanswers_only "$@"
}
"$VENV/bin/python" -m experiments.write_training_data --target="$target" --prompts="$prompts" --corpus="$out/corpus" \
  --own_prompts="${OWN_PROMPTS:-1280}" --temperatures=0,0,0.7 --max_new_tokens=128 --batch_size="${BATCH:-32}"
train --head=eagle3 --passes=3 --outdir="$out/eagle3"
train --head=dspark --block=4 --head_layers=2 --outdir="$out/dspark"
train --head=medusa --heads=3 --epochs=1 --outdir="$out/medusa"
for limit in ${LIMITS:-40000 80000 160000}; do
  train --head=eagle3 --passes=3 --limit_tokens="$limit" --outdir="$out/eagle3-$limit"
done
