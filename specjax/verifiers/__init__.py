"""Verifiers: one file a rule, all behind `base.Verifier`."""
from specjax.verifiers.base import Verdict
from specjax.verifiers.base import Verifier
from specjax.verifiers.block import Block
from specjax.verifiers.cascade import Cascade
from specjax.verifiers.coupled import Coupled
from specjax.verifiers.greedy_multi import GreedyMulti
from specjax.verifiers.kseq import KSeq
from specjax.verifiers.lenient import Lenient
from specjax.verifiers.point import Point
from specjax.verifiers.recursive import Recursive
from specjax.verifiers.rejection import Rejection
from specjax.verifiers.traversal import Traversal
from specjax.verifiers.typical import Typical

# By the name that flags and reports use.
BY_NAME = {"point": Point, "coupled": Coupled, "rejection": Rejection, "recursive": Recursive, "block": Block,
           "traversal": Traversal, "kseq": KSeq, "greedy_multi": GreedyMulti, "typical": Typical, "lenient": Lenient,
           "cascade": Cascade}

__all__ = ["BY_NAME", "Block", "Cascade", "Coupled", "GreedyMulti", "KSeq", "Lenient", "Point", "Recursive",
           "Rejection", "Traversal", "Typical", "Verdict", "Verifier"]
