"""What an encoder-decoder target is made of. Letters as in `config`."""
import dataclasses

_ALLOWED = {"activation": ("relu", "silu", "gelu", "gelu_tanh"), "positions": ("relative", "table"),
            "norm": ("rms", "layer")}


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig:
  """Static shape and constants of T5, BART and their kin; hashable, so that a change of configuration is a recompile.

  Attributes:
    vocab_size: V, rows of the embedding and of the output head.
    num_tokens: ids the tokenizer knows; ids at or above it are never emitted.
    width: E. layers: L, of the decoder. encoder_layers: of the encoder.
    heads: H, of queries, keys and values. head_width: C. mlp_width: M. The same in encoder and decoder.
    norm_eps: epsilon of every norm.
    opening: ids that the decoder begins with: its start token, and a first token that is forced, such as a language.
    eos_ids: ids that end an answer, in ascending order.
    positions: "relative" (T5) or "table" (a vector a position is added to the embedding, learned or sinusoidal; the
      decoder counts from its own beginning).
    buckets: of relative positions, see `relative`; in the encoder half of them are of what lies ahead.
    max_distance: all tokens at least so far away are alike.
    norm: "rms" or "layer" (mean and bias as well).
    post_norm: norms stand behind each sum (arXiv 1706.03762), not in front of attention and feed-forward.
    activation: of the feed-forward: "relu", "silu", "gelu" or "gelu_tanh".
    gated: down(act(gate) * up), otherwise down(act(up)).
    scaled_queries: queries are multiplied by C ** -0.5.
    embedding_scale: what embeddings are multiplied by, in encoder and decoder.
    tied: the head is the embedding.
    scaled_head: what enters the head is multiplied by E ** -0.5 (T5, not T5 v1.1).
    banned_ids: ids that are never emitted, in ascending order.
    banned_first: ids that are not the first of an output either (Whisper: a blank, an end).
    mels: M of the sound that the encoder reads in place of tokens, f[M, 2 * max_inputs] (Whisper); 0 for tokens.
    max_inputs: greatest number of the encoder's inputs.
    max_outputs: greatest number of the decoder's tokens, its opening and the output.
    max_context: greatest number of tokens, inputs, opening and output together.
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
  opening: tuple[int, ...]
  eos_ids: tuple[int, ...]
  positions: str = "relative"
  buckets: int = 32
  max_distance: int = 128
  norm: str = "rms"
  post_norm: bool = False
  activation: str = "relu"
  gated: bool = False
  scaled_queries: bool = False
  embedding_scale: float = 1.0
  tied: bool = True
  scaled_head: bool = False
  banned_ids: tuple[int, ...] = ()
  banned_first: tuple[int, ...] = ()
  mels: int = 0
  max_inputs: int = 1 << 16
  max_outputs: int = 1 << 16
  max_context: int = 1 << 16
  family: str = "t5"

  def __post_init__(self):
    for name, allowed in _ALLOWED.items():
      if getattr(self, name) not in allowed:
        raise ValueError(f"{name}={getattr(self, name)!r}: allowed are {', '.join(map(repr, allowed))}")
    if self.positions == "relative" and (
        self.buckets < 4 or self.buckets % 2 or self.max_distance <= self.buckets // 2):
      raise ValueError(f"buckets={self.buckets}, max_distance={self.max_distance}: needed are an even number of 4 or "
                       "more buckets, and a distance beyond half of it")
    for name in ("opening", "banned_ids", "banned_first"):
      ids = getattr(self, name)
      if not all(0 <= index < self.vocab_size for index in ids):
        raise ValueError(f"{name}={ids}: ids are 0 to {self.vocab_size - 1}")
    if not 1 <= len(self.opening) < self.max_outputs:
      raise ValueError(f"opening={self.opening}: the decoder begins with 1 to {self.max_outputs - 1} tokens")
