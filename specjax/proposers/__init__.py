"""Proposers: one file a method of drafting, all behind `base.Proposer`."""
from specjax.proposers.auto_lookup import AutoLookup
from specjax.proposers.autoregressive import Drawing
from specjax.proposers.base import Committed
from specjax.proposers.base import Context
from specjax.proposers.base import Proposer
from specjax.proposers.dflash import DFlash
from specjax.proposers.dspark import DSpark
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.draft_tree import DraftTree
from specjax.proposers.dynamic_tree import DynamicTree
from specjax.proposers.eagle import Eagle
from specjax.proposers.eagle import EagleFixedTree
from specjax.proposers.eagle import EagleTree
from specjax.proposers.early_exit import EarlyExit
from specjax.proposers.fallback import Fallback
from specjax.proposers.hierarchical import Hierarchical
from specjax.proposers.hydra import Hydra
from specjax.proposers.jacobi import Jacobi
from specjax.proposers.jetspec import JetSpec
from specjax.proposers.layer_skip import LayerSkip
from specjax.proposers.lookahead import Lookahead
from specjax.proposers.medusa import Medusa
from specjax.proposers.mixture import Mixture
from specjax.proposers.ngram import NGram
from specjax.proposers.pard import Pard
from specjax.proposers.peagle import PEagle
from specjax.proposers.plain import Plain
from specjax.proposers.recycling import Recycling
from specjax.proposers.retokenised import Retokenised
from specjax.proposers.retrieval import Retrieval
from specjax.proposers.shared_tokens import SharedTokens
from specjax.proposers.suffix import Suffix

__all__ = ["AutoLookup", "Committed", "Context", "DFlash", "DSpark", "DraftModel", "DraftTree", "Drawing", "DynamicTree",
           "Eagle", "EagleFixedTree", "EagleTree", "EarlyExit", "Fallback", "Hierarchical", "Hydra", "Jacobi",
           "JetSpec", "LayerSkip", "Lookahead", "Medusa", "Mixture", "NGram", "PEagle", "Pard", "Plain", "Proposer",
           "Recycling", "Retokenised", "Retrieval", "SharedTokens", "Suffix"]
