"""What a decoder-only target is made of: one frozen configuration for every family.

Letters (shared by the whole package): B batch rows, T tree nodes, S cache slots, V vocabulary, E model width,
L layers, H query heads, K key/value heads, C head width, M feed-forward width, X experts of a layer.
"""
import dataclasses

from specjax.models import rope

_ALLOWED = {"rope_layout": ("half", "interleaved"), "positions": ("rotary", "learned"), "norm": ("rms", "layer"),
            "qk_norm": ("", "head", "whole"), "activation": ("silu", "gelu", "gelu_tanh")}


@dataclasses.dataclass(frozen=True)
class MoE:
  """Feed-forwards that are mixtures of experts (arXiv 2101.03961, 2401.04088).

  Attributes:
    experts: X, of each layer.
    chosen: experts that a token goes through.
    width: M of an expert.
    renormalised: the weights of a token's experts are divided by their sum (Mixtral); otherwise they are their shares
      of the softmax over all experts, which sum to less than 1 (OLMoE).
    dense: layers that have one feed-forward of `DecoderConfig.mlp_width` instead, in ascending order (Qwen3-MoE).
    shared: M of a feed-forward beside the experts that every token goes through, weighted by a gate of its own
      (Qwen2-MoE); 0 without.
  """
  experts: int
  chosen: int
  width: int
  renormalised: bool
  dense: tuple[int, ...] = ()
  shared: int = 0

  def __post_init__(self):
    if not 1 <= self.chosen <= self.experts:
      raise ValueError(f"chosen={self.chosen}: a token goes through 1 to {self.experts} experts, as many as there are")


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
    family: such as "llama" or "gemma3"; for messages and reports only.
    rope_scaling: how the rotary angles are stretched; None as they are.
    rope_width: elements of a head that are turned, the first ones (GPT-NeoX); None is all of them.
    local_rope_theta: of layers with a window, unscaled (Gemma 3); None is as for other layers.
    windows: one entry a layer, the tokens that it sees, its own included, or None for all; () is None everywhere.
    positions: "rotary" or "learned" (GPT-2: a vector a position is added to the embedding).
    norm: "rms" or "layer" (mean and bias as well).
    pre_norm: norms in front of attention and feed-forward; False is OLMo 2.
    post_norm: norms of what attention and feed-forward add (Gemma 2 and 3, OLMo 2).
    qk_norm: RMSNorm of queries and keys before they are turned: "" none, "head" each head alone (Qwen3, Gemma 3), "whole"
      all heads together (OLMo 2).
    out_bias, mlp_bias: whether the attention's output and the feed-forward matrices carry biases.
    activation: "silu", "gelu" or "gelu_tanh".
    gated: the feed-forward is down(act(gate) * up), otherwise down(act(up)).
    parallel: attention and feed-forward read the same residual stream (GPT-NeoX).
    query_scale: what queries are multiplied by; None is C ** -0.5.
    attention_cap, logit_cap: c of c * tanh(x / c), over scores and logits (Gemma 2); None without.
    embedding_scale: what embeddings are multiplied by (Gemma).
    moe: the mixtures of experts, of gated feed-forwards without biases; None without.
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
  rope_scaling: rope.RopeScaling | None = None
  rope_width: int | None = None
  local_rope_theta: float | None = None
  windows: tuple[int | None, ...] = ()
  positions: str = "rotary"
  norm: str = "rms"
  pre_norm: bool = True
  post_norm: bool = False
  qk_norm: str = ""
  out_bias: bool = False
  mlp_bias: bool = False
  activation: str = "silu"
  gated: bool = True
  parallel: bool = False
  query_scale: float | None = None
  attention_cap: float | None = None
  logit_cap: float | None = None
  embedding_scale: float = 1.0
  moe: MoE | None = None

  def __post_init__(self):
    if self.heads % self.kv_heads:
      raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
    if self.turned % 2 or not 0 < self.turned <= self.head_width:
      raise ValueError(f"{self.turned} of {self.head_width} elements of a head cannot be turned: rotary positions need an "
                       "even number, of at most a head")
    for name, allowed in _ALLOWED.items():
      if getattr(self, name) not in allowed:
        raise ValueError(f"{name}={getattr(self, name)!r}: allowed are {', '.join(map(repr, allowed))}")
    if self.windows and len(self.windows) != self.layers:
      raise ValueError(f"{len(self.windows)} windows for {self.layers} layers")
    if any(window is not None and window < 1 for window in self.windows):
      raise ValueError(f"windows={self.windows}: each is a positive number of tokens, or None")
    if self.parallel and (self.post_norm or not self.pre_norm):
      raise ValueError("parallel: attention and feed-forward have norms in front of them and none behind")
    if self.moe is not None and (self.mlp_bias or not self.gated):
      raise ValueError("moe: experts are gated feed-forwards without biases; leave out mlp_bias, and keep gated")

  @property
  def turned(self) -> int:
    """Elements of a head that rotary positions turn."""
    return self.head_width if self.rope_width is None else self.rope_width

  def window(self, layer: int) -> int | None:
    """The window of a layer."""
    return self.windows[layer] if self.windows else None

  def mixed(self, layer: int) -> bool:
    """Whether the feed-forward of a layer is a mixture of experts."""
    return self.moe is not None and layer not in self.moe.dense

  @property
  def plain_layers(self) -> bool:
    """Whether layers are those of Llama and Qwen2: what draft heads are begun from."""
    return (self.norm, self.pre_norm, self.post_norm, self.qk_norm, self.activation, self.gated, self.positions) == (
        "rms", True, False, "", "silu", True, "rotary") and not (
          self.parallel or self.out_bias or self.mlp_bias or self.moe)
