"""Who serves in a load test: engines in this process, one method each, or servers that run already.

Every run has an engine of its own, so that nothing outlives it: no cache of prefixes, no controller's statistics. The
programs stay compiled, and what steps cost is known from when these were warmed up. Methods draft as much as they can
in every step (`control.Fixed`), whatever that costs; only `adaptive` has a controller that weighs it, --controller.
"""
import functools

from absl import flags

from experiments.harness import controllers
from experiments.harness import method_options
from experiments.harness import methods
from experiments.harness import rules
from experiments.harness import settings
from experiments.harness import sharded
from specjax import checkpoints
from specjax.checkpoints import gguf_header
from specjax.serving import control
from specjax.serving import engine as engine_lib
from specjax.serving import load
from specjax.serving import load_http

ADAPTIVE = "adaptive"
BASE = flags.DEFINE_list("adaptive_base", ["ngram"], "Whose drafts adaptive makes, one arm each: methods under "
                         "--controller, which turns drafting down where it does not pay.")
BASE_URL = flags.DEFINE_list("base_url", None, "Servers with OpenAI's interface instead of engines in this process, "
                             "one for each of --methods, which then only names them.")
MODEL = flags.DEFINE_string("model", None, "--base_url: the model's name there; the first one listed by default.")
ROWS = flags.DEFINE_integer("max_num_seqs", None, "Requests that an engine runs at once; as many as the sweep has in "
                            "flight, 16 for rates, by default.", lower_bound=1)
STEP_TOKENS = flags.DEFINE_integer("max_num_batched_tokens", engine_lib.Config.step_tokens, "Prompt tokens that a "
                                   "turn of an engine reads beside its step.", lower_bound=1)
PREFIX_TOKENS = flags.DEFINE_integer("prefix_tokens", 0, "Prompt tokens that an engine keeps for requests that begin "
                                     "alike; 0: none.", lower_bound=0)
_OF_ENGINES = (BASE, controllers.NAME, ROWS, STEP_TOKENS, PREFIX_TOKENS, rules.VERIFIER)
_AGAIN = 5  # times that a run is made again because something compiled in it


def build(names: list[str], *, rows: int):
  """Who serves under the names of --methods: `Engines`, or `Servers` with --base_url.

  Args:
    names: of --methods. rows: of an engine, if --max_num_seqs does not say.

  Raises:
    ValueError: names the flag or the method, what it was and what is allowed.
  """
  if BASE_URL.value is not None:
    return _servers(names)
  if MODEL.value is not None:
    raise ValueError(f"--model={MODEL.value} is the name of a model on a server; leave it out, or add --base_url")
  if methods.ALL in names:
    raise ValueError(f"--methods={','.join(names)}: name the methods to serve, of {', '.join(methods.NAMES)} and "
                     f"{ADAPTIVE}")
  bases = BASE.value if ADAPTIVE in names else []
  if not bases and not flags.FLAGS[BASE.name].using_default_value:
    raise ValueError(f"--adaptive_base={','.join(BASE.value)} is an option of {ADAPTIVE}; add that to --methods, or "
                     "leave the flag out")
  if ADAPTIVE in names and (not bases or "plain" in bases or len(set(bases)) < len(bases)):
    raise ValueError(f"--adaptive_base={','.join(BASE.value)}: it takes methods that draft, each once")
  make = controllers.maker()
  if ADAPTIVE not in names and not flags.FLAGS[controllers.NAME.name].using_default_value:
    raise ValueError(f"--controller={controllers.NAME.value} is an option of {ADAPTIVE}; add that to --methods, or "
                     "leave the flag out")
  if len(set(names)) < len(names):
    raise ValueError(f"--methods={','.join(names)}: name each method once")
  fixed = [name for name in names if name != ADAPTIVE]
  drafting, verifier = methods.check(list(dict.fromkeys(fixed + bases))), rules.build()
  rules.check({name: methods.outline(name) for name in drafting}, verifier)
  target, tokenizer = sharded.load(settings.TARGET.value)
  built = methods.build_all(drafting, methods.Given(target, tokenizer, settings.TARGET.value))
  rules.check(built, verifier)
  arms = {}
  for name in names:
    arms |= {name: (built[name], control.Fixed)} if name != ADAPTIVE else {
        f"{ADAPTIVE} {base}": (built[base], make) for base in bases}
  return Engines(target, tokenizer, arms, verifier, rows=ROWS.value or rows)


