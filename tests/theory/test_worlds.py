"""Two steps under the key schedule, exactly."""
import dataclasses

import jax
import numpy as np
import pytest

from specjax import decode
from specjax import drivers
from specjax import keys
from specjax import sampling
from specjax import verifiers
from specjax.testing import dummy
from specjax.testing import noisy
from specjax.theory import tables as tables_lib
from specjax.theory import worlds

pytestmark = pytest.mark.usefixtures("quick_compile")
REAL = worlds.real_schedule()


def first_two(result):
  return result.law.reshape(2, 2, -1).sum(-1)


@pytest.mark.parametrize("verifier", ["Rejection", "Block", "Traversal", "Point", "KSeq", "GreedyMulti"])
def test_real_schedule_is_exact(verifier):
  for tables in (tables_lib.toy("B", 5), tables_lib.random_tables(3, 2, 5)):
    result = worlds.text_law(getattr(verifiers, verifier)(), tables, 2, REAL)
    assert result.max_error < 1e-12 and result.expected_accepted > .4


@pytest.mark.parametrize("verifier", ["Block", "Traversal"])
def test_draft_noise_keyed_by_position_is_biased(verifier):
  result = worlds.text_law(getattr(verifiers, verifier)(), tables_lib.toy("B", 5), 2, worlds.drafts_by_position(REAL))
  np.testing.assert_allclose(first_two(result), [[1 / 9, 2 / 9], [5 / 18, 7 / 18]], atol=1e-12)


def test_but_not_under_rejection():
  result = worlds.text_law(verifiers.Rejection(), tables_lib.toy("B", 5), 2, worlds.drafts_by_position(REAL))
  assert result.max_error < 1e-12


def test_one_step_does_not_see_it():
  result = worlds.text_law(verifiers.Block(), tables_lib.toy("B", 2), 2, worlds.drafts_by_position(REAL), steps=1)
  assert result.max_error < 1e-12


def test_the_key_that_decides_must_not_draft():
  result = worlds.text_law(verifiers.Rejection(), tables_lib.toy("B", 5), 2, worlds.drafts_like_stops(REAL))
  assert result.max_error > .02 and first_two(result)[0, 0] == pytest.approx(0)  # 1/9 in the target


@dataclasses.dataclass(frozen=True)
class WrongPoint:
  """Follows the drafted child as the real rule does, but the new token is another draw than the last node's."""
  of_root: bool  # the root's draw; else the id after the last node's
  purposes = (keys.TOKEN,)

  def draw(self, logits, tree, params, mode, uniforms, depth):
    verdict = verifiers.Point().draw(logits, tree, params, mode, uniforms, depth)
    token = sampling.draw(logits, params, uniforms.token, mode)[:, 0] if self.of_root else (verdict.token + 1) % 2
    return verdict.replace(token=token)


@pytest.mark.parametrize("of_root", [True, False])
def test_a_wrong_point_rule_is_seen(of_root):
  result = worlds.text_law(WrongPoint(of_root), tables_lib.random_tables(3, 2, 5), 2, REAL)
  assert result.max_error > 1e-2


@pytest.fixture
def used(monkeypatch):
  """Labels of the keys that draws really take, by kind of draw, filled while a step runs."""
  found = {"_uniform": set(), "_exponentials": set()}
  for name, seen in found.items():
    def recording(key, *args, real=getattr(keys, name), seen=seen):
      jax.debug.callback(lambda data: seen.add(bytes(np.asarray(data))), jax.random.key_data(key))
      return real(key, *args)

    monkeypatch.setattr(keys, name, recording)
  return found


@pytest.mark.parametrize("verifier", ["Rejection", "Point"])
def test_two_steps_use_the_keys_of_the_schedule(verifier, used):
  target, drafter = dummy.DummyTarget(vocab=6), noisy.NoisySelf(parents=(0, 0, 1, 2))
  rule = getattr(verifiers, verifier)()
  state = drivers.start(target, drafter, [[1, 2, 3], [4, 5]], sampling.SamplingParams(temperature=1.0), verifier=rule,
                        key=jax.random.key(7), eos_ids=())
  schedules = [worlds.real_schedule(row) for row in state.keys]
  step = jax.jit(lambda state: decode.step(target, drafter, rule, state))  # a program of its own, that records
  roots = []
  for _ in range(2):
    roots.append(np.asarray(state.length - 1).tolist())
    for seen in used.values():
      seen.clear()
    state = jax.block_until_ready(step(state))
    jax.effects_barrier()
    rows = list(zip(schedules, roots[-1], strict=True))
    drafted = {row.draft(root, node) for row, root in rows for node in (1, 2, 3)}
    if verifier == "Point":  # one for the token behind every node of the chain
      decided = {row.token(root + place) for row, root in rows for place in (1, 2, 3, 4)}
    else:
      decided = {purpose(root) for row, root in rows for purpose in (row.stop, row.residual)}
    assert used == {"_exponentials": drafted, "_uniform": decided}
  assert all(after > before for before, after in zip(*roots, strict=True))


def test_labels_are_told_apart():
  labels = [f(root) for root in range(6) for f in (REAL.stop, REAL.residual, REAL.token)]
  labels += [REAL.draft(root, index) for root in range(6) for index in range(1, 4)]
  assert len(set(labels)) == len(labels)


def test_enumeration_of_a_shared_uniform():
  # Twice the same uniform under different laws: u < .5 and then u < .2, the rest of the first interval.
  program = lambda draw: (draw("u", np.array([.5, .5])), draw("u", np.array([.2, .8])), draw("v", np.array([.5, .5])))
  law = worlds.enumerate_worlds(program)
  expected = {(0, 0): .2, (0, 1): .3, (1, 1): .5}
  assert law == pytest.approx({(*pair, v): mass / 2 for pair, mass in expected.items() for v in (0, 1)})
