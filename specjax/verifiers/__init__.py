"""Verifiers: one file a rule, all behind `base.Verifier`."""
from specjax.verifiers.base import Verdict
from specjax.verifiers.base import Verifier
from specjax.verifiers.point import Point

__all__ = ["Point", "Verdict", "Verifier"]
