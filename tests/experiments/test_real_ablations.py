"""Ablations on a real model, over a tiny one: what they run, what they claim of given counts, and what they lack."""
import collections
import dataclasses
import pathlib
import re

from absl import flags
import jax
import numpy as np
import pytest

from experiments import workloads
from experiments.ablations import base
from experiments.ablations import gallery
from experiments.ablations import real_drafts
from experiments.ablations import real_model
from experiments.ablations import real_requests
from experiments.ablations import registry
from experiments.ablations.real_model import HEAD, LOOKUP, SUFFIX
from experiments.harness import draft_view
from specjax import checkpoints
from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax import verifiers
from specjax.testing import tiny

pytestmark = pytest.mark.usefixtures("quick_compile")
FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
ABLATIONS = {ablation.name: ablation for module in (real_drafts, real_requests) for ablation in module.ABLATIONS}
KINDS = ("chat", "code", "code_edit", "json", "math", "multilingual")


def request(name, kind, language="en", text="a list of numbers: 1 2 3 1 2 3 1 2"):
  return workloads.Request(id=name, category=kind, language=language, turns=(text, "more"), source="w.jsonl:1")


@pytest.fixture(scope="module")
def model():
  """A tiny target and head, and requests of several kinds and languages."""
  tokenizer = checkpoints.Tokenizer.from_folder(FIXTURES / "tiny_llama")
  target = tiny.decoder(vocab=tokenizer.vocab_size, max_context=256)
  requests = [request(kind, kind, "ko" if kind == "multilingual" else "en") for kind in KINDS]
  requests += [request("chat 2", "chat"), request("multilingual 2", "multilingual", "es"),
               request("long", "rag", text="word " * 400)]
  sizes = {tuple(drivers.chunks(len(tokenizer.chat([{"role": "user", "content": r.turns[0]}])) - 1)) for r in requests}
  return real_model.Model(target, tokenizer, tiny.eagle3(target, tuple(range(0, tokenizer.vocab_size, 2))),
                          tuple(requests), tuple(sizes))