class Engines:
  """Engines in this process, made anew for every run."""

  def __init__(self, target, tokenizer, arms: dict, verifier, *, rows: int):
    """Args: arms: by name, a proposer and what makes its controller."""
    self.tokenizer, self.names = tokenizer, list(arms)
    self._target, self._arms, self._verifier, self._rows, self._config = target, arms, verifier, rows, None
    self._costs = {}

  def fit(self, requests: list, sources: list[str]) -> None:
    """Takes the sizes that these requests need.

    Args:
      requests: all of the job. sources: where each was read, for messages.

    Raises:
      ValueError: names the request that the target's context does not hold.
    """
    for request, source in zip(requests, sources):
      if len(request.prompt) + request.max_new_tokens > self._target.max_context:
        raise ValueError(f"{source}: a prompt of {len(request.prompt)} tokens and --max_new_tokens="
                         f"{request.max_new_tokens} are more than the target's context of {self._target.max_context}; "
                         "leave it out or lower --max_new_tokens")
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    self._config = engine_lib.Config(rows=self._rows, max_tokens=longest, step_tokens=STEP_TOKENS.value,
                                     prefix_tokens=PREFIX_TOKENS.value, waiting=max(len(requests), 1024))
    for name in self.names:
      self._engine(name).submit(requests[0])  # whatever an engine refuses, it refuses here

  def warm_up(self, report=lambda name: None) -> None:
    """Compiles what each method needs; `report` is told of whom it is the turn."""
    full = settings.sampling_params().batch(1).adjusts
    for name in self.names:
      report(name)
      engine = self._engine(name)
      engine.warm_up(full=full)
      self._costs[name] = engine.costs

  def run(self, name: str, requests: list, arrivals, *, warm_up: list, cancellations, report) -> load.Run:
    """One run. One in which anything compiled is thrown away and made again, a few times; then it is kept, and the
    summary says so.

    Args:
      name: of the arm. requests, arrivals, cancellations, report: see `load.run`.
      warm_up: requests that are sent before, much like the others, and not counted.
    """
    for _ in range(_AGAIN):
      engine = self._engine(name)
      load.warm_up(functools.partial(load.run, engine), warm_up)
      run = load.run(engine, requests, arrivals, cancellations=cancellations, report=report)
      if not any(turn.programs for turn in run.turns):
        break
    return run

  def _engine(self, name):
    proposer, controller = self._arms[name]
    return engine_lib.Engine(self._target, proposer, self.tokenizer, config=self._config, verifier=self._verifier,
                             key=settings.random_key(), controller=controller(), costs=self._costs.get(name))


def _servers(names):
  if len(BASE_URL.value) != len(names):
    raise ValueError(f"--base_url={','.join(BASE_URL.value)} and --methods={','.join(names)}: give one server for each "
                     "method, in the same order")
  if len(set(names)) < len(names):
    raise ValueError(f"--methods={','.join(names)}: name each server once")
  for flag in (*_OF_ENGINES, *method_options.ALL):
    if not flags.FLAGS[flag.name].using_default_value:
      raise ValueError(f"--{flag.name}={flag.value} is of engines in this process, and --base_url names servers, which "
                       "have their own; leave one of the two out")
  return Servers(dict(zip(names, BASE_URL.value)), MODEL.value, tokenizer(settings.TARGET.value))


class Servers:
  """Servers that run already; --target only says how prompts are written for them."""

  def __init__(self, urls: dict[str, str], model: str | None, tokenizer_):
    self.tokenizer, self.names = tokenizer_, list(urls)
    self._urls, self._model = urls, model

  def fit(self, requests: list, sources: list[str]) -> None:
    """Checks that all requests can be sent.

    Raises:
      ValueError: names the field that cannot.
    """
    del sources
    for request in requests:
      load_http.body(request)

  def warm_up(self, report=lambda name: None) -> None:
    """Nothing: servers have done that."""

  def run(self, name: str, requests: list, arrivals, *, warm_up: list, cancellations, report) -> load.Run:
    """See `Engines.run`."""
    send = functools.partial(load_http.run, self._urls[name], model=self._model)
    load.warm_up(send, warm_up)
    return send(requests, arrivals, cancellations=cancellations, report=report)


def tokenizer(name: str) -> checkpoints.Tokenizer:
  """The tokenizer of a target, without its weights."""
  path = checkpoints.resolve(name)
  if path.is_dir():
    return checkpoints.Tokenizer.from_folder(path)
  return checkpoints.Tokenizer.from_gguf(gguf_header.read_header(path))
