"""What follows from the configuration and the weights of any target here."""
import jax


class Configured:
  """A mixin for targets that have `config` and `weights`; see `base.Target`.

  They have a static `layout` as well: how they lie on a mesh of devices, a `parallel.layout.Layout`; None on one device.
  """

  @property
  def vocab_size(self) -> int:
    return self.config.num_tokens if self.layout is None else self.layout.vocab

  @property
  def known_ids(self) -> int:
    """See `base.known_ids`."""
    return self.config.num_tokens

  @property
  def max_context(self) -> int:
    return self.config.max_context

  @property
  def eos_ids(self) -> tuple[int, ...]:
    return self.config.eos_ids

  @property
  def head(self) -> jax.Array:
    """The output head f[V, E], padding rows included: the embedding if it is tied."""
    return self.weights.embedding if self.weights.head is None else self.weights.head

  def of_known_ids(self, logits: jax.Array) -> jax.Array:
    """Logits f[..., R] of all rows of the head without those of ids that are never emitted: f[..., vocab_size]."""
    if self.layout is None:
      return logits[..., :self.config.num_tokens]
    return self.layout.fit_logits(logits, self.config.num_tokens)

  def check_layers(self, layers: tuple[int, ...]) -> None:
    """Raises ValueError for layers that are not to be kept: none, or one that there is not."""
    if not layers or not all(0 <= i < self.config.layers for i in layers):
      raise ValueError(f"layers={layers}: at least one is needed, each from 0 to {self.config.layers - 1}")
