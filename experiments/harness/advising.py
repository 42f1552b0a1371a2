"""The order in which methods are tried: plain decoding first, then the cheapest methods, draft models, learned heads.

A stage measures its arms interleaved with plain decoding on the first request of the tuning half of every kind. A kind
is closed to an arm by a bound: were all of its draft accepted, or as many as the upper end of the interval of its
acceptance allows, the step would still not be worth its measured time. Chains whose counts and times ask for another
length are then tried at that length, too; of the two the one that was faster over all kinds is kept.

What time is left is spent where it decides something: half of it on further requests of the tuning half, for the arms
of each kind that are near its best one, the other half on the held-out requests, for the best arm of each kind and the
best of all. Of few requests a kind's own speedup is noisy, so that the speedup over all kinds counts for eight more.
"""
import dataclasses
import time

import jax
import numpy as np
from tqdm import tqdm

from experiments.harness import advice
from experiments.harness import advice_arms
from experiments.harness import advice_facts
from experiments.harness import advice_lengths
from experiments.harness import costs as costs_lib
from experiments.harness import flag_values
from experiments.harness import measure
from experiments.harness import methods
from experiments.harness import settings
from specjax import decode
from specjax import proposers
from specjax.theory import acceptance
from specjax.theory import speedup
from specjax.verifiers import point

_LEAST_GAIN = 1.02
_EACH = ("draft_model", "eagle3", "eagle", "hydra", "mtp")  # draft a token a pass; the others all at once
_ANY_LENGTH = ("ngram", "suffix", "draft_model", "eagle3", "eagle")  # draft as many tokens as they are asked for
_TUNED = 2          # arms of another length, at most
_MOST_TOKENS = 15
_LENGTH_GAIN = 1.05  # predicted, from which another length is tried
_MOST = 0.8         # of the kinds: on which an arm must have been tried to stand for all of them
_RACE = 3           # arms of a kind that more requests are spent on, at most
_NEAR = 0.9         # of the best one's speed: those arms
_POOLED = 8         # requests that the speedup over all kinds counts for in that of a kind


