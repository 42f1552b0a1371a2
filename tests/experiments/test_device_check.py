"""The device check: its figures hang together, a failing part stops no other, and what is synthetic says so."""
import dataclasses
import json
import types

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness import device_bounds
from experiments.harness import device_check
from experiments.harness import device_model
from experiments.harness import device_smoke
from experiments.harness import device_steps
from experiments.harness import device_table
import programs
from specjax import decode
from specjax import testing
from specjax import tree as tree_lib

LAW = (0.75, 0.5, 0.25)
SETTINGS = device_check.Settings(size="tiny", acceptance=LAW, seconds=600)


@pytest.fixture(scope="module")
def checked(quick_compile):
  """One whole run with two widths and a small vector, what was saved behind every part, and what was reported."""
  saved, lines = [], []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(device_steps, "WIDTHS", (1, 4))
    patch.setitem(device_check._CPU, "bytes", 2**22)
    found = device_check.Check(SETTINGS).run(lambda found: saved.append(json.dumps(found)), lines.append)
  return found, saved, lines


def test_every_part_is_there_and_was_saved_as_it_came(checked):
  found, saved, lines = checked
  parts = {name: part["status"] for name, part in found["parts"].items()}
  one = jax.device_count() == 1
  assert parts == dict.fromkeys(device_check.SHARES, "ok") | ({"collectives": "skipped"} if one else {})
  assert [len(json.loads(text)["parts"]) for text in saved] == list(range(1, len(parts) + 1))
  assert json.loads(saved[-1]) == json.loads(json.dumps(found))
  assert [line.split(":")[0] for line in lines] == list(parts)
  assert found["schema"] == 1 and found["settings"]["size"] == "tiny" and found["settings"]["dtype"] == "float32"


def test_everything_that_rests_on_random_weights_says_synthetic(checked):
  found, _, _ = checked
  for part in (found, *(found["parts"][name] for name in ("model", "widths", "speed"))):
    assert part["synthetic"].startswith("synthetic")
  text = device_table.render(found)
  assert "synthetic: random weights" in text.splitlines()[1]
  assert "synthetic speedup" in text and "synthetic acceptance 0.75, 0.5, 0.25" in text
  assert max(map(len, text.splitlines())) < 200


def test_exactness_holds_in_float32_and_is_told_of_in_bfloat16(checked):
  part = checked[0]["parts"]["exactness"]
  assert part["exact"]
  wrong, right = part["float32"]["always wrong"], part["float32"]["self"]
  assert (wrong["equal_rows"], right["equal_rows"]) == (3, 3)
  assert wrong["accepted"] == 0 < wrong["drafted"] and right["accepted"] == right["drafted"] > 0
  for line in part["bfloat16"].values():
    assert (line["first_difference_gap"] is None) == (line["equal_rows"] == 3)
    assert line["first_difference_gap"] is None or 0 <= line["first_difference_gap"] < 8 * line["step_of_the_type"]


def test_speed_stands_beside_its_bounds(checked):
  found = checked[0]["parts"]
  speed, read = found["speed"], found["speed"]["bytes_of_a_step"]
  assert read["weights"] == found["model"]["weight_bytes"]  # the embedding is the head
  c = device_model.CONFIGS["tiny"]
  assert read["cache"] == 2 * c.layers * c.kv_heads * c.head_width * 256 * 4  # the bucket's slots
  plain, ours = speed["arms"]["plain"], speed["arms"]["synthetic"]
  assert plain["tokens_per_step"] == 1 < ours["tokens_per_step"] <= 4
  for arm in (plain, ours):
    bound = arm["bounds"]["measured"]
    assert bound["tokens_per_second"] == pytest.approx(
        arm["tokens_per_step"] * found["bandwidth"]["measured"] / sum(read.values()))
    assert bound["share"] == pytest.approx(arm["tokens_per_second"] / bound["tokens_per_second"])
    assert arm["least"] <= arm["tokens_per_second"] <= arm["greatest"]
    assert "published" not in arm["bounds"]  # of this processor it is not known
  assert speed["expected_tokens_per_step"] == pytest.approx(1 + 0.75 + 0.375 + 0.09375)
  assert speed["speedup"] == pytest.approx(ours["tokens_per_second"] / plain["tokens_per_second"])
  ratio = found["widths"]["curve"][1]["ratio"]
  assert speed["predicted_speedup_of_free_drafts"] == pytest.approx(speed["expected_tokens_per_step"] / ratio)


