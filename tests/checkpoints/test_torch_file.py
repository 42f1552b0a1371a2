"""Files of PyTorch, read without it: what a state dict may hold, and that nothing in a file is ever run."""
import io
import os
import pathlib
import pickle
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest

import head_files as files
from specjax.checkpoints import CheckpointError
from specjax.checkpoints import torch_file

TYPES = {"FloatStorage": np.float32, "HalfStorage": np.float16, "BFloat16Storage": ml_dtypes.bfloat16,
         "LongStorage": np.int64, "IntStorage": np.int32, "BoolStorage": np.bool_}


def op(name, *args):
  """A pickle that calls `module name` with what other pickles push."""
  module, function = name.rsplit(".", 1)
  return b"c" + f"{module}\n{function}\n".encode() + b"(" + b"".join(args) + b"tR"


def push(value):
  """What pushes a string, a whole number, a bool or a tuple of them."""
  if isinstance(value, str):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data
  if isinstance(value, bool):
    return b"\x88" if value else b"\x89"
  if isinstance(value, int):
    return b"J" + struct.pack("<i", value)
  return b"(" + b"".join(map(push, value)) + b"t"


def storage(kind, key, count):
  """A reference to a storage, as PyTorch writes it."""
  return b"(" + push("storage") + f"ctorch\n{kind}\n".encode() + push(key) + push("cpu") + push(count) + b"tQ"


EMPTY = op("collections.OrderedDict")


def tensor(kind, key, count, *, offset=0, size, stride):
  return op("torch._utils._rebuild_tensor_v2", storage(kind, key, count), push(offset), push(size), push(stride),
            push(False), EMPTY)


def state(entries):
  """The pickle of {name: what the value's pickle pushes}."""
  return b"\x80\x02}(" + b"".join(push(name) + value for name, value in entries.items()) + b"u."


def write(path, program, storages=None, *, root="archive", extra=None, compression=zipfile.ZIP_STORED):
  """A file in PyTorch's layout."""
  with zipfile.ZipFile(path, "w", compression) as archive:
    archive.writestr(f"{root}/data.pkl", program)
    for name, data in ({"byteorder": b"little", "version": b"3\n"} if extra is None else extra).items():
      archive.writestr(f"{root}/{name}", data)
    for key, array in (storages or {}).items():
      archive.writestr(f"{root}/data/{key}", array.tobytes())
  return path


@pytest.fixture
def path(tmp_path):
  return tmp_path / "file.pt"


@pytest.mark.parametrize("kind", TYPES)
def test_storages_views_and_parameters(path, kind):
  flat = np.arange(12).astype(TYPES[kind])
  entries = {
      "whole": tensor(kind, "0", 12, size=(3, 4), stride=(4, 1)),
      "turned": tensor(kind, "0", 12, size=(4, 3), stride=(1, 4)),
      "inner": tensor(kind, "0", 12, offset=5, size=(2, 2), stride=(4, 1)),
      "scalar": tensor(kind, "0", 12, offset=7, size=(), stride=()),
      "none": tensor(kind, "0", 12, size=(0, 3), stride=(3, 1)),
      "own": op("torch._utils._rebuild_parameter", tensor(kind, "1", 2, size=(2,), stride=(1,)), push(True), EMPTY)}
  found = torch_file.read_torch_file(write(path, state(entries), {"0": flat, "1": flat[:2]}))
  wanted = {"whole": flat.reshape(3, 4), "turned": flat.reshape(3, 4).T, "inner": flat[[[5, 6], [9, 10]]],
            "scalar": flat[7], "none": np.empty((0, 3), TYPES[kind]), "own": flat[:2]}
  assert list(found) == list(wanted)
  for name, value in wanted.items():
    assert found[name].dtype == TYPES[kind] and found[name].shape == value.shape
    np.testing.assert_array_equal(found[name], value)
  assert np.shares_memory(found["whole"], found["inner"]) and not found["whole"].flags.writeable


def test_files_that_pytorch_wrote():
  found = torch_file.read_torch_file(files.HEADS / "eagle3_safeailab" / "pytorch_model.bin")
  assert {value.dtype.name for value in found.values()} == {"float16", "int64", "bool"}
  assert (found["d2t"] + np.arange(8)).tolist() == np.flatnonzero(found["t2d"]).tolist() == [0, 3, 4, 9, 10, 11, 17, 19]
  # A module's state dict, with what modules hang on it, and views, parameters and bfloat16.
  found = torch_file.read_torch_file(files.HEADS / "torch_module.pt")
  assert sorted(found) == ["bias", "turned", "weight"]
  np.testing.assert_array_equal(found["weight"], np.arange(6).reshape(2, 3))
  np.testing.assert_array_equal(found["turned"], np.arange(6).reshape(2, 3).T)
  assert found["bias"].dtype == ml_dtypes.bfloat16 and found["bias"].tolist() == [0.5, -2.0]


