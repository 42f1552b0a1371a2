"""What a Mamba-2 target is made of. Letters as in `config`, H heads, P head width, N state width, G groups."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
  """Static shape and constants of a Mamba-2 (arXiv 2405.21060); hashable, so that a change is a recompile.

  Attributes:
    vocab_size: V, rows of the embedding and of the output head.
    num_tokens: ids the tokenizer knows; ids at or above it are never emitted.
    width: E. layers: L. heads: H. head_width: P. state_width: N.
    groups: G, groups of heads that share keys and queries of the state; the norm behind the state is of each alone.
    kernel: tokens that the convolution sees, a token's own included.
    norm_eps: epsilon of every RMSNorm.
    eos_ids: ids that end an answer, in ascending order.
    tied: the head is the embedding.
    conv_bias: of the convolution. bias: of the projections in and out.
    wide_residual: the residual stream is float32 whatever the weights are.
    max_context: greatest number of tokens, prompt and output together. The model itself knows no positions.
    family: for messages and reports only.
  """
  vocab_size: int
  num_tokens: int
  width: int
  layers: int
  heads: int
  head_width: int
  state_width: int
  groups: int
  kernel: int
  norm_eps: float
  eos_ids: tuple[int, ...]
  tied: bool = False
  conv_bias: bool = True
  bias: bool = False
  wide_residual: bool = True
  max_context: int = 1 << 20
  family: str = "mamba2"

  def __post_init__(self):
    if self.heads % self.groups:
      raise ValueError(f"heads={self.heads} is not a multiple of groups={self.groups}")
    if self.kernel < 2:
      raise ValueError(f"kernel={self.kernel}: the convolution needs 2 tokens or more")

  @property
  def inner(self) -> int:
    """Elements of all heads, H * P."""
    return self.heads * self.head_width

  @property
  def channels(self) -> int:
    """Channels of the convolution: inputs of all heads, then keys and queries of all groups."""
    return self.inner + 2 * self.groups * self.state_width

  @property
  def projected(self) -> int:
    """Rows of the projection in: gates, channels and the step of every head."""
    return self.inner + self.channels + self.heads