def test_a_part_that_fails_stops_no_other(monkeypatch):
  check = device_check.Check(SETTINGS)
  def fails(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
  for module, name in ((device_smoke, "run"), (device_bounds, "bandwidth"), (device_model, "make")):
    monkeypatch.setattr(module, name, fails)
  monkeypatch.setattr(device_bounds, "collectives", lambda *_: {"status": "skipped", "reason": "none"})
  found = check.run(lambda _: None, lambda _: None)["parts"]
  assert {name: part["status"] for name, part in found.items()} == {
      "environment": "ok", "exactness": "error", "bandwidth": "error", "collectives": "skipped", "model": "error",
      "widths": "error", "speed": "error"}
  assert "RESOURCE_EXHAUSTED" in found["model"]["error"] and "fails" in found["model"]["trace"]
  assert "there is no model" in found["speed"]["error"]
  text = device_table.render(check.found)
  assert text.count("RESOURCE_EXHAUSTED") == 3


def test_a_difference_in_float32_is_a_failure(monkeypatch):
  """The target's own answer depends on how many tokens it is asked for, as a wrong mask would make it."""
  target = testing.DummyTarget(vocab=24)
  exact = device_smoke.compare(target, jnp.float32)
  assert all(line["exact"] for line in exact.values())

  @struct.dataclass
  class Wider(testing.DummyTarget):
    def logits(self, hidden):
      return super().logits(hidden + np.uint32(hidden.shape[1] > 1))

  lines = device_smoke.compare(Wider(vocab=24), jnp.float32)
  assert not lines["always wrong"]["exact"] and lines["always wrong"]["equal_rows"] == 0
  assert not lines["self"]["exact"] and lines["self"]["first_difference_gap"] > 0
  monkeypatch.setattr(device_smoke, "run", lambda: {"exact": False, "float32": lines, "bfloat16": exact})
  check = device_check.Check(SETTINGS)
  assert check._run_part("exactness", device_check.Clock(1))["status"] == "failed"


def test_time_that_is_up_leaves_things_out_and_says_which():
  ran = []
  timers = {name: (lambda name=name: ran.append(name) or len(ran)) for name in "abc"}
  assert device_steps.interleave(timers, 2, lambda: False) == {"a": [4, 7], "b": [5, 8], "c": [6, 9]}
  ran.clear()
  assert device_steps.interleave(timers, 5, lambda: len(ran) >= 2) == {"a": [3], "b": [4]}
  assert device_check.Clock(0).passed() and not device_check.Clock(60).passed()


def test_time_that_a_part_leaves_goes_to_the_next_ones(monkeypatch):
  now, given = [0.0], {}
  monkeypatch.setattr(device_check, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
  check = device_check.Check(dataclasses.replace(SETTINGS, seconds=109.0))

  def part(name, clock):
    given[name] = clock._end - now[0]
    now[0] += {"exactness": 60, "bandwidth": 40}.get(name, 0)
    return {"status": "ok"}

  monkeypatch.setattr(check, "_run_part", part)
  check.run(lambda _: None, lambda _: None)
  assert sum(device_check.SHARES.values()) == 109
  assert given["environment"] == 1 and given["exactness"] == pytest.approx(20 * 109 / 108)
  assert given["bandwidth"] == pytest.approx(49 * 5 / 88)
  assert given["speed"] == pytest.approx(9)


def test_the_tree_behind_the_width_curve_fills_its_width():
  context = types.SimpleNamespace(pending=jnp.array([3, 22]), length=jnp.array([5, 6]))
  target = testing.DummyTarget(vocab=24)
  for width in decode.WIDTHS:
    bush = device_steps.Bush(width)
    tree, _ = bush.propose(target, None, (), context, None)
    tree_lib.check(tree, 24)
    assert tree.size.tolist() == [width] * 2 and tree.tokens[:, 0].tolist() == [3, 22]
    deepest = int(tree_lib.depths(tree_lib.ancestors(tree.parents, width)).max())
    assert deepest == bush.max_depth == min(width - 1, 7)


def test_models_have_the_sizes_that_they_are_named_by():
  count = lambda name: device_model.weight_bytes(device_model.CONFIGS[name], jnp.bfloat16) / 2
  for name, published in {"135m": 134515008, "1b": 1235814400, "3b": 3212749824, "8b": 8030261248}.items():
    assert count(name) == published
  target = device_model.make(device_model.CONFIGS["tiny"], jnp.float32)
  matrices = [x for x in jax.tree.leaves(target) if x.ndim == 2]
  for x in matrices:
    assert float(x.std() * x.shape[1] ** 0.5) == pytest.approx(1, abs=0.1)
  assert len({float(x[0, 0]) for x in matrices}) == len(matrices)  # no two are one


def test_auto_takes_the_greatest_model_that_fits():
  choose = lambda memory, backend="gpu": device_model.choose("auto", memory, backend, jnp.dtype(jnp.bfloat16))
  assert [choose(gib * 2**30) for gib in (8, 15, 24, 80)] == ["1b", "3b", "8b", "8b"]
  assert choose(None) == "1b" and choose(None, "cpu") == "tiny"
  assert device_model.choose("8b", 1, "cpu", jnp.dtype(jnp.float32)) == "8b"


@pytest.mark.parametrize("kind, wanted", [
    ("NVIDIA H100 80GB HBM3", 3.35e12), ("NVIDIA H100 PCIe", 2.0e12), ("NVIDIA H200", 4.8e12),
    ("NVIDIA A100-SXM4-80GB", 2.039e12), ("NVIDIA A100-SXM4-40GB", 1.555e12), ("NVIDIA A10", 600e9),
    ("NVIDIA L4", 300e9), ("NVIDIA L40S", 864e9), ("TPU v5 lite", 819e9), ("TPU v5", 2.765e12), ("TPU v5p", 2.765e12),
    ("TPU v6 lite", 1.638e12), ("cpu", None), ("NVIDIA A1000", None)])
def test_published_bandwidths(kind, wanted):
  assert device_bounds.published(kind) == wanted


BAD = {
    "acceptance beyond 1": (["--acceptance=0.5,2"], ["acceptance", "2.0", "[0, 1]"]),
    "acceptance that is no number": (["--acceptance=high"], ["--acceptance=high", "0.8,0.7,0.6"]),
    "output that is there": (["--output={dir}/there.json"], ["there.json is there", "--overwrite"]),
    "output below a file": (["--output={dir}/there.json/x.json"], ["there.json is a file"]),
    "few draft bytes": (["--draft_bytes=3"], ["draft_bytes=3"]),
    "unknown size": (["--size=70b"], ["--size=70b", "8b"]),
    "no rows": (["--rows=0"], ["rows"]),
    "no output": (None, ["--output"]),
}
# The check itself is stood in for.
STUB = """
from experiments.harness import device_check, device_table
class Check:
  def __init__(self, settings):
    self.settings = settings
  def run(self, save, report):
    found = {"settings": repr(self.settings), "parts": {"exactness": {"status": "STATUS"}}}
    save(found)
    return found
device_check.Check = Check
device_table.render = lambda found: found["settings"]
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
  folder = tmp_path_factory.mktemp("device")
  (folder / "there.json").write_text("{}")
  flags = ["--size=8b", "--dtype=float32", "--acceptance=0.5,0.25", "--rows=2", "--draft_bytes=8", "--seconds=7"]
  ok = STUB.replace("STATUS", "ok")
  given = lambda args: [f"--output={folder}/new.json", *(arg.replace("{dir}", str(folder)) for arg in args)]
  cases = {name: ("device_check", [] if args is None else given(args), ok) for name, (args, _) in BAD.items()}
  for status in ("ok", "failed", "error"):
    cases[status] = ("device_check", [f"--output={folder}/made/{status}.json", *flags], STUB.replace("STATUS", status))
  cases["overwritten"] = ("device_check", [f"--output={folder}/there.json", "--overwrite"], ok)
  found = programs.run_all(cases.values(), env=programs.environment(tmp_path_factory))
  return dict(zip(cases, found, strict=True)) | {"folder": folder}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(ended, name):
  program = ended[name]
  assert program.code == 2 and "Traceback" not in program.err and not program.out
  for part in BAD[name][1]:
    assert part in program.message
  assert not (ended["folder"] / "new.json").exists()


def test_the_exit_code_says_whether_it_is_exact_and_every_flag_is_read(ended):
  assert [ended[status].code for status in ("ok", "failed", "error")] == [0, 1, 1]
  settings = ended["ok"].out.strip()
  assert settings == repr(device_check.Settings(size="8b", dtype="float32", acceptance=(0.5, 0.25), rows=2,
                                                draft_bytes=8, seconds=7.0))
  written = json.loads((ended["folder"] / "made" / "ok.json").read_text())
  assert written["settings"] == settings
  assert ended["overwritten"].code == 0 and "parts" in (ended["folder"] / "there.json").read_text()


def test_all_reduces_over_several_devices(tmp_path_factory):
  """Two forced devices, in a process of their own."""
  code = ("import json, jax.numpy as jnp; from experiments.harness import device_bounds as b; "
          "turns = iter([False, True, True, True]); "
          "print(json.dumps(b.collectives(64, jnp.float32, lambda: next(turns))))")
  env = programs.environment(tmp_path_factory)
  env["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
  done = programs.subprocess.run([programs.sys.executable, "-c", code], cwd=programs.ROOT, env=env, capture_output=True,
                                 text=True, timeout=120, check=True)
  found = json.loads(done.stdout)
  assert (found["devices"], found["dtype"], found["width"]) == (2, "float32", 64)
  assert [line["bytes"] for line in found["all_reduce"]] == [64 * 4, 8 * 64 * 4]
  assert all(0 < line["least"] <= line["microseconds"] <= line["greatest"] for line in found["all_reduce"])
  assert [line["rows"] for line in found["left_out"]] == [8, 32, 128]
