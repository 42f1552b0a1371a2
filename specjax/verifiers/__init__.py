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

__all__ = ["Block", "Cascade", "Coupled", "GreedyMulti", "KSeq", "Lenient", "Point", "Recursive", "Rejection",
           "Traversal", "Typical", "Verdict", "Verifier"]
