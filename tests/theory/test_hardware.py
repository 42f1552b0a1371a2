"""The table of accelerators, names of slices, and the closed forms of their networks."""
import math

import pytest

from specjax.theory import hardware

V5P, H100 = hardware.find("v5p-32"), hardware.find("8xh100")


@pytest.mark.parametrize("name, chips, shape", [
    ("v5p-32", 16, (2, 2, 4)), ("v5p-8", 4, (2, 2, 1)), ("v4-128", 64, (4, 4, 4)), ("v5e-16", 16, (4, 4)),
    ("v5litepod-4", 4, (2, 2)), ("V6E-8", 8, (2, 4)), ("trillium-256", 256, (16, 16)), ("8xh100", 8, (8,)),
    ("h200", 1, (1,)), ("v5p", 1, (1, 1, 1))])
def test_slices_by_name(name, chips, shape):
  """The number of a v4 or v5p counts cores, two a chip; that of a v5e or v6e counts chips."""
  found = hardware.find(name)
  assert (found.devices, found.shape) == (chips, shape)


@pytest.mark.parametrize("name, message", [
    ("h1000", "known are a100-80gb"), ("v5p-16x", "not known"), ("v5p-6", "v5p-8, v5p-16, v5p-32.*counts cores"),
    ("v6e-12", "no slice of v6e"), ("16xh100", "at most 8"), ("4xv5p", "such as v5p-8"), ("0xh100", "not known"),
    ("h100-8", "not known"), ("", "not known")])
def test_unknown_names(name, message):
  with pytest.raises(ValueError, match=message):
    hardware.find(name)


@pytest.mark.parametrize("name, tokens", [("a100-80gb", 153), ("h100", 295), ("h200", 206), ("b200", 281), ("v4", 229),
                                          ("v5e", 241), ("v5p", 166), ("v6e", 560)])
def test_ridges_are_those_of_the_literature(name, tokens):
  """Tokens from which a product of 16-bit weights is bound by arithmetic: peak * 2 / (2 * bandwidth)."""
  found = hardware.TABLE[name]
  assert found.flops / found.memory_bandwidth == pytest.approx(tokens, rel=5e-3)


def test_every_row_is_whole():
  for name, found in hardware.TABLE.items():
    assert found.name == name and ("datasheet" in found.source or "documentation" in found.source)
    assert 10e9 < found.memory_bytes < 300e9 and 1e11 < found.link_bandwidth < 1e12 < found.flops
    assert all(math.prod(shape) == chips and len(shape) == found.links // 2 for chips, shape in found.shapes.items())


def test_links_and_hops_of_a_torus():
  """A v5p slice below a cube is open: its corner has one link along each axis. A whole cube is closed."""
  assert (V5P.links((2, 2, 4)), V5P.hops((2, 2, 4))) == (3, 5)
  cube = hardware.find("v5p-128")
  assert (cube.links((4, 4, 4)), cube.hops((4, 4, 4))) == (6, 6)
  assert (cube.links((1, 4, 2)), cube.hops((1, 4, 2))) == (3, 3)  # a part of a closed axis is open
  pod = hardware.find("v5e-128")
  assert (pod.links((8, 16)), pod.hops((8, 16))) == (3, 15)       # only an axis of 16 is closed
  assert (H100.links((8,)), H100.hops((8,))) == (1, 1)


def test_a_mesh_is_laid_where_it_has_most_links():
  assert V5P.place([16]) == ((2, 2, 4),)
  assert V5P.place([8, 2]) == ((2, 2, 2), (1, 1, 2))
  assert V5P.place([4, 1, 4]) == ((1, 2, 2), (1, 1, 1), (2, 1, 2))
  assert H100.place([2, 4]) == ((2,), (4,))
  with pytest.raises(ValueError, match="axis of 3 cannot be laid over chips in 2x2x4"):
    V5P.place([3])
  with pytest.raises(ValueError, match="of which 1x1x1 are free"):
    V5P.place([16, 2])


def test_collectives_take_their_closed_forms():
  """16 chips over three links of 100 GB/s and five hops of 1 us; eight under a switch, 450 GB/s each."""
  assert V5P.all_gather_seconds((2, 2, 4), 32e6) == pytest.approx(32e6 * 15 / 16 / 300e9 + 5e-6)
  assert V5P.all_reduce_seconds((2, 2, 4), 32e6) == pytest.approx(2 * V5P.all_gather_seconds((2, 2, 4), 32e6))
  assert H100.all_reduce_seconds((8,), 32e6) == pytest.approx(2 * (32e6 * 7 / 8 / 450e9 + 5e-6))
  assert V5P.all_gather_seconds((2, 2, 4), 0) == pytest.approx(5e-6)
  assert V5P.all_reduce_seconds((1, 1, 1), 32e6) == H100.all_reduce_seconds((1,), 32e6) == 0
