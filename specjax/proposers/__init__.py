"""Proposers: one file a method of drafting, all behind `base.Proposer`."""
from specjax.proposers.base import Committed
from specjax.proposers.base import Context
from specjax.proposers.base import Proposer
from specjax.proposers.ngram import NGram
from specjax.proposers.plain import Plain

__all__ = ["Committed", "Context", "NGram", "Plain", "Proposer"]
