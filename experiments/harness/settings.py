"""Flags that every experiment on real requests shares, and what they build."""
import math

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
_REPETITION = flags.DEFINE_float("repetition_penalty", 1.0, "Divides the logits of tokens that were seen, multiplies "
                                 "negative ones; 1 does nothing.")
_PRESENCE = flags.DEFINE_float("presence_penalty", 0.0, "Taken from the logits of tokens that were seen.")
_FREQUENCY = flags.DEFINE_float("frequency_penalty", 0.0, "Taken from a token's logit each time that it was seen.")
_BIAS = flags.DEFINE_list("logit_bias", None, "Added to logits: id:bias,id:bias; a bias of -inf bans the id.")
_BANNED = flags.DEFINE_list("banned_ids", None, "Token ids that are never drawn, separated by commas.")
_ALLOWED = flags.DEFINE_list("allowed_ids", None, "The only token ids that are drawn, separated by commas.")
_MIN_NEW = flags.DEFINE_integer("min_new_tokens", 0, "No end of sequence is drawn before so many output tokens.",
                                lower_bound=0)


def sampling_params(seeds=None) -> specjax.SamplingParams:
  """The sampling parameters that the flags ask for, checked as far as that goes without a target.

  Args:
    seeds: one a row.

  Raises:
    ValueError: names the flag or the parameter of its name, what was given and what is allowed.
  """
  params = specjax.SamplingParams(
      temperature=TEMPERATURE.value, top_k=TOP_K.value, top_p=TOP_P.value, min_p=MIN_P.value, seed=seeds,
      repetition_penalty=_REPETITION.value, presence_penalty=_PRESENCE.value, frequency_penalty=_FREQUENCY.value,
      logit_bias=_biases(_BIAS), banned_ids=_ids(_BANNED), allowed_ids=_ids(_ALLOWED), min_new_tokens=_MIN_NEW.value)
  params.replace(seed=None).batch(1)
  return params


def uses_only(*used) -> None:
  """Refuses flags of this module that an experiment makes no use of, but for those `used`: none is ignored in silence.

  Raises:
    ValueError: names the flag and those that are used.
  """
  names = [flag.name for flag in used]
  for flag in flags.FLAGS.flags_by_module_dict()[__name__]:
    if flag.name not in names and not flag.using_default_value:
      raise ValueError(f"--{flag.name}={flag.value}: this experiment makes no use of it; of the flags of a request it "
                       f"takes {', '.join(f'--{name}' for name in names)}")


def _ids(flag):
  if flag.value is None:
    return None
  return [_id(flag, item, item) for item in _items(flag)]


def _biases(flag):
  if flag.value is None:
    return None
  found = {}
  for item in _items(flag):
    token, colon, text = item.partition(":")
    try:
      bias = float(text)
    except ValueError:
      bias = math.nan
    if not colon or math.isnan(bias) or bias == math.inf:
      raise ValueError(f"--{flag.name}: {item!r} is not id:bias; the bias must be a finite number, or -inf to ban the "
                       "id")
    token = _id(flag, token.strip(), item)
    if token in found:
      raise ValueError(f"--{flag.name}: {item!r} gives id {token} a second bias; give each id one")
    found[token] = bias
  return found


def _items(flag):
  if not flag.value:
    raise ValueError(f"--{flag.name}= is empty; give at least one id, or leave the flag out")
  return flag.value


def _id(flag, text, item):
  if not (text.isascii() and text.isdecimal()):
    raise ValueError(f"--{flag.name}: {item!r} names no token id; ids are whole numbers of 0 or more, separated by "
                     "commas")
  return int(text)


def random_key() -> jax.Array:
  """The key of the run."""
  return jax.random.key(SEED.value)
