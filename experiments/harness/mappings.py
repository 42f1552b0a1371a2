"""How near a process is to the number of memory mappings that Linux allows it.

Every compiled program maps memory. A process may hold 65,530 mappings on a common Linux, and beyond them XLA ends the
process while it compiles, without a word. Many methods over prompts of many lengths get there.
"""
import pathlib

_MAPS = pathlib.Path("/proc/self/maps")
_MOST = pathlib.Path("/proc/sys/vm/max_map_count")
_SHARE = 0.95


def check(maps: pathlib.Path = _MAPS, most: pathlib.Path = _MOST) -> None:
  """Ends with a reason instead of a crash; does nothing where the system does not say.

  Raises:
    ValueError: nearly all mappings are held; says how many, and what to change.
  """
  if not (maps.exists() and most.exists()):
    return
  held, allowed = maps.read_bytes().count(b"\n"), int(most.read_text())
  if held > _SHARE * allowed:
    raise ValueError(f"compiled programs hold {held} of the {allowed} memory mappings that the system allows a process; "
                     "raise it as root (sysctl -w vm.max_map_count=1000000), or measure fewer methods, categories or "
                     "batch sizes at a time")
