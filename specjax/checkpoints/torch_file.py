"""Reads PyTorch's zip checkpoints (`pytorch_model.bin`, `medusa_lm_head.pt`) without PyTorch, and runs nothing in them.

Such a file is a zip archive, nothing in it compressed: `<name>/data.pkl`, a pickle of the state dict, and the bytes of
every storage under `<name>/data/<key>`. A pickle is a program that may call whatever it can name. The few names that a
plain state dict needs are answered here with functions that only note what was asked for; every other name is refused.
Formats of PyTorch since 1.6; https://docs.pytorch.org/docs/stable/notes/serialization.html.
"""
import io
import math
import pathlib
import pickle
import pickletools
import zipfile

import ml_dtypes
import numpy as np

from specjax.checkpoints.errors import CheckpointError

_STORAGES = {
  "FloatStorage": np.dtype(np.float32), "HalfStorage": np.dtype(np.float16),
  "BFloat16Storage": np.dtype(ml_dtypes.bfloat16), "LongStorage": np.dtype(np.int64),
  "IntStorage": np.dtype(np.int32), "BoolStorage": np.dtype(np.bool_),
}
# What files of PyTorch before 1.6 begin with: a pickle of the format's magic number.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def read_torch_file(path) -> dict[str, np.ndarray]:
  """The tensors of a state dict: name -> read-only array; tensors that share a storage share memory.

  Raises:
    CheckpointError: the file is absent, damaged, of another format, or names anything that a state dict of float32,
      float16, bfloat16, int64, int32 and bool tensors does not need; or a tensor reaches beyond its storage.
  """
  path = pathlib.Path(path)
  try:
    with open(path, "rb") as file:
      start = file.read(len(_LEGACY))
      if start == _LEGACY:
        raise CheckpointError(f"{path}: is in the format of PyTorch before 1.6, which is not supported: read it with "
                              "PyTorch and save its tensors as safetensors")
      with zipfile.ZipFile(file) as archive:
        return _read(path, archive)
  except CheckpointError:
    raise
  except OSError as error:
    raise CheckpointError(f"{path}: cannot be read ({error})") from error
  except Exception as error:  # a damaged archive raises BadZipFile, and now and then something else
    found = "is damaged or truncated" if start[:2] == b"PK" else "is not a zip checkpoint of PyTorch"
    raise CheckpointError(f"{path}: {found} ({error}); download it again, or save its tensors as safetensors"
                          ) from error


def _read(path, archive) -> dict[str, np.ndarray]:
  programs = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
  if len(programs) != 1:
    raise CheckpointError(f"{path}: holds {len(programs)} pickles called data.pkl where a checkpoint of PyTorch holds "
                          "one; save its tensors as safetensors")
  records = _Records(path, archive, programs[0].removesuffix("data.pkl"))
  try:
    if records.get("byteorder", b"little") != b"little":
      raise CheckpointError(f"{path}: its byte order is {records.get('byteorder')!r}; only b'little' is supported: "
                            "save its tensors as safetensors")
    state = _Unpickler(path, records).load()
  except (CheckpointError, zipfile.BadZipFile):
    raise
  except Exception as error:  # a damaged pickle raises nearly anything
    raise CheckpointError(f"{path}: its data.pkl cannot be read ({type(error).__name__}: {error}); download it again, "
                          "or save its tensors as safetensors") from error
  if not isinstance(state, dict):
    raise CheckpointError(f"{path}: holds {type(state).__name__}; a state dict (name -> tensor) is expected")
  for name, value in state.items():
    if not isinstance(name, str) or not _holds(value, np.ndarray):
      raise CheckpointError(f"{path}: entry {name!r} is {type(value).__name__}; a state dict holds tensors alone: save "
                            "the dictionary of tensors that is inside")
  return {name: value.value for name, value in state.items()}


class _Records:
  """The archive's entries, as bytes."""

  def __init__(self, path, archive, root):
    self._path, self._archive, self._root = path, archive, root

  def get(self, name: str, default: bytes | None = None) -> bytes:
    try:
      info = self._archive.getinfo(self._root + name)
    except KeyError as error:
      if default is not None:
        return default
      raise CheckpointError(f"{self._path}: has no entry {name!r}, which its data.pkl refers to; download it again"
                            ) from error
    if info.compress_type != zipfile.ZIP_STORED:
      # PyTorch never compresses; a small file could otherwise unpack to any size.
      raise CheckpointError(f"{self._path}: entry {name!r} is compressed, as PyTorch writes none; save it again")
    return self._archive.read(info)


