"""Workloads: the requests that experiments send to a model, and the reader for them."""

from experiments.workloads.reader import BUNDLED
from experiments.workloads.reader import CATEGORIES
from experiments.workloads.reader import Request
from experiments.workloads.reader import read_workload

__all__ = ("BUNDLED", "CATEGORIES", "Request", "read_workload")
