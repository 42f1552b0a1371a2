"""The dummy target's law and text in plain NumPy, float64: what the library's answers are compared with.

Letters: N texts, L tokens of a text, V vocabulary.
"""
import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from specjax import keys


def logits(target, texts):
  """The target's logits behind every text: f64[N, V] from i[N, L]. Only for a target without an order."""
  assert target.order == 0
  texts = np.asarray(texts)
  u32 = lambda x: np.asarray(x).astype(np.uint32)
  mixed = _mix(u32(texts) * np.uint32(0x9E3779B1) + u32(target.salt))
  seen = _mix(mixed + np.arange(texts.shape[1], dtype=np.uint32) * np.uint32(0xC2B2AE3D)).sum(-1, dtype=np.uint32)
  bits = _mix(_mix(seen)[:, None] + np.arange(target.vocab, dtype=np.uint32) * np.uint32(0x85EBCA77)) >> 8
  # In the target's own precision: these numbers are its definition.
  return ((bits.astype(np.float32) * np.float32(2.0 ** -23) - np.float32(1)) * np.float32(target.sharpness)).astype(
      np.float64)


def _mix(x):
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def law(target, text, start, *, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, presence_penalty=0.0,
        frequency_penalty=0.0, logit_bias=None, banned_ids=None, allowed_ids=None, min_new_tokens=0, eos=(),
        constraint=None):
  """The law of the token behind one text, f64[V], and the target's own, before anything was asked for.

  `text` is prompt and output, `start` the number of prompt tokens, `constraint` bool[V] what a grammar allows.
  """
  raw = logits(target, [text])[0]
  out = raw.copy()
  for token in range(target.vocab):
    times = list(text).count(token)
    if times:
      out[token] = out[token] / repetition_penalty if out[token] > 0 else out[token] * repetition_penalty
      out[token] -= presence_penalty + frequency_penalty * times
  for token, bias in (logit_bias or {}).items():
    out[token] += bias
  out[list(banned_ids or ())] = -np.inf
  if allowed_ids is not None:
    out[[token for token in range(target.vocab) if token not in allowed_ids]] = -np.inf
  if constraint is not None:
    out[~np.asarray(constraint)] = -np.inf
  if len(text) - start < min_new_tokens:
    out[list(eos)] = -np.inf
  if temperature == 0:
    return np.eye(target.vocab)[np.argmax(out)], softmax(raw)
  p = softmax(out / temperature)
  if top_k:
    p = np.where(p >= np.sort(p)[-top_k], p, 0)
    p /= p.sum()
  if top_p < 1:
    order = np.argsort(-p)
    kept = order[:np.searchsorted(np.cumsum(p[order]), top_p) + 1]
    p = np.where(np.isin(np.arange(target.vocab), kept), p, 0)
    p /= p.sum()
  return p, softmax(raw)


def softmax(x):
  weights = np.exp(x - x.max())
  return weights / weights.sum()


def text_law(target, prompt, length, **asked):
  """The law of the first `length` output tokens: f64[V ** length], the first token the most significant."""
  texts, mass = [list(prompt)], np.ones(1)
  for _ in range(length):
    laws = np.stack([law(target, text, len(prompt), **asked)[0] for text in texts])
    mass = (mass[:, None] * laws).ravel()
    texts = [[*text, token] for text in texts for token in range(target.vocab)]
  return mass


def text(target, prompt, length, *, key=None, seed=0, ends=(), automaton=None, state=0, **asked):
  """What plain decoding writes, token by token, by the row's own uniforms: ids, log-probabilities under the processed
  and the raw law, and the raw laws, of each token. `automaton` is a table i[Q, V]."""
  words, processed, raw, laws = [], [], [], []
  row = keys.row_keys(jax.random.key(0) if key is None else key, jnp.asarray([seed], jnp.int32))
  uniforms = np.asarray(_uniforms(row, jnp.arange(512, dtype=jnp.int32)[None]), np.float64)[0]
  while len(words) < length and not (words and words[-1] in ends):
    p, own = law(target, [*prompt, *words], len(prompt), eos=ends,
                 constraint=None if automaton is None else automaton[state] >= 0, **asked)
    token = int(np.argmax((np.cumsum(p) > uniforms[len(prompt) + len(words)]) & (p > 0)))
    state = state if automaton is None else int(automaton[state, token])
    words.append(token)
    processed.append(np.log(p[token]))
    raw.append(np.log(own[token]))
    laws.append(own)
  return words, np.array(processed), np.array(raw), np.stack(laws)


_uniforms = jax.jit(keys.token_uniforms)


def p_value(counts, laws):
  """Of Pearson's chi-square of independent multinomials: `counts` and `laws` f[N, V], each law summing to 1.

  Cells that expect fewer than 5 are pooled, row by row, and with the least of the others where that is still too few.
  A count where the law has nothing gives 0.
  """
  counts, laws = np.atleast_2d(counts).astype(np.float64), np.atleast_2d(laws)
  if counts[laws == 0].any():
    return 0.0
  statistic = freedom = 0
  for seen, p in zip(counts, laws):
    order = np.argsort(-p)
    seen, expected = seen[order], seen.sum() * p[order]
    large = int((expected >= 5).sum())
    large -= large > 0 and 0 < expected[large:].sum() < 5
    seen, expected = (np.append(x[:large], x[large:].sum()) for x in (seen, expected))
    seen, expected = seen[expected > 0], expected[expected > 0]
    statistic += ((seen - expected) ** 2 / expected).sum() if len(expected) > 1 else 0
    freedom += max(len(expected) - 1, 0)
  assert freedom > 0, "too few counts for a test"
  return float(stats.chi2.sf(statistic, freedom))