class Advisor:
  """Measures a target on requests, stage by stage, within a time."""

  def __init__(self, target, tokenizer, name: str, requests: list, stages: list[list[advice_arms.Arm]], *,
               minutes: float, raw: bool = False, verifier=point.Point(), clock=time.monotonic, log=lambda text: None,
               keep=lambda records: None):
    """
    Args:
      target, tokenizer, name: as loaded, and by its name. requests: of the workload.
      stages: arms in the order in which they are tried. minutes: for all of it. raw, verifier: as in `measure.Plan`.
      clock: seconds. log: takes a line of progress. keep: takes records, request by request.
    """
    self._given = methods.Given(target, tokenizer, name)
    self._raw, self._verifier = raw, verifier
    self._clock, self._log, self._keep, self._end = clock, log, keep, clock() + 60 * minutes
    self.kinds = advice.kinds(requests)
    self.stages, self.left_out = list(stages), []
    self._pairs = {}     # (arm, kind, half): ([(tokens, seconds)] of plain, of the arm)
    self._counts = {}    # (arm, kind): records of the tuning half
    self._plain = {}     # kind: those of plain decoding, of every stage
    self._stopped = {}   # (arm, kind): why
    self.overall_arm = None
    self._draft_ms, self._times, self._proposers = {}, None, {}
    self._seconds, self._spent, self._done = None, 0.0, 0  # of a run: guessed at first; of all runs so far

  def run(self) -> dict:
    """Everything; returns what `advice.json` holds."""
    self._proposers["plain"] = methods.build("plain", self._given)
    everything = [r for requests in self.kinds.values() for r in requests]
    plan = self._plan({"plain": self._proposers["plain"]}, everything)
    measure.check(plan)
    measure.warm_up(plan)
    self._seconds = measure.estimate(plan) / len(everything)
    # How many runs there will be depends on what they show; that they end in time does not.
    with tqdm(total=max(0.0, round((self._end - self._clock()) / 60, 1)), unit="min", leave=False,
              bar_format="{desc}: {percentage:.0f}%|{bar}| {n:.1f} of {total:.1f} min at most{postfix}") as self._bar:
      for each in self.stages:
        self._stage(each)
      self._tune_lengths()
      self._race()
      self._held_out()
    return self._advice()

  def _plan(self, proposers, requests):
    return measure.Plan(target=self._given.target, tokenizer=self._given.tokenizer, methods=proposers,
                        batches=[[request] for request in requests], repeats=1,
                        max_new_tokens=settings.MAX_NEW_TOKENS.value, raw=self._raw, verifier=self._verifier)

  def _half(self, kind, held_out):
    return advice.halves(self.kinds[kind])[held_out]

  def _has_time(self, runs, reserved=0.0):
    """Whether so many runs fit before the end, and the seconds that are reserved; as long as the runs so far took."""
    return self._clock() + runs * self._mean() + reserved <= self._end

  def _mean(self):
    return self._spent / self._done if self._done else self._seconds

  def _reserve(self):
    """Seconds of a round of the held-out half."""
    return 3 * len(self.kinds) * self._mean()

  def _stage(self, arms):
    """Tries the arms of one stage on all kinds that are open to them."""
    built = {}
    for arm in arms:
      if not self._has_time(2 * len(self.kinds), self._reserve()):
        self.left_out.append({"arm": arm.name, "why": "the time of --minutes was over"})
        continue
      try:
        with flag_values.applied(arm.settings):
          proposer = methods.build_all([arm.method], self._given)[arm.method]
        self._time_parts(arm.name, proposer)
      except ValueError as error:
        self.left_out.append({"arm": arm.name, "why": str(error)})
        continue
      self._proposers[arm.name] = built[arm.name] = proposer
    if built:
      self._log(f"trying {', '.join(built)}")
      self._round({kind: [name for name in built if self._open(name, kind)] for kind in self.kinds}, 0)

  def _runs(self, wanted, index, held_out):
    """Calls of `generate` of a round: turns count, and plain decoding is an arm."""
    return sum((1 + len(names)) * len(self._half(kind, held_out)[index].turns)
               for kind, names in wanted.items() if names)

  def _round(self, wanted, index, *, held_out=False):
    """Measures arms on the request of an index of each kind's half; kinds with the same arms together."""
    requests = {kind: self._half(kind, held_out)[index:index + 1] for kind, names in wanted.items() if names}
    for names in dict.fromkeys(tuple(wanted[kind]) for kind in requests):
      self._measure(names, {kind: each for kind, each in requests.items() if tuple(wanted[kind]) == names},
                    held_out=held_out, index=index)

  def _race(self):
    """Further requests of the tuning half, for the arms of each kind that are near the best one there."""
    end = self._clock() + (self._end - self._clock()) / 2
    for index in range(1, max(len(self._half(kind, False)) for kind in self.kinds)):
      wanted = {kind: self._racers(kind) for kind in self.kinds if len(self._half(kind, False)) > index}
      runs = self._runs(wanted, index, held_out=False)
      if not runs or not self._has_time(runs, self._end - end):
        return
      self._round(wanted, index)

  def _racers(self, kind):
    """Arms whose speedup is near the best one's, plain decoding among them: the fastest few."""
    scores = {name: score for name in self._draft_ms if (score := self._score(name, kind)) and not
              self._stopped.get((name, kind)) and (score >= 1 or not self._bounded(name, kind))}
    least = _NEAR * max([1.0, *scores.values()])
    near = sorted((name for name, score in scores.items() if score >= least), key=lambda n: -scores[n])[:_RACE]
    return [name for name in scores if name in near]  # in one order, so that kinds with the same arms run together

  def _score(self, name, kind):
    """Speedup on the tuning half of a kind, drawn towards that over all kinds; None where it was not tried."""
    pairs = self._pairs.get((name, kind, False))
    if pairs is None:
      return None
    own, every = advice.paired(*pairs)[0], self._first(name)
    if not own or not every:
      return None
    count = len(pairs[0])
    return float(np.exp((count * np.log(own) + _POOLED * np.log(every)) / (count + _POOLED)))

  def _measure(self, names, by_kind, *, held_out, index):
    """Plain decoding and arms, interleaved, on the requests of each kind."""
    owner = {r.id: kind for kind, requests in by_kind.items() for r in requests}
    requests = [r for each in by_kind.values() for r in each]
    if not requests:
      return
    plan = self._plan({"plain": self._proposers["plain"]} | {name: self._proposers[name] for name in names}, requests)
    begin, by_arm = self._clock(), {}
    self._progress("compiling")
    try:
      measure.warm_up(plan)
    except ValueError as error:  # the programs are more than the system has room for: what was measured still counts
      self.left_out.append({"arm": ", ".join(names), "why": str(error)})
      return
    report = lambda: self._progress("held out" if held_out else "tuning", 1)
    for done, records in enumerate(measure.measure(plan, report), start=1):
      self._keep([record | {"half": "held_out" if held_out else "tuning"} for record in records])
      for record in records:
        by_arm.setdefault((record["method"], owner[record["id"]]), []).append(record)
      if not held_out and done < len(requests) and not self._has_time(0, self._reserve()):
        if not index:
          self.left_out.append({"arm": ", ".join(names), "why": "the time of --minutes was over amid a stage"})
        break
    self._spent += self._clock() - begin
    for kind in (kind for kind in by_kind if ("plain", kind) in by_arm):
      plain = by_arm["plain", kind]
      if not held_out:
        self._plain[kind] = self._plain.get(kind, []) + plain
      for name in names:
        ours, before = by_arm[name, kind], self._pairs.get((name, kind, held_out), ([], []))
        self._pairs[name, kind, held_out] = before[0] + advice.pairs(plain), before[1] + advice.pairs(ours)
        if not held_out:
          self._counts[name, kind] = self._counts.get((name, kind), []) + ours

  def _progress(self, doing, runs=0):
    self._done += runs
    self._bar.n = max(self._bar.n, self._bar.total - max(0, self._end - self._clock()) / 60)
    self._bar.set_description_str(doing, refresh=False)
    self._bar.set_postfix(runs=self._done)

  def _time_parts(self, name, proposer):
    """T(w) of the target once, up to the widest pass that another draft length may ask for, and the draft of an arm."""
    request = next(iter(self.kinds.values()))[0]
    ids = self._given.tokenizer.encode(request.turns[0], add_special_tokens=True)
    text = (ids * (128 // len(ids) + 1))[:128]
    text = text[:max(2, self._given.target.max_context // 2)]
    params = settings.sampling_params()
    if self._times is None:
      points = []
      for tokens in (7, _MOST_TOKENS):  # which widths a step may have depends on its widest one
        found = costs_lib.step_costs(self._given.target, proposers.NGram(num_tokens=tokens), text, params=params)
        points += [speedup.Point(width, 1, len(text), ms) for width, ms in zip(found["widths"], found["verify_ms"])]
      self._times = speedup.StepTimes(points)
    timer = costs_lib.draft_timer(self._given.target, proposer, text, params=params, verifier=self._verifier)
    self._draft_ms[name] = float(np.median([timer() for _ in range(3)]))

  def _width(self, nodes):
    return next(width for width in decode.WIDTHS if width >= nodes)

  def _draft_cost(self, arm):
    ms, depth = self._draft_ms[arm.name], max(1, self._proposers[arm.name].max_depth)
    return speedup.DraftCost(each=ms / depth) if arm.method in _EACH else speedup.DraftCost(fixed=ms)

  def _tune_lengths(self):
    """Tries the chains whose counts, over all kinds, and times ask for another length."""
    found = []
    for arm in (arm for arms in self.stages for arm in arms if arm.method in _ANY_LENGTH):
      records = [r for kind in self.kinds for r in self._counts.get((arm.name, kind), ())]
      if not records or not self._proposers[arm.name].chains:
        continue
      depth = self._proposers[arm.name].max_depth
      better = advice_lengths.best(records, depth, lambda nodes: self._times.ms(self._width(nodes)),
                                   self._draft_cost(arm), max(depth, _MOST_TOKENS))
      if better and better[0] != depth and better[1] >= _LENGTH_GAIN:
        tuned = advice_arms.Arm(f"{arm.name}, draft_tokens={better[0]}", arm.method,
                                arm.settings | {"draft_tokens": better[0]})
        found.append((better[1], arm, tuned))
    found = sorted(found, key=lambda each: -each[0])[:_TUNED]
    if not found:
      return
    self.stages.append([tuned for _, _, tuned in found])
    self._stage(self.stages[-1])
    for _, arm, tuned in found:
      tried = [{kind for kind in self.kinds if (each.name, kind, False) in self._pairs} for each in (arm, tuned)]
      both = [kind for kind in self.kinds if kind in tried[0] & tried[1]]
      times = {each.name: self._first(each.name, both) or 0.0 for each in (arm, tuned)}
      # One length a method: where the new one has not been seen on most kinds, the old one stays.
      slower, faster = sorted(times, key=times.get) if len(both) >= _MOST * len(tried[0]) else (tuned.name, arm.name)
      for kind in self.kinds:
        self._stopped.setdefault((slower, kind), f"over {len(both)} kinds it was {times[slower]:.2f} times plain "
                                                 f"decoding's speed, and {faster} {times[faster]:.2f}")

  def _first(self, name, kinds=None):
    """Speedup over the first requests of kinds, all by default, which all arms have in common where no bound closed
    them."""
    sides = [[self._pairs[name, kind, False][side][0] for kind in kinds or self.kinds
              if (name, kind, False) in self._pairs] for side in (0, 1)]
    return advice.paired(*sides)[0]

  def _tuning(self, name):
    """Speedup over the whole tuning half as far as it was measured."""
    mine = [pairs for (arm, _, held_out), pairs in self._pairs.items() if arm == name and not held_out]
    return advice.paired(*(sum((pairs[side] for pairs in mine), []) for side in (0, 1)))[0]

  def _held(self, name, kinds):
    """Speedup and interval on the held-out requests of several kinds."""
    return advice.paired(*(sum((list(self._pairs[name, kind, True][side]) for kind in kinds), []) for side in (0, 1)))

  def _request(self, kind):
    """Output tokens and prefill of a kind, on the scale of `_times`, from what plain decoding took there."""
    plain = self._plain.get(kind)
    if not plain:
      return speedup.ENDLESS
    step = _plain_ms(plain)
    scale = self._times.ms(1) / step if step else 1.0
    first = sum(r["seconds"] - r["decode_seconds"] for r in plain) * 1e3 / len(plain) * scale
    return speedup.Request(sum(len(r["token_ids"]) for r in plain) / len(plain), first)

  def _open(self, name, kind):
    """Whether full acceptance could pay; else the arm is closed, with the reason."""
    proposer = self._proposers[name]
    depth, cost = proposer.max_depth, speedup.DraftCost(fixed=self._draft_ms[name])
    most = max(speedup.predict(n + 1, self._width(min(n + 1, proposer.max_nodes)), n, self._times, cost,
                               request=self._request(kind)) for n in {1, depth})
    if proposer.max_depth and most >= _LEAST_GAIN:
      return True
    self._stopped[name, kind] = (f"even if all of its {depth} drafted tokens were accepted, the speedup would be at "
                                 f"most {most:.2f}")
    return False

  def _bounded(self, name, kind):
    """Why even the upper end of the interval of its acceptance does not pay; None if it may, or nothing was tried."""
    if (name, kind) not in self._counts:
      return None
    records, proposer = self._counts[name, kind], self._proposers[name]
    trials, accepted = (np.sum([r["counters"][f"{which}_per_position"] for r in records], axis=0)
                        for which in ("trials", "accepted"))
    if not proposer.chains or trials.sum() < 32:
      return None
    depth = proposer.max_depth
    tokens = acceptance.upper_tokens(trials, accepted, depth)
    # A lookup drafts only now and then, and its other steps are plain ones: what counts is a step that drafts.
    needed = speedup.tokens_needed(4, depth, self._times, speedup.DraftCost(fixed=self._draft_ms[name]))
    if tokens < needed:
      return (f"its acceptance brings at most {tokens:.2f} tokens a step (upper end of the 95% interval), and the "
              f"cheapest one must bring {needed:.2f}")
    return None

  def _held_out(self):
    """Measures on the other half the best of each kind, and the best of all."""
    self.overall_arm = self._best_overall()
    wanted = {}
    for kind in self.kinds:
      best = advice.best_tried([c for c in self._candidates(kind) if not c.stopped])
      names = dict.fromkeys(name for name in (best and best.arm, self.overall_arm) if name)
      if names:
        wanted[kind] = list(names)
    for index in range(max(len(self._half(kind, True)) for kind in self.kinds)):
      open_ = {kind: names for kind, names in wanted.items() if len(self._half(kind, True)) > index}
      if index and not self._has_time(self._runs(open_, index, held_out=True)):
        return
      self._round(open_, index, held_out=True)

  def _best_overall(self):
    """The arm that is fastest on the first requests of all kinds together, of those that were tried on most of them,
    and faster than plain decoding on all of the tuning half."""
    found = {}
    tried = {name: [kind for kind in self.kinds if (name, kind, False) in self._pairs] for name in self._draft_ms}
    most = max(map(len, tried.values()), default=0)
    for name, kinds in tried.items():
      if kinds and len(kinds) >= _MOST * most and not all((name, kind) in self._stopped for kind in self.kinds):
        found[name] = self._first(name) or 0.0
    best = max(found, key=found.get, default=None)
    return best if best and found[best] >= advice.MARGIN and self._tuning(best) > 1 else None

  def _candidates(self, kind):
    found = []
    for arm in (arm for arms in self.stages for arm in arms):
      stopped = self._stopped.get((arm.name, kind))
      tried, held = (self._pairs.get((arm.name, kind, half)) for half in (False, True))
      if not (stopped or tried):
        continue
      measured = advice.paired(*tried)[0] if tried else None
      ratio, interval = advice.paired(*held) if held else (None, None)
      candidate = advice.Candidate(arm=arm.name, method=arm.method, settings=arm.settings, tried=measured,
                                   score=self._score(arm.name, kind),
                                   speedup=ratio, interval=interval, stopped=stopped)
      if tried:
        stopped = stopped or (None if measured and measured >= advice.MARGIN else self._bounded(arm.name, kind))
        candidate = dataclasses.replace(candidate, stopped=stopped, expected=self._expected(arm.name, kind),
                                        facts=self._facts(arm, kind))
      found.append(candidate)
    return found

  def _step_ms(self, name, kind):
    share = np.sum([r["counters"]["steps_per_width"] for r in self._counts[name, kind]], axis=0)
    widths = decode.widths_for(self._proposers[name].max_nodes)
    return float(share @ [self._times.ms(width) for width in widths] / share.sum()) + self._draft_ms[name]

  def _tokens_per_step(self, name, kind):
    total = lambda field: sum(r["counters"][field] for r in self._counts[name, kind])
    return total("output_tokens") / max(1, total("steps"))

  def _expected(self, name, kind):
    """Speedup by the cost model, from the counts of the tuning half."""
    return self._request(kind).speedup(self._tokens_per_step(name, kind), self._step_ms(name, kind), self._times.ms(1))

  def _facts(self, arm, kind):
    others = [self._counts[arm.name, other] for other in self.kinds
              if other[0] == kind[0] and other != kind and (arm.name, other) in self._counts]
    held = len(self._pairs.get((arm.name, kind, True), ([],))[0])
    return advice_facts.of(
        arm, kind, self._counts[arm.name, kind], self._plain[kind], others, target=self._given.target,
        proposer=self._proposers[arm.name], step_ms=self._step_ms(arm.name, kind), times=self._times,
        draft_ms=self._draft_ms[arm.name], held_out=held, lookup=arm.method in advice_arms.CHEAP)

  def _advice(self):
    memory = {name: advice_facts.memory_bytes(self._given.target, proposer)
              for name, proposer in self._proposers.items()}
    decisions = [advice.decide(*kind, self._candidates(kind), memory) for kind in self.kinds]
    most = max((len(plain) for plain, _ in self._pairs.values()), default=0)
    return {"schema": 1, "target": self._given.name, "requests_of_a_half": most,
            "max_new_tokens": settings.MAX_NEW_TOKENS.value, "overall": self._overall(memory), "types": decisions,
            "left_out": self.left_out,
            "step_ms": [{"width": p.width, "ms": p.ms} for p in (self._times.points if self._times else ())],
            "draft_ms": self._draft_ms, "target_bytes": advice_facts.size(self._given.target),
            "device": jax.devices()[0].device_kind, "raw": self._raw, "temperature": settings.TEMPERATURE.value}

  def _overall(self, memory):
    name = self.overall_arm
    arm = next((arm for arms in self.stages for arm in arms if arm.name == name), advice_arms.Arm("plain", "plain"))
    kinds = [kind for kind in self.kinds if (name, kind, True) in self._pairs]
    ratio, interval = self._held(name, kinds)
    if not ratio or ratio <= 1:
      arm, ratio, interval = advice_arms.Arm("plain", "plain"), None, None
    return {"method": arm.method, "arm": arm.name, "settings": arm.settings, "measured": ratio, "interval": interval,
            "memory_bytes": memory.get(arm.name, 0) if arm.name != "plain" else 0}


def _plain_ms(records):
  steps = sum(r["decode_steps"] for r in records)
  return sum(r["decode_seconds"] for r in records) * 1e3 / steps if steps > 0 else None
