"""What follows from the configuration and the weights of any target here."""
import jax


class Configured:
  """A mixin for targets that have `config` and `weights`; see `base.Target`."""

  @property
  def vocab_size(self) -> int:
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

  def check_layers(self, layers: tuple[int, ...]) -> None:
    """Raises ValueError for layers that are not to be kept: none, or one that there is not."""
    if not layers or not all(0 <= i < self.config.layers for i in layers):
      raise ValueError(f"layers={layers}: at least one is needed, each from 0 to {self.config.layers - 1}")