class _Sealed:
  """What a pickle may pass on, and call if it is a function, but neither look into nor change."""
  __slots__ = ("value",)

  def __init__(self, value):
    self.value = value

  def __call__(self, *args):
    return self.value(*args)

  def __setstate__(self, state):
    raise TypeError("the pickle tries to change what it was given")


def _holds(x, kind) -> bool:
  return isinstance(x, _Sealed) and isinstance(x.value, kind)


class _StateDict(dict):
  """Stands for collections.OrderedDict; what modules hang on theirs (`_metadata`) is dropped."""

  def __setstate__(self, state):
    del state


class _Unpickler(pickle.Unpickler):
  """Knows six storages, two ways to build a tensor, and the dictionary."""

  def __init__(self, path, records):
    program = records.get("data.pkl")
    for code, place, _ in pickletools.genops(program):
      # Python makes a table up to the greatest place that is named, whatever its size.
      if code.name.endswith("PUT") and place > len(program):
        raise CheckpointError(f"{path}: its data.pkl keeps something in place {place}, and has {len(program)} bytes; "
                              "download it again")
    super().__init__(io.BytesIO(program))
    self._path, self._records, self._storages = path, records, {}
    self._known = {("collections", "OrderedDict"): _StateDict, ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
                   ("torch._utils", "_rebuild_parameter"): lambda tensor, *others: tensor}
    self._known |= {("torch", name): dtype for name, dtype in _STORAGES.items()}

  def find_class(self, module, name):
    if (module, name) in self._known:
      return _Sealed(self._known[module, name])
    if name.endswith("Storage"):
      raise CheckpointError(f"{self._path}: a tensor is stored as {module}.{name}, which is not supported (supported: "
                            f"{', '.join(_STORAGES)}): save it in one of these types")
    raise CheckpointError(f"{self._path}: its data.pkl asks for {module}.{name}, which no state dict needs and which "
                          "may run code; nothing was run. If you trust the file, save its tensors as safetensors")

  def persistent_load(self, pid):
    """A storage as a flat array, of ("storage", type, key, device, number of elements)."""
    kind, key, count = pid[1], pid[2], pid[4]
    if pid[0] != "storage" or not _holds(kind, np.dtype) or not isinstance(key, str) or type(count) is not int:
      raise CheckpointError(f"{self._path}: {pid!r} is no reference to a storage; download the file again")
    dtype = kind.value
    if key not in self._storages:
      data = self._records.get(f"data/{key}")
      if len(data) != count * dtype.itemsize:
        raise CheckpointError(f"{self._path}: storage {key!r} has {len(data)} bytes, and {count} elements of {dtype} "
                              f"need {count * dtype.itemsize}; download the file again")
      if dtype == np.bool_ and data.strip(b"\x00\x01"):
        raise CheckpointError(f"{self._path}: storage {key!r} is of type bool and holds bytes other than 0 and 1; "
                              "download the file again")
      self._storages[key] = np.frombuffer(data, dtype)
    storage = self._storages[key]
    if (storage.dtype, storage.size) != (dtype, count):
      raise CheckpointError(f"{self._path}: storage {key!r} is referred to as two types or sizes; download the file "
                            "again")
    return _Sealed(storage)

  def _tensor(self, storage, offset, size, stride, *others):
    """torch._utils._rebuild_tensor_v2: a view into a storage. Gradients, hooks and metadata are dropped."""
    del others
    if not _holds(storage, np.ndarray) or not all(type(n) is int and n >= 0 for n in (offset, *size, *stride)):
      raise CheckpointError(f"{self._path}: a tensor of size {size!r}, stride {stride!r} and offset {offset!r} makes "
                            "no sense; download the file again")
    flat, count = storage.value, math.prod(size)
    if not count:
      return _Sealed(np.empty(size, flat.dtype))
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    # The number of elements as well: a stride of 0 reaches no further and would still blow up to any size.
    if last >= flat.size or count > flat.size:
      raise CheckpointError(f"{self._path}: a tensor of size {size!r}, stride {stride!r} and offset {offset} does not "
                            f"fit into its storage of {flat.size} elements; download the file again")
    return _Sealed(np.lib.stride_tricks.as_strided(flat[offset:], size, [n * flat.itemsize for n in stride],
                                                   writeable=False))
