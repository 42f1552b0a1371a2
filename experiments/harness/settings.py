"""Flags that every experiment on real requests shares, and what they build."""
from absl import flags
import jax

import specjax

TARGET = flags.DEFINE_string("target", "smollm2-135m", "A known name, a path to a GGUF file or to a folder with "
                             "config.json, *.safetensors and tokenizer.json, or a Hub id.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Sampling temperature; 0 is greedy.")
TOP_K = flags.DEFINE_integer("top_k", 0, "Keep the k most probable tokens; 0 keeps all.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Keep the most probable tokens that hold this share of the mass.")
MIN_P = flags.DEFINE_float("min_p", 0.0, "Keep tokens at least this probable, relative to the most probable one.")
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Output tokens of a request, at most.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Seed of all randomness.", lower_bound=0, upper_bound=2**31 - 1)


def sampling_params(seeds=None) -> specjax.SamplingParams:
  """The sampling parameters that the flags ask for, checked; `seeds` one a row."""
  params = specjax.SamplingParams(temperature=TEMPERATURE.value, top_k=TOP_K.value, top_p=TOP_P.value,
                                  min_p=MIN_P.value, seed=seeds)
  params.replace(seed=None).batch(1)
  return params


def random_key() -> jax.Array:
  """The key of the run."""
  return jax.random.key(SEED.value)
