"""Token sequences to train on, in numbered files of a folder: a prompt and the target's own answer each, or plain text.

A file appears whole or not at all, so a run that was killed goes on behind the last one.

Letters: N sequences, L their tokens together.
"""
import dataclasses
import json
import os
import pathlib

import numpy as np

_META = "corpus.json"


@dataclasses.dataclass(frozen=True)
class Sequences:
  """Sequences of a file, side by side."""
  tokens: np.ndarray   # i32[L]
  offsets: np.ndarray  # i64[N + 1]; sequence n is tokens[offsets[n]:offsets[n + 1]]
  starts: np.ndarray   # i32[N]; tokens of the prompt; 0 for plain text
  inputs: np.ndarray | None = None         # i32[M]; what an encoder read, side by side; None without an encoder
  input_offsets: np.ndarray | None = None  # i64[N + 1]

  def __len__(self) -> int:
    return len(self.starts)

  def __getitem__(self, index: int) -> np.ndarray:
    return self.tokens[self.offsets[index]:self.offsets[index + 1]]

  def prompt(self, index: int) -> np.ndarray:
    """What sequence `index` answers, i32[]: an encoder's inputs, or its first tokens; none of plain text."""
    if self.inputs is not None:
      return self.inputs[self.input_offsets[index]:self.input_offsets[index + 1]]
    return self[index][:self.starts[index]]


def pack(sequences: list[tuple[list[int], int]], inputs: list[list[int]] | None = None) -> Sequences:
  """From pairs of token ids and prompt length; with an encoder's `inputs`, the first tokens are what its decoder begins
  with."""
  tokens, offsets = _joined([ids for ids, _ in sequences])
  read = {} if inputs is None else dict(zip(("inputs", "input_offsets"), _joined(inputs)))
  return Sequences(tokens=tokens, offsets=offsets, starts=np.asarray([start for _, start in sequences], np.int32), **read)


def _joined(rows):
  return (np.concatenate([np.asarray(ids, np.int32) for ids in rows]),
          np.concatenate([[0], np.cumsum([len(ids) for ids in rows])]).astype(np.int64))


def open_folder(folder, facts: dict) -> pathlib.Path:
  """The folder, made if need be, of a corpus with these `facts` (target, options).

  Raises:
    ValueError: the folder holds a corpus with other facts: a corpus is made with one command.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / _META
  if path.exists():
    known = json.loads(path.read_text())
    wrong = sorted(key for key in {*known, *facts} if known.get(key) != facts.get(key))
    if wrong:
      raise ValueError(f"{folder} holds a corpus that was begun with {wrong[0]}={known.get(wrong[0])!r}, not "
                       f"{facts.get(wrong[0])!r}; go on with the command that began it, or choose another folder")
  else:
    write_whole(path, lambda file: file.write(json.dumps(facts, indent=1).encode()))
  return folder


def facts(folder) -> dict:
  """What `open_folder` was told. Raises ValueError where there is no corpus."""
  path = pathlib.Path(folder) / _META
  if not path.exists():
    raise ValueError(f"{folder} holds no corpus ({_META} is missing); make one with experiments.write_training_data")
  return json.loads(path.read_text())


def path(folder, index: int) -> pathlib.Path:
  """Of file `index`."""
  return pathlib.Path(folder) / f"sequences-{index:05d}.npz"


def write(folder, index: int, sequences: Sequences) -> None:
  """File `index`, whole or not at all."""
  write_whole(path(folder, index), lambda file: np.savez(file, **{
      name: value for name, value in dataclasses.asdict(sequences).items() if value is not None}))


def read(folder, index: int) -> Sequences:
  """File `index`."""
  with np.load(path(folder, index)) as file:
    return Sequences(**{field.name: file[field.name] for field in dataclasses.fields(Sequences) if field.name in file})


def indices(folder) -> list[int]:
  """The files that are there, in order."""
  return sorted(int(name.stem.split("-")[1]) for name in pathlib.Path(folder).glob("sequences-*.npz"))


def write_whole(target: pathlib.Path, write) -> None:
  """Calls `write` with a file of another name in the same folder, which then takes the place of `target`."""
  partial = target.with_name(f".{target.name}.{os.getpid()}")
  with open(partial, "wb") as file:
    write(file)
  os.replace(partial, target)
