"""What an encoder-decoder target is made of. Letters as in `config`."""
import dataclasses

ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig:
  """Static shape and constants of T5 and its kin; hashable, so that a change of configuration is a recompile.

  Attributes:
    vocab_size: V, rows of the embedding and of the output head.
    num_tokens: ids the tokenizer knows; ids at or above it are never emitted.
    width: E. layers: L, of the decoder. encoder_layers: of the encoder.
    heads: H, of queries, keys and values. head_width: C. mlp_width: M.
    norm_eps: epsilon of every RMSNorm.
    buckets: of relative positions, see `relative`; in the encoder half of them are of what lies ahead.
    max_distance: all tokens at least so far away are alike.
    start_id: the token that the decoder begins with.
    eos_ids: ids that end an answer, in ascending order.
    activation: of the feed-forward, one of `ACTIVATIONS`. gated: down(act(gate) * up), otherwise down(act(up)).
    tied: the head is the embedding.
    scaled_head: what enters the head is multiplied by E ** -0.5 (T5, not T5 v1.1).
    max_context: greatest number of tokens, inputs and output together.
    family: for messages and reports only.
  """
  vocab_size: int
  num_tokens: int
  width: int
  layers: int
  encoder_layers: int
  heads: int
  head_width: int
  mlp_width: int
  norm_eps: float
  buckets: int
  max_distance: int
  start_id: int
  eos_ids: tuple[int, ...]
  activation: str = "relu"
  gated: bool = False
  tied: bool = True
  scaled_head: bool = True
  max_context: int = 1 << 16
  family: str = "t5"

  def __post_init__(self):
    if self.activation not in ACTIVATIONS:
      raise ValueError(f"activation={self.activation!r}: allowed are {', '.join(map(repr, ACTIVATIONS))}")
    if self.buckets < 4 or self.buckets % 2 or self.max_distance <= self.buckets // 2:
      raise ValueError(f"buckets={self.buckets}, max_distance={self.max_distance}: needed are an even number of 4 or "
                       "more buckets, and a distance beyond half of it")
    if not 0 <= self.start_id < self.vocab_size:
      raise ValueError(f"start_id={self.start_id}: ids are 0 to {self.vocab_size - 1}")
