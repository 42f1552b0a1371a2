"""What a decoder-only target is made of: one frozen configuration for every family.

Letters (shared by the whole package): B batch rows, T tree nodes, S cache slots, V vocabulary, E model width,
L layers, H query heads, K key/value heads, C head width, M feed-forward width.
"""
import dataclasses


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Static shape and constants of a decoder; hashable, so that a change of configuration is a recompile.

  Attributes:
    vocab_size: V, rows of the embedding and of the output head.
    num_tokens: ids the tokenizer knows; ids at or above it (padding rows of the head) are never emitted.
    width: E. layers: L. heads: H. kv_heads: K. head_width: C. mlp_width: M.
    norm_eps: epsilon of every RMSNorm.
    rope_theta: base of the rotary angles (float).
    rope_layout: "half" (Hugging Face: first half paired with second half) or "interleaved" (even with odd).
    qkv_bias: whether the query/key/value projections carry a bias (Qwen2).
    tied: the head is the embedding.
    max_context: greatest number of tokens (prompt and output together) the model was made for.
    eos_ids: ids that end an answer, in ascending order.
    family: "llama" or "qwen2"; for messages and reports only.
  """
  vocab_size: int
  num_tokens: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_width: int
  mlp_width: int
  norm_eps: float
  rope_theta: float
  max_context: int
  eos_ids: tuple[int, ...]
  rope_layout: str = "half"
  qkv_bias: bool = False
  tied: bool = True
  family: str = "llama"

  def __post_init__(self):
    if self.heads % self.kv_heads:
      raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
    if self.rope_layout not in ("half", "interleaved"):
      raise ValueError(f"rope_layout={self.rope_layout!r}: allowed are 'half' and 'interleaved'")
    if self.head_width % 2:
      raise ValueError(f"head_width={self.head_width} must be even for rotary positions")
