"""The libraries of the extra `quality`, imported when a judge first needs one."""
import importlib

NAMES = ("rouge_score.rouge_scorer", "sacrebleu", "jsonschema", "referencing", "py3langid.langid")


def load(name: str):
  """The module `name`.

  Raises:
    ValueError: it is not installed; names the extra that holds it.
  """
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(f"--quality needs the package of {name!r}, which cannot be imported ({error}); install it with "
                     "pip install 'specjax[quality]', or leave --quality out") from error