def test_nothing_in_a_file_is_run(path):
  mark = path.with_name("mark")

  class Evil:
    def __init__(self, function, *args):
      self.call = function, args

    def __reduce__(self):
      return self.call

  programs = {
      r"(posix|nt).system": pickle.dumps({"a": Evil(os.system, f"touch {mark}")}, protocol=2),
      "builtins.eval": pickle.dumps(Evil(eval, f"open({str(mark)!r}, 'w')"), protocol=4),
      "__builtin__.exec": pickle.dumps({"a": Evil(exec, f"open({str(mark)!r}, 'w')")}, protocol=0),
      "builtins.getattr": pickle.dumps(Evil(getattr, "a", "b"), protocol=4),
      "io.open": pickle.dumps(Evil(io.open, str(mark), "w"), protocol=2),
      "torch.hub.load": state({"a": op("torch.hub.load", push("x"))}),
      "torch.storage._load_from_bytes": state({"a": op("torch.storage._load_from_bytes", push("x"))}),
      "torch._utils._rebuild_tensor_v2.__globals__": b"\x80\x04" + push("torch._utils") +
      push("_rebuild_tensor_v2.__globals__") + b"\x93.",
      "os.system": b"\x80\x02(" + push(f"touch {mark}") + b"ios\nsystem\n.",
  }
  for name, program in programs.items():
    with pytest.raises(CheckpointError, match=f"its data.pkl asks for {name}, .*nothing was run"):
      torch_file.read_torch_file(write(path, program))
  assert not mark.exists()


@pytest.mark.parametrize("program", [
  b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + push("state") + b"b.",  # changes what it was given
  b"\x80\x02ctorch._utils\n_rebuild_parameter\nN}(" + push("__defaults__") + push((1,)) + b"u\x86b.",
  b"\x80\x02" + tensor("FloatStorage", "0", 12, size=(12,), stride=(1,)) + push((1, 2)) + b"b.",
  b"\x80\x02" + tensor("FloatStorage", "0", 12, size=(12,), stride=(1,)) + push(0) + push(1) + b"s.",
  b"\x80\x02" + storage("FloatStorage", "0", 12) + push(0) + push(1) + b"s.",
  b"\x80\x02ctorch\nFloatStorage\n)R.",
  b"\x80\x02}(" + push("a"), b"", b"\x80\x02.", b"\x80\x02" + push(1) + b"Q."])
def test_nothing_is_changed_and_damage_is_named(path, program):
  with pytest.raises(CheckpointError, match="its data.pkl cannot be read"):
    torch_file.read_torch_file(write(path, program, {"0": np.zeros(12, np.float32)}))


@pytest.mark.parametrize("offset, size, stride", [
  (0, (3, 5), (4, 1)), (1, (12,), (1,)), (12, (1,), (1,)), (0, (4, 4), (4, 1)), (0, (2, 7), (6, 1)),
  (0, (1 << 30,), (1,)), (0, (1 << 30, 1 << 30), (0, 0)), (0, (13,), (0,)), (1 << 30, (1,), (1,))])
def test_a_tensor_must_fit_into_its_storage(path, offset, size, stride):
  program = state({"a": tensor("FloatStorage", "0", 12, offset=offset, size=size, stride=stride)})
  with pytest.raises(CheckpointError, match="does not fit into its storage of 12 elements"):
    torch_file.read_torch_file(write(path, program, {"0": np.zeros(12, np.float32)}))


@pytest.mark.parametrize("offset, size, stride", [
  (-1, (1,), (1,)), (0, (-1,), (1,)), (0, (2,), (-1,)), (0, ("2",), (1,)), (0, (True,), (1,))])
def test_sizes_are_whole_numbers_from_0(path, offset, size, stride):
  program = state({"a": tensor("FloatStorage", "0", 12, offset=offset, size=size, stride=stride)})
  with pytest.raises(CheckpointError, match="makes no sense"):
    torch_file.read_torch_file(write(path, program, {"0": np.zeros(12, np.float32)}))


