"""Controllers: what each sets, and that drafting is given up where it does not pay and comes back where it does."""
import numpy as np
import pytest

from specjax.serving import control
from specjax.serving import costs as costs_lib

WIDTHS = (1, 4, 8)
LIMITS = (0, 3, 7)
SECONDS = {0: 1.0, 3: 1.3, 7: 1.8}
SCALES = (1.0, 0.02, 50.0)  # nothing may hang on the unit of time
scaled = lambda seconds, scale: {limit: scale * value for limit, value in seconds.items()}


class Traffic:
  """A batch whose drafts are as long as they may be and accepted token by token with one probability."""

  def __init__(self, rows=2, seed=0):
    self.costs, self.everyone = costs_lib.Costs(WIDTHS), control.Acceptance(fade=0.995)
    self.rows = [control.Acceptance() for _ in range(rows)]
    self.random, self.idle = np.random.default_rng(seed), 0

  def run(self, controller, steps, rate, seconds=SECONDS):
    """The limits of so many steps, and tokens over time."""
    limits, tokens, time = [], 0, 0.0
    for _ in range(steps):
      limit = int(controller.limits(self.view()).max())
      for row in self.rows:
        accepted = 0
        while accepted < limit and self.random.random() < rate:
          accepted += 1
        tokens += accepted + 1
        if limit:
          row.add(limit, accepted, limit, cut=limit < 7)
          self.everyone.add(limit, accepted, limit, cut=limit < 7)
      self.idle = 0 if limit else self.idle + 1
      limits.append(limit)
      time += seconds[limit]
      self.costs.add(len(self.rows), 256, limit, limit + 1, seconds[limit])
    return np.array(limits), tokens / time

  def view(self):
    return control.View(rows=self.rows, everyone=self.everyone, batch=len(self.rows), slots=256, most=7, limits=LIMITS,
                        costs=self.costs, idle=self.idle)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.7, 0.95])
def test_goodput_is_near_the_best_fixed_limit(rate, scale):
  """SmartSpec: the limit with most tokens a second, plain decoding included."""
  seconds = scaled(SECONDS, scale)
  fixed = [Traffic().run(control.Fixed(limit), 600, rate, seconds)[1] for limit in LIMITS]
  traffic, controller = Traffic(), control.Goodput()
  traffic.run(controller, 100, rate, seconds)
  assert traffic.run(controller, 600, rate, seconds)[1] >= 0.94 * max(fixed)


@pytest.mark.parametrize("scale", SCALES)
def test_drafting_is_given_up_and_comes_back(scale):
  """A gate that never opened again was TensorRT-LLM's; traffic changes."""
  traffic, controller = Traffic(), control.Goodput(probe=8, longest=32)
  limits, _ = traffic.run(controller, 300, 0.0, scaled(SECONDS, scale))
  assert (limits[50:] == 0).mean() > 0.8 and limits[50:].any(), "off, but for probes"
  limits, _ = traffic.run(controller, 200, 0.9, scaled(SECONDS, scale))
  assert (limits[100:] == 7).mean() > 0.8, "but for a plain step now and then, by which it is judged"


def test_a_batch_of_another_size_is_learnt_anew():
  """Times of 16 rows say little of one row's: plain decoding is still found."""
  controller, traffic = control.Goodput(), Traffic(rows=16)
  traffic.run(controller, 100, 0.5, {0: 0.06, 3: 0.09, 7: 0.13})
  traffic.rows = traffic.rows[:1]
  limits, _ = traffic.run(controller, 300, 0.0, {0: 0.02, 3: 0.026, 7: 0.036})
  assert (limits[100:] == 0).mean() > 0.8


def test_dearer_steps_turn_drafting_down():
  traffic, controller = Traffic(), control.Goodput()
  assert np.bincount(traffic.run(controller, 200, rate=0.6)[0][50:], minlength=8).argmax() > 0
  dear = {0: 1.0, 3: 2.5, 7: 4.0}
  assert (traffic.run(controller, 300, 0.6, dear)[0][100:] == 0).mean() > 0.8


def test_fixed_and_table():
  view = Traffic(rows=3).view()
  assert control.Fixed().limits(view).tolist() == [7, 7, 7] and control.Fixed(2).limits(view).tolist() == [2, 2, 2]
  table = control.Table({2: 7, 4: 3})
  assert table.limits(view).tolist() == [3, 3, 3]
  assert table.limits(Traffic(rows=2).view()).tolist() == [7, 7]
  assert table.limits(Traffic(rows=5).view()).tolist() == [0] * 5


def test_the_gate_is_per_row_and_opens_again():
  traffic, gate = Traffic(), control.Gate(threshold=0.3, probe=8)
  for _ in range(30):
    traffic.rows[0].add(7, 0, 7)
    traffic.rows[1].add(7, 6, 7)
  limits = np.array([gate.limits(traffic.view()) for _ in range(16)])
  assert (limits[:, 1] == 7).all() and (limits[:, 0] == 7).sum() == 2
  for _ in range(10):
    traffic.rows[0].add(7, 7, 7)
  assert gate.limits(traffic.view()).tolist() == [7, 7]


def test_the_budget_goes_to_those_most_likely_to_survive():
  traffic = Traffic(rows=3)
  for _ in range(50):
    for row, accepted in zip(traffic.rows, (7, 4, 0)):
      row.add(7, accepted, 7)
  limits = control.Budget(tokens=9).limits(traffic.view())
  assert limits.sum() == 9 and limits[0] == 7 and limits[0] > limits[1] > limits[2]
  assert control.Budget(tokens=1000, least=0.5).limits(traffic.view()).tolist()[2] == 0
  assert control.Budget(tokens=0).limits(traffic.view()).sum() == 0


def test_costs_carry_over_to_shapes_that_were_not_measured():
  costs = costs_lib.Costs(WIDTHS)
  assert costs.under(1, 256, 7) > costs.under(1, 256, 0), "before anything is known a node costs something"
  for limit, seconds in ((0, 1.0), (7, 1.5)):
    costs.add(2, 256, limit, limit + 1, seconds)
  costs.add(4, 256, 0, 1, 2.0)
  assert costs.under(4, 256, 7) == pytest.approx(3.0), "the ratio of the nearest batch"
  assert (np.diff(costs.of_widths(2, 256)) >= 0).all()
  costs.add(2, 256, 7, 8, 100.0)
  for _ in range(3):
    costs.add(2, 256, 7, 8, 1.5)
  assert costs.under(2, 256, 7) == 1.5, "one slow step moves no median"


@pytest.mark.parametrize("make", [
    lambda: control.Fixed(-1), lambda: control.Table({}), lambda: control.Table({0: 1}), lambda: control.Gate(1.5),
    lambda: control.Goodput(probe=0), lambda: control.Goodput(price=0), lambda: control.Goodput(probe=9, longest=8),
    lambda: control.Budget(-1)])
def test_settings_out_of_range_are_refused(make):
  with pytest.raises(ValueError, match="="):
    make()
