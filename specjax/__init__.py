"""specjax: research on speculative decoding in JAX. Exact, never slower by design, honest numbers."""
from specjax import checkpoints
from specjax import proposers
from specjax import serving
from specjax import verifiers
from specjax.checkpoints.heads import load_head
from specjax.checkpoints.heads import save_head
from specjax.constraints import Automaton
from specjax.conversation import Conversation
from specjax.drivers import Delta
from specjax.drivers import generate
from specjax.drivers import GenerateResult
from specjax.drivers import stream
from specjax.loading import load
from specjax.loading import save
from specjax.sampling_params import SamplingParams
from specjax.tree import TokenTree

__version__ = "0.1.0"

__all__ = ["Automaton", "Conversation", "Delta", "GenerateResult", "SamplingParams", "TokenTree", "checkpoints",
           "generate", "load", "load_head", "proposers", "save", "save_head", "serving", "stream",
           "verifiers"]
