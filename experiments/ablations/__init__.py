"""Ablations of papers, redone here: one setting varied, our curve beside the published numbers, and a verdict.

`registry.ALL` lists them. Those of kind "sim" need tables only: laws small enough to enumerate, pushed through the
library's own verifiers, and closed forms; they are exact and take seconds. Those of kind "toy" run models.
"""