def test_storages_must_be_as_they_are_said_to_be(path):
  def read(entries, storages):
    return torch_file.read_torch_file(write(path, state(entries), storages))

  one = {"a": tensor("FloatStorage", "0", 12, size=(12,), stride=(1,))}
  with pytest.raises(CheckpointError, match="storage '0' has 44 bytes, and 12 elements of float32 need 48"):
    read(one, {"0": np.zeros(11, np.float32)})
  with pytest.raises(CheckpointError, match="has no entry 'data/0'"):
    read(one, {"1": np.zeros(12, np.float32)})
  with pytest.raises(CheckpointError, match="is referred to as two types or sizes"):
    read(one | {"b": tensor("IntStorage", "0", 12, size=(12,), stride=(1,))}, {"0": np.zeros(12, np.float32)})
  with pytest.raises(CheckpointError, match="of type bool and holds bytes other than 0 and 1"):
    read({"a": tensor("BoolStorage", "0", 3, size=(3,), stride=(1,))}, {"0": np.array([0, 2, 1], np.uint8)})
  with pytest.raises(CheckpointError, match="stored as torch.DoubleStorage, which is not supported .supported: Float"):
    read({"a": tensor("DoubleStorage", "0", 3, size=(3,), stride=(1,))}, {"0": np.zeros(3)})


def test_a_small_file_cannot_ask_for_much_memory(path):
  with pytest.raises(CheckpointError, match="keeps something in place 4000000000, and has 10 bytes"):
    torch_file.read_torch_file(write(path, b"\x80\x02]r" + struct.pack("<I", 4_000_000_000) + b".N"))


def test_a_state_dict_holds_tensors_alone(path):
  inner = tensor("FloatStorage", "0", 2, size=(2,), stride=(1,))
  for program, why in ((state({"epoch": push(3)}), "entry 'epoch' is int; a state dict holds tensors alone"),
                       (state({"model": b"}" + push("a") + inner + b"s"}), "entry 'model' is dict"),
                       (b"\x80\x02" + inner + b".", "a state dict .name -> tensor. is expected"),
                       (state({"f": b"ctorch\nFloatStorage\n"}), "entry 'f' is ")):
    with pytest.raises(CheckpointError, match=why):
      torch_file.read_torch_file(write(path, program, {"0": np.zeros(2, np.float32)}))


def test_archives_that_are_no_checkpoints(path):
  good = state({"a": tensor("FloatStorage", "0", 2, size=(2,), stride=(1,))})
  data = {"0": np.zeros(2, np.float32)}
  with pytest.raises(CheckpointError, match="entry 'data.pkl' is compressed"):
    torch_file.read_torch_file(write(path, good, data, extra={}, compression=zipfile.ZIP_DEFLATED))
  with pytest.raises(CheckpointError, match="its byte order is b'big'; only b'little'"):
    torch_file.read_torch_file(write(path, good, data, extra={"byteorder": b"big"}))
  assert torch_file.read_torch_file(write(path, good, data, root="x", extra={"version": b"3"}))["a"].tolist() == [0, 0]
  with zipfile.ZipFile(path, "a") as archive:
    archive.writestr("y/data.pkl", good)
  with pytest.raises(CheckpointError, match="holds 2 pickles called data.pkl"):
    torch_file.read_torch_file(path)


def test_truncated_and_damaged_files(path):
  source = (files.HEADS / "eagle3_safeailab" / "pytorch_model.bin").read_bytes()
  for size in (100, len(source) // 2, len(source) - 1):
    path.write_bytes(source[:size])
    with pytest.raises(CheckpointError, match="is damaged or truncated .*download it again"):
      torch_file.read_torch_file(path)
  numbers = np.arange(1000, dtype=np.float32)
  program = state({"a": tensor("FloatStorage", "0", 1000, size=(1000,), stride=(1,))})
  whole = write(path, program, {"0": numbers}).read_bytes()
  at = whole.index(numbers.tobytes()) + 100
  path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
  with pytest.raises(CheckpointError, match="is damaged or truncated .Bad CRC-32 .*download it again"):
    torch_file.read_torch_file(path)


def test_other_files(path):
  path.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.")
  with pytest.raises(CheckpointError, match="in the format of PyTorch before 1.6, .*save its tensors as safetensors"):
    torch_file.read_torch_file(path)
  path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
  with pytest.raises(CheckpointError, match="is not a zip checkpoint of PyTorch"):
    torch_file.read_torch_file(path)
  for missing in (path.with_name("nothing"), pathlib.Path(path.parent)):
    with pytest.raises(CheckpointError, match="cannot be read"):
      torch_file.read_torch_file(missing)
