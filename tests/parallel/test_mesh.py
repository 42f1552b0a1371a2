"""Meshes from flags, and rules that say where arrays lie on them."""
import jax
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from specjax.parallel import axes
from specjax.parallel import mesh as mesh_lib
from specjax.parallel import rules as rules_lib
import every_proposer
import many_devices


def test_a_mesh_is_read_from_a_flag():
  assert mesh_lib.parse("data:2,model:4") == {"data": 2, "model": 4}
  assert mesh_lib.parse(" expert:2 , fsdp:1 ") == {"expert": 2, "fsdp": 1}


@pytest.mark.parametrize("text, said", [
    ("", "is empty"), ("rows:2", "'rows' is no axis of a mesh; allowed are data, fsdp, expert, model"),
    ("data:0", "'data:0' must be axis:size"), ("data", "'data' must be axis:size"), ("data:two", "must be axis:size"),
    ("data:2,data:4", "'data' stands twice")])
def test_what_is_no_mesh_is_refused(text, said):
  with pytest.raises(ValueError, match=said):
    mesh_lib.parse(text)


def test_a_mesh_of_another_size_than_there_are_devices_says_how_to_have_them():
  with pytest.raises(ValueError, match="has 8 devices, and there are 1.*force_host_platform_device_count=8"):
    mesh_lib.make("data:2,model:4", jax.devices()[:1])


@many_devices.on(8)
def test_axes_that_are_not_named_have_one_device():
  mesh = mesh_lib.make("model:4,data:2")
  assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "expert": 1, "model": 4}
  with pytest.raises(ValueError, match="mesh=data:3 has 3 devices, and there are 8"):
    mesh_lib.make("data:3")


@many_devices.on(8)
def test_a_rule_divides_what_divides_and_notes_the_rest_once():
  mesh, notes = mesh_lib.make("data:2,model:4"), []
  spec = lambda names, shape, rules=rules_lib.TENSOR: rules.spec(names, shape, mesh, "a weight", notes)
  assert spec(("heads", "embed"), (8, 6)) == PartitionSpec("model", None)
  assert spec(("vocab", "embed"), (10, 6)) == spec(("vocab", "embed"), (10, 6)) == PartitionSpec(None, None)
  assert notes == ["a weight: vocab of 10 cannot be divided among 4 devices of the mesh axis model, so every device "
                   "keeps all of it"]
  # Two axes of one array cannot lie on one axis of a mesh: the first has it.
  assert spec(("heads", "mlp"), (8, 8)) == PartitionSpec("model", None)
  training = rules_lib.TRAINING
  assert spec(("batch", None), (8, 3), training) == PartitionSpec(("data", "fsdp"), None)
  assert spec(("mlp", "embed"), (8, 6), training) == PartitionSpec("model", None)  # fsdp has one device here
  strict = rules_lib.Rules(training.pairs, required=("vocab",))
  with pytest.raises(ValueError, match="vocab of 10 cannot be divided among 4 devices.*the rules require it"):
    spec(("vocab", "embed"), (10, 6), strict)


def test_every_weight_of_every_target_and_drafter_has_names():
  """A weight that is new must be given its axes, or it would lie whole on every device without a word."""
  unnamed, weights = set(), ("Weights", "Layer", "Head", "Prefix", "Joining")
  for entry in every_proposer.ENTRIES:
    for tree in (entry.target, entry.proposer):
      for kind, field, x in axes.leaves(tree):
        if kind.endswith(weights) and axes.names(kind, field, np.ndim(x), 0) is None:
          unnamed.add((kind, field))
  assert not unnamed


def test_leaves_come_in_the_order_of_jax():
  for entry in every_proposer.ENTRIES:
    ours = [x for *_, x in axes.leaves({"target": entry.target, "proposer": entry.proposer})]
    theirs = jax.tree.leaves({"target": entry.target, "proposer": entry.proposer})
    assert len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs))
