"""Commands of other programs, printed before they run: what the launchers of clouds are made of.

Under `--dry_run` they are only printed, so that what is printed may be copied into a shell. `arguments` splits a
launcher's command line into its verb, its flags and, behind `--`, the experiment's own line.
"""
import dataclasses
import shlex
import subprocess
import sys


@dataclasses.dataclass(frozen=True)
class Ended:
  """A command that has ended: its exit code and what it wrote, standard output and error apart."""
  code: int
  out: str
  err: str


def arguments(argv: list[str]) -> tuple[str, list[str], list[str]]:
  """`PROGRAM [VERB] --flags -- LINE` as (verb or "", program and flags, line)."""
  cut = argv.index("--") if "--" in argv else len(argv)
  program, *given = argv[:cut]
  verb = [given.pop(0)] if given and not given[0].startswith("-") else [""]
  return verb[0], [program, *given], argv[cut + 1:]


@dataclasses.dataclass(frozen=True)
class Shell:
  """Runs commands, or only prints them."""
  dry_run: bool

  def show(self, command: list[str], ending: str = "") -> None:
    """Prints a command as a shell would take it."""
    print(f"{shlex.join(command)}{ending}", flush=True)

  def run(self, command: list[str], *, stdin: str | None = None, quiet: bool = False) -> Ended:
    """Runs a command and gives what it wrote back; quiet ones, which only look, are not printed unless dry.

    Raises:
      ValueError: the program is not installed.
    """
    if self.dry_run or not quiet:
      self.show(command)
    if self.dry_run:
      return Ended(0, "", "")
    try:
      done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
      raise ValueError(_missing(command)) from error
    return Ended(done.returncode, done.stdout, done.stderr)

  def check(self, command: list[str], *, doing: str, stdin: str | None = None) -> Ended:
    """`run`, for commands whose failure ends the launch.

    Raises:
      ValueError: the command failed; says what it was doing and its last words.
    """
    done = self.run(command, stdin=stdin)
    if done.code:
      raise ValueError(f"{doing} failed with exit code {done.code}: {last_words(done)}")
    return done

  def follow(self, command: list[str], line_read) -> int:
    """Runs a command and calls `line_read(line)` for each line as it comes, output and error together; its exit code.

    A command under `--dry_run` gives no lines and code 0.

    Raises:
      ValueError: the program is not installed.
    """
    self.show(command)
    if self.dry_run:
      return 0
    try:
      process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                 text=True, errors="replace")
    except FileNotFoundError as error:
      raise ValueError(_missing(command)) from error
    with process:
      try:
        for line in process.stdout:
          line_read(line.rstrip("\n"))
        return process.wait()
      finally:
        process.terminate()  # nothing to do where it has ended; an interrupt leaves it running otherwise


def last_words(ended: Ended) -> str:
  """The end of what a failed command said, for an error message."""
  words = (ended.err.strip() or ended.out.strip() or "it said nothing").splitlines()
  return " | ".join(words[-3:])


def note(text: str) -> None:
  """A line about progress, on standard error: standard output holds commands and what they print."""
  print(f"== {text}", file=sys.stderr, flush=True)


def _missing(command):
  return f"{command[0]} was not found; install it and log in, or look at the commands with --dry_run"
