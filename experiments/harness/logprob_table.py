"""The table of a text's logprobs that `experiments.generate` prints."""
import numpy as np


def render(deltas: list, tokenizer) -> str:
  """One line a token: its text, its logprob under the processed and the raw law, and the raw law's most probable ids.

  Args:
    deltas: all that `specjax.stream` yielded for one row, with logprobs.
    tokenizer: gives the alternatives, and tokens without a text of their own, their spelling.
  """
  spell = lambda token: tokenizer.decode([int(token)], skip_special_tokens=False)
  together = lambda name: np.concatenate([getattr(delta.logprobs, name) for delta in deltas])
  processed, raw, top_ids, top_raw = map(together, ("processed", "raw", "top_ids", "top_raw"))
  # As literals: a line break or a control sequence of the text must not lay out the table.
  shown = [repr(piece or spell(token)) for delta in deltas for token, piece in zip(delta.token_ids, delta.pieces)]
  width = max(map(len, ["token", *shown]))
  lines = [f"{'token':<{width}}  processed       raw" + ("  most probable, raw" if top_ids.shape[1] else "")]
  for token, *own, ids, values in zip(shown, processed, raw, top_ids, top_raw, strict=True):
    others = "".join(f"  {spell(i)!r} {value:.3f}" for i, value in zip(ids, values))
    lines.append(f"{token:<{width}}  {own[0]:9.3f}  {own[1]:8.3f}{others}")
  return "\n".join(lines)
