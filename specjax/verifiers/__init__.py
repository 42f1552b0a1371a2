"""Verifiers: one file a rule, all behind `base.Verifier`."""
from specjax.verifiers.base import Verdict
from specjax.verifiers.base import Verifier
from specjax.verifiers.block import Block
from specjax.verifiers.cascade import LossyCascade
from specjax.verifiers.coupled import Coupled
from specjax.verifiers.greedy_multi import GreedyMulti
from specjax.verifiers.kseq import KSeq
from specjax.verifiers.lenient import LossyLenient
from specjax.verifiers.point import Point
from specjax.verifiers.recursive import Recursive
from specjax.verifiers.rejection import Rejection
from specjax.verifiers.traversal import Traversal
from specjax.verifiers.typical import LossyTypical

# By the name that flags and reports use.
BY_NAME = {"point": Point, "coupled": Coupled, "rejection": Rejection, "recursive": Recursive, "block": Block,
           "traversal": Traversal, "kseq": KSeq, "greedy_multi": GreedyMulti, "lossy_typical": LossyTypical,
           "lossy_lenient": LossyLenient, "lossy_cascade": LossyCascade}

__all__ = ["BY_NAME", "Block", "Coupled", "GreedyMulti", "KSeq", "LossyCascade", "LossyLenient", "LossyTypical", "Point",
           "Recursive", "Rejection", "Traversal", "Verdict", "Verifier"]
