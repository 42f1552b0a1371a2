"""Many requests over the one step: continuous batching, structured output, and drafting that turns itself down.

`Engine` runs requests turn by turn; `Service` runs an engine in a thread and hands each request out as an asynchronous
iterator; `http` is OpenAI's interface to a service, and needs the extra `serve`.
"""
from specjax.serving.control import Budget
from specjax.serving.control import Fixed
from specjax.serving.control import Gate
from specjax.serving.control import Goodput
from specjax.serving.control import Table
from specjax.serving.engine import Config
from specjax.serving.engine import Engine
from specjax.serving.grammars import Grammar
from specjax.serving.requests import Outcome
from specjax.serving.requests import QueueFull
from specjax.serving.requests import Request
from specjax.serving.requests import Update
from specjax.serving.service import Service

__all__ = ["Budget", "Config", "Engine", "Fixed", "Gate", "Goodput", "Grammar", "Outcome", "QueueFull", "Request",
           "Service", "Table", "Update"]
