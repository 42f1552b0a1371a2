"""Requests for the tests of judges."""
from experiments import workloads


def request(prompt="Do it.", category="chat", language="en", name="a", **fields):
  turns = (prompt,) if isinstance(prompt, str) else tuple(prompt)
  return workloads.Request(id=name, category=category, language=language, turns=turns, source="x:1", fields=fields)
