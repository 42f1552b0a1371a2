"""Serves a target over HTTP as OpenAI's API does: /v1/chat/completions, /v1/completions, /v1/models, and /metrics.

  python -m experiments.serve --target=smollm2-135m --method=ngram --port=8000
  curl localhost:8000/v1/completions -d '{"model": "smollm2-135m", "prompt": "Once upon", "max_tokens": 20}'

Needs `pip install 'specjax[serve]'`. Requests say how they are sampled; the flags say how drafts are made. Ends with
SIGINT (Ctrl-C) or SIGTERM: nothing new is taken then, and what runs has a few seconds.
"""
import asyncio
import pathlib
import sys

from absl import flags

from experiments.harness import cli
from experiments.harness import controllers
from experiments.harness import methods
from experiments.harness import one_method
from experiments.harness import presets
from experiments.harness import rules
from experiments.harness import settings
from specjax.models import base as models
from specjax.serving import engine as engine_lib
from specjax.serving import service as service_lib

_METHOD = flags.DEFINE_string("method", "ngram", f"One of {', '.join(methods.NAMES)}.")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen at; 0.0.0.0 for all of this machine's.")
_PORT = flags.DEFINE_integer("port", 8000, "Port to listen at; 0 takes a free one.", lower_bound=0, upper_bound=65535)
_NAME = flags.DEFINE_string("served_model_name", None, "The model's name in requests; by default --target's last part.")
_KEY = flags.DEFINE_string("api_key", None, "What requests must give as their API key; by default they need none.")
_WARM_UP = flags.DEFINE_bool("warm_up", True, "Compile all programs of plain requests before the first one.")
_SIZES = {  # by field of the engine's Config
    "rows": flags.DEFINE_integer("max_num_seqs", 16, "Requests that run at once, at most."),
    "max_tokens": flags.DEFINE_integer("max_model_len", None, "Tokens of a request; the target's context by default."),
    "step_tokens": flags.DEFINE_integer("max_num_batched_tokens", 128, "Prompt tokens read in one turn, at most."),
    "waiting": flags.DEFINE_integer("max_waiting", 1024, "Requests in the queue, at most."),
    "forced": flags.DEFINE_integer("forced_tokens", 0, "Tokens drafted where a grammar leaves no choice, at most."),
}


def main():
  presets.apply_overall()
  settings.uses_only(settings.TARGET, settings.SEED)
  http, controller = _http(), controllers.maker()()
  target, tokenizer, proposer, _, verifier = one_method.build(_METHOD.value, "a server")
  models.decoder_only(target, "a server")
  engine = _engine(target, proposer, tokenizer, verifier, controller)
  if not rules.keeps_the_law(verifier, proposer):
    print(f"LOSSY: {rules.name_of(verifier)}; the text is not the target's", file=sys.stderr)
  if _WARM_UP.value:
    engine.warm_up()
  name = _NAME.value or pathlib.PurePath(settings.TARGET.value).name
  service = service_lib.Service(engine)
  app = http.application(service, model_name=name, api_key=_KEY.value)
  asyncio.run(http.run(service, app, _HOST.value, _PORT.value,
                       lambda url: print(f"ready: {name} at {url}/v1", flush=True)))


def _engine(target, proposer, tokenizer, verifier, controller):
  try:
    config = engine_lib.Config(**{field: flag.value for field, flag in _SIZES.items()})
    return engine_lib.Engine(target, proposer, tokenizer, config=config, verifier=verifier, key=settings.random_key(),
                             controller=controller)
  except ValueError as error:
    given = ", ".join(f"--{flag.name}={flag.value}" for flag in _SIZES.values())
    raise ValueError(f"{given}: {error}") from error


def _http():
  """The server's module, whose package is not needed by anything else."""
  try:
    from specjax.serving import http
  except ImportError as error:
    raise ValueError(f"a server needs the package aiohttp ({error}); install it with: pip install 'specjax[serve]'"
                     ) from error
  return http


if __name__ == "__main__":
  cli.run(main)
