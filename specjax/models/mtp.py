"""A module of multi-token prediction (MTP): a decoder layer that reads the target's hidden state and the next token.

The hidden state at token t, behind the target's final norm, and the embedding of token t + 1 have a norm each; one
matrix takes both to the width of one, a decoder layer and a norm follow, and the target's own head makes logits of it:
the law of token t + 2. DeepSeek-V3, section 2.2 (arXiv 2412.19437). Used again on its own output, behind the norm and
with the token that was drafted, one module drafts as far as is asked for: FastMTP (arXiv 2509.18362), and vLLM and
SGLang with the modules of Qwen3-Next, Qwen3.5 and MiMo.

Whether a hidden state is read before or behind a final norm has been got wrong by many engines, which costs accepted
tokens and nothing else. That of the target is read behind its norm in the code of FastMTP and of vLLM, and in llama.cpp
since its pull request 24025; the module's own behind its own (vLLM's pull request 47448). So it is here. DeepSeek's D
modules for D depths are one here, D = 1, which its published models have. vLLM has the embedding of a text's second
token be zero in DeepSeek's and MiMo's modules; the models' own code has not, and neither has this.

Letters: B batch rows, T entries, E width of module and target, H query heads, C head width, U draft ids, V target
vocabulary.
"""
import dataclasses

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax.models import base
from specjax.models import draft_layer
from specjax.models import layers
from specjax.models import recurrent_head


@dataclasses.dataclass(frozen=True)
class MtpConfig:
  """Static facts of a module: the shape of its layer, vocab_size V, draft_vocab U, and max_context, tokens that it was
  made for."""
  shape: draft_layer.LayerShape
  vocab_size: int
  draft_vocab: int
  max_context: int


@struct.dataclass
class MtpHead(recurrent_head.RecurrentHead):
  """Weights, each matrix [out, in], and configuration."""
  fuse: jax.Array                # f[E, 2 * E]; columns: embedding, then hidden state
  token_norm: jax.Array          # f[E]; of the embedding
  feature_norm: jax.Array        # f[E]; of the hidden state
  attention_norm: jax.Array      # f[E]; before the layer's attention
  layer: draft_layer.DraftLayer  # I = E
  norm: jax.Array                # f[E]; before the vocabulary, and before what recurs
  ids: jax.Array | None          # i32[U]; the target's id of each draft id, ascending; None if U = V
  config: MtpConfig = struct.field(pytree_node=False)

  shares_head = True
  embedding = None  # the target's own
  depth = 1         # layers

  @property
  def features(self) -> tuple[int, ...]:
    """No layer's input is read: the feature is the hidden state behind the final norm."""
    return ()

  def check(self, target) -> None:
    """Raises ValueError for a target that this module was not made for."""
    c = self.config
    given = (base.known_ids(target), target.config.width)
    # Published modules count rows of the vocabulary that only fill it up.
    if given[1] != c.shape.width or given[0] > c.vocab_size:
      raise ValueError(f"the head is for a target of {c.vocab_size} token ids and width {c.shape.width}, and this one "
                       f"has {given[0]} and {given[1]}")

  def fused(self, features: jax.Array) -> jax.Array:
    """The hidden states of committed tokens f[B, T, E], which enter as they are."""
    return features

  def apply(self, embedded: jax.Array, feature: jax.Array, positions: jax.Array, attends):
    """The layer, over entries whose attention is up to `attends`.

    Args:
      embedded: f[B, T, E], of the token behind each entry. feature: f[B, T, E], the target's or recurring.
      positions: i32[B, T], the entries' indices in the text.
      attends: index of a layer, which is 0 -> the attention of `draft_layer.apply`.

    Returns:
      hidden f[B, T, E], what `logits` takes; the feature that recurs, which is the same; the entries' in-flight block.
    """
    chex.assert_equal_shape([embedded, feature])
    shape, columns = self.config.shape, recurrent_head.as_columns
    both = jnp.concatenate([layers.rms_norm(columns(embedded), self.token_norm, shape.norm_eps),
                            layers.rms_norm(columns(feature), self.feature_norm, shape.norm_eps)])
    x = layers.linear(self.fuse, both)
    into = layers.rms_norm(x, self.attention_norm, shape.norm_eps)
    x, keys, values = draft_layer.apply(shape, self.layer, x, into, draft_layer.rotary(shape, positions), attends(0))
    hidden = recurrent_head.as_rows(layers.rms_norm(x, self.norm, shape.norm_eps), positions.shape)
    return hidden, hidden, cache_lib.InFlight((keys,), (values,))

  def logits(self, hidden: jax.Array, shared: jax.Array) -> jax.Array:
    """f32[B, T, U] with the target's head at `ids`, `shared` f[U, E]."""
    return recurrent_head.project(shared, hidden)
