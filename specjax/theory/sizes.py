"""Bytes and operations of a decoder and of an EAGLE-3 head, from their configurations alone: no weights are needed.

Letters as in `models.config`: B batch rows, T nodes, S committed tokens of a row, V vocabulary, E model width, L
layers, H query heads, K key/value heads, C head width, M feed-forward width, X experts of a layer.
"""
import dataclasses

from specjax.models import eagle3
from specjax.models.config import DecoderConfig
from specjax.theory import experts


@dataclasses.dataclass(frozen=True)
class Parameters:
  """How many weights each part has, all layers together; what a part is divided by on a mesh differs.

  Attributes:
    embedding: V * E; 0 for a head that reads its target's.
    queries: of queries and of the attention's output. keys: of keys and values; biases included.
    mlp: of feed-forwards that every token goes through, shared experts included.
    experts: of all experts. chosen: of those that one token goes through.
    head: of the output head; 0 if it is the embedding.
    fuse: of the matrix that fuses features (EAGLE-3).
    router: of what chooses experts, shared ones too. rest: norms, learned positions and biases behind a sum. Every
      device has all of both.
    tied: the embedding is the output head.
  """
  embedding: int
  queries: int
  keys: int
  mlp: int
  experts: int
  chosen: int
  head: int
  fuse: int
  router: int
  rest: int
  tied: bool

  @property
  def total(self) -> int:
    """All of them, as published counts have them."""
    return (self.embedding + self.queries + self.keys + self.mlp + self.experts + self.head + self.fuse +
            self.router + self.rest)

  @property
  def projection(self) -> int:
    """Of the matrix in front of the logits, be it the embedding or not."""
    return self.embedding if self.tied else self.head

  @property
  def active(self) -> int:
    """Those that a token is multiplied with: without the embedding's table, and with its own experts only."""
    return (self.queries + self.keys + self.mlp + self.chosen + self.projection + self.fuse + self.router + self.rest)


def parameters(config: DecoderConfig) -> Parameters:
  """The weights of a decoder."""
  c, e, heads = config, config.width, config.heads * config.head_width
  keys = 2 * c.kv_heads * c.head_width
  norm = 2 * e if c.norm == "layer" else e
  norms = (2 if c.pre_norm else 0) * norm + (2 * e if c.post_norm else 0)
  norms += {"": 0, "head": 2 * c.head_width, "whole": heads + keys // 2}[c.qk_norm]
  mixed = sum(map(c.mixed, range(c.layers)))
  matrices = 3 if c.gated else 2
  mlp = matrices * e * c.mlp_width + ((matrices - 1) * c.mlp_width if c.mlp_bias else 0)
  rest = c.layers * (norms + (e if c.out_bias else 0)) + norm + (c.layers - mixed) * (e if c.mlp_bias else 0)
  rest += c.max_context * e if c.positions == "learned" else 0
  each = shared = router = 0
  if c.moe is not None:
    each = 3 * e * c.moe.width
    shared = 3 * e * c.moe.shared
    router = mixed * e * (c.moe.experts + (1 if c.moe.shared else 0))
  return Parameters(
      embedding=c.vocab_size * e, queries=c.layers * (2 * e * heads + (heads if c.qkv_bias else 0)),
      keys=c.layers * (e * keys + (keys if c.qkv_bias else 0)), mlp=(c.layers - mixed) * mlp + mixed * shared,
      experts=mixed * each * (c.moe.experts if c.moe else 0), chosen=mixed * each * (c.moe.chosen if c.moe else 0),
      head=0 if c.tied else c.vocab_size * e, fuse=0, router=router, rest=rest,
      tied=c.tied)


def eagle3_parameters(config: eagle3.Eagle3Config) -> Parameters:
  """The weights of an EAGLE-3 head without an embedding of its own, in the authors' dialect."""
  s, e = config.shape, config.shape.width
  heads, keys = s.heads * s.head_width, 2 * s.kv_heads * s.head_width
  return Parameters(
      embedding=0, queries=2 * e * heads + e * heads, keys=2 * e * keys, mlp=3 * e * s.mlp_width, experts=0, chosen=0,
      head=config.draft_vocab * e, fuse=e * config.target_width * len(config.features), router=0,
      rest=4 * e, tied=False)


def cached_tokens(config: DecoderConfig, length: int) -> int:
  """Tokens whose keys and values the layers hold together for a row of `length`; a layer's window bounds its own."""
  return sum(length if config.window(i) is None else min(length, config.window(i)) for i in range(config.layers))


def kv_bytes(config: DecoderConfig, *, itemsize: int = 2) -> int:
  """Of keys and values that one token adds to the cache, all layers and heads."""
  return 2 * config.layers * config.kv_heads * config.head_width * itemsize


def cache_bytes(config: DecoderConfig, length: int, *, itemsize: int = 2) -> int:
  """Of keys and values of one row of `length` tokens."""
  return 2 * cached_tokens(config, length) * config.kv_heads * config.head_width * itemsize


def flops(config: DecoderConfig, tokens: int, length: int = 0) -> int:
  """Operations of a pass over `tokens`, each of which attends to `length` others: two for every weight that a token is
  multiplied with, and four for every element of a query at every token that it sees."""
  each = parameters(config)
  seen = 4 * config.heads * config.head_width * cached_tokens(config, length)
  return tokens * (2 * (each.active - each.rest) + seen)


def expert_share(config: DecoderConfig, tokens: float) -> float:
  """Share of all experts' weights that a pass over `tokens` must read, if every token chose at random; at least that of
  one token."""
  if config.moe is None:
    return 0.0
  return experts.expected_distinct(config.moe.experts, config.moe.chosen, tokens) / config.moe.experts


def step_bytes(config: DecoderConfig, batch: int, width: int, length: int, *, itemsize: int = 2) -> float:
  """Bytes that a step of [B, T] nodes over rows of `length` tokens must read on one device: all weights but the
  embedding's table, the experts that the nodes go through, and the cache. What it writes is small beside them."""
  each = parameters(config)
  weights = each.active - each.chosen + each.experts * expert_share(config, batch * width)
  return weights * itemsize + batch * cache_bytes(config, length, itemsize=itemsize)
